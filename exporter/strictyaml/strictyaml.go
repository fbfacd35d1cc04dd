// Package strictyaml reads configuration files: an unknown key, a wrong value
// or a second document is an error that says where.
package strictyaml

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Decode lays the one document of text over into, which keeps what the
// document does not name. The error begins with a colon, for the file's name to
// stand before it, and where the fault has a place with line and column.
func Decode(text []byte, into any) error {
	document, err := Parse(text)
	if err != nil {
		return err
	}
	// A document without a value would empty what it is laid over.
	if len(document.Docs) == 0 || document.Docs[0].Body == nil || document.Docs[0].Body.Type() == ast.NullType {
		return nil
	}
	return placed(yaml.NewDecoder(bytes.NewReader(trim(text)), yaml.Strict()).Decode(into))
}

// Parse reads the one document of text as a tree, for those who look for the
// place of a value. Errors are as of Decode.
func Parse(text []byte) (*ast.File, error) {
	document, err := parser.ParseBytes(trim(text), 0)
	if err != nil {
		return nil, placed(err)
	}
	if second := secondDocument(trim(text)); second != nil {
		return nil, fmt.Errorf(":%d:%d: a second document begins here: a configuration is one document", second.Position.Line, second.Position.Column)
	}
	return document, nil
}

// trim takes off the byte order mark that some editors put before a text.
func trim(text []byte) []byte { return bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) }

func placed(err error) error {
	var located yaml.Error
	if errors.As(err, &located) && located.GetToken() != nil {
		at := located.GetToken().Position
		return fmt.Errorf(":%d:%d: %s", at.Line, at.Column, located.GetMessage())
	}
	if err != nil {
		return fmt.Errorf(": %w", err)
	}
	return nil
}

// secondDocument is where a second document begins, nil if there is one only.
// Decoders read the first, and parsers leave out what follows an empty one: it
// would be ignored.
func secondDocument(text []byte) *token.Token {
	begun, ended, directives := false, false, false
	for _, each := range lexer.Tokenize(string(text)) {
		switch {
		case each.Type == token.CommentType:
		case each.Type == token.DirectiveType && !begun:
			directives = true // up to the line that begins the document
		case each.Type == token.DocumentHeaderType && begun, ended:
			return each
		case each.Type == token.DocumentHeaderType:
			begun = true
		case each.Type == token.DocumentEndType:
			ended = true
		default:
			begun = begun || !directives
		}
	}
	return nil
}
