package exporter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"gpuledger/exporter/owner"
	"gpuledger/exporter/suspects"
	"gpuledger/exporter/web"
)

// DefaultDockerSocket is where Docker listens unless it is told otherwise.
const DefaultDockerSocket = "/run/docker.sock"

// Config is the exporter's YAML file.
type Config struct {
	Access   web.AccessConfig `yaml:"access"`
	Owner    owner.Config     `yaml:"owner"`
	Runtimes RuntimesConfig   `yaml:"runtimes"`
	Suspects SuspectsConfig   `yaml:"suspects"`
}

// SuspectsConfig says when it is looked for who has memory that no listed
// process explains.
type SuspectsConfig struct {
	// UnexplainedMemoryMiB is from how much such memory on a card on; 0 switches
	// it off.
	UnexplainedMemoryMiB uint64 `yaml:"unexplained_memory_mib"`
}

func (c SuspectsConfig) thresholdBytes() uint64 { return min(c.UnexplainedMemoryMiB, 1<<40) << 20 }

// RuntimesConfig says where container engines are asked for names.
type RuntimesConfig struct {
	// Docker are the paths of Docker's sockets; none switches it off.
	Docker []string `yaml:"docker"`
}

// DefaultConfig is the configuration without a file.
func DefaultConfig() Config {
	return Config{
		Owner: owner.DefaultConfig(), Runtimes: RuntimesConfig{Docker: []string{DefaultDockerSocket}},
		Suspects: SuspectsConfig{UnexplainedMemoryMiB: suspects.DefaultThreshold >> 20},
	}
}

// maxConfigBytes bounds what is read of a configuration file.
const maxConfigBytes = 4 << 20

// LoadConfig reads a configuration file over the defaults. Unknown keys and
// wrong values are errors that name file, line and column. An empty path is
// the default configuration.
func LoadConfig(path string) (Config, error) {
	config := DefaultConfig()
	if path == "" {
		return config, nil
	}
	file, err := os.Open(path)
	if err != nil {
		return config, fmt.Errorf("read configuration: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxConfigBytes))
	if err != nil {
		return config, fmt.Errorf("read configuration: %w", err)
	}
	if err := decode(text, &config); err != nil {
		return config, fmt.Errorf("%s%w", path, err)
	}
	if err := config.Owner.Validate(); err != nil {
		return config, fmt.Errorf("%s: %w", path, err)
	}
	return config, nil
}

// decode lays text over config. The error begins with a colon and, where the
// fault has a place, line and column.
func decode(text []byte, config *Config) error {
	// A document without a value would empty what it is laid over.
	text = bytes.TrimPrefix(text, []byte("\xef\xbb\xbf")) // some editors put a byte order mark there
	document, err := parser.ParseBytes(text, 0)
	if err == nil {
		if second := secondDocument(text); second != nil {
			return fmt.Errorf(":%d:%d: a second document begins here: a configuration is one document", second.Position.Line, second.Position.Column)
		}
	}
	if err == nil && (len(document.Docs) == 0 || document.Docs[0].Body == nil || document.Docs[0].Body.Type() == ast.NullType) {
		return nil
	}
	if err == nil {
		err = yaml.NewDecoder(bytes.NewReader(text), yaml.Strict()).Decode(config)
	}
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
