// Package text makes strings from outside safe to show.
//
// Process names, unit names, labels and account names are bytes that somebody
// else chose. They are cleaned once, where they enter, so that no label, row
// or line of output can be broken by them.
package text

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// Clean returns s as valid UTF-8 without control characters, at most max
// bytes long (cut between runes; max <= 0 means no bound). Bytes that are not
// UTF-8 and control characters become U+FFFD, so that names that differ only
// in them stay as visible as they can be.
func Clean(s string, max int) string {
	if !clean(s) {
		s = strings.Map(func(r rune) rune {
			if unsafe(r) {
				return utf8.RuneError
			}
			return r
		}, strings.ToValidUTF8(s, string(utf8.RuneError)))
	}
	if max <= 0 || len(s) <= max {
		return s
	}
	for max > 0 && !utf8.RuneStart(s[max]) {
		max--
	}
	return s[:max]
}

// unsafe reports control characters, line and paragraph separators and the
// invisible formatting characters that can reorder a line of a terminal.
func unsafe(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || unicode.Is(unicode.Bidi_Control, r)
}

func clean(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; c < 0x20 || c >= 0x7f {
			return false
		}
	}
	return true
}
