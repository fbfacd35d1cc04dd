package main

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/text/unicode/bidi"
	"golang.org/x/text/width"
)

// maxMarks is how many combining marks in a row a name may have: enough for
// every script, too few to climb over the lines above.
const maxMarks = 2

// clean makes a name from outside safe to print: what a terminal would act on
// instead of showing (escapes, line breaks, changes of direction) is spelt out.
func clean(s string) string {
	var b strings.Builder
	marks := 0
	for i, r := range s {
		mark := unicode.In(r, unicode.Mn, unicode.Me)
		if mark {
			marks++
		} else {
			marks = 0
		}
		switch {
		case r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD"):
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case r < 0x80 && unicode.IsControl(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		case r > 0xFFFF && !unicode.IsGraphic(r):
			fmt.Fprintf(&b, `\U%08x`, r)
		// Zs other than the space itself can imitate an empty column.
		case !unicode.IsGraphic(r), r != ' ' && unicode.Is(unicode.Zs, r), mark && (i == 0 || marks > maxMarks):
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

// columns is how many columns of a terminal s takes.
func columns(s string) int {
	n := 0
	for _, r := range s {
		n += runeColumns(r)
	}
	return n
}

func runeColumns(r rune) int {
	switch {
	case r < 0x300: // nothing before this is wide or combines
		return 1
	case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		return 0
	case r >= 0x1160 && r <= 0x11FF: // vowels and finals of a Hangul syllable
		return 0
	}
	switch width.LookupRune(r).Kind() {
	case width.EastAsianWide, width.EastAsianFullwidth:
		return 2
	}
	return 1
}

// cut shortens s to at most n columns, with an ellipsis where it was cut.
func cut(s string, n int) string {
	if columns(s) <= n {
		return s
	}
	if n <= 0 {
		return ""
	}
	used := 0
	for i, r := range s {
		if used+runeColumns(r) > n-1 {
			return s[:i] + "…"
		}
		used += runeColumns(r)
	}
	return s
}

// wrap breaks s into lines of at most n columns, between words where it can.
// The further lines are indented like the first, and two more.
func wrap(s string, n int) []string {
	indent := len(s) - len(strings.TrimLeft(s, " ")) + 2
	if indent >= n/2 {
		indent = 0
	}
	var lines []string
	for {
		used, end, space := 0, len(s), -1
		for i, r := range s {
			if used += runeColumns(r); used > n {
				end = i
				break
			}
			if r == ' ' && strings.TrimLeft(s[:i], " ") != "" {
				space = i
			}
		}
		if end == len(s) || end == 0 {
			return append(lines, s)
		}
		if s[end] == ' ' {
			space = end
		}
		if space > 0 {
			end = space
		}
		lines = append(lines, strings.TrimRight(s[:end], " "))
		rest := strings.TrimLeft(s[end:], " ")
		if rest == "" {
			return lines
		}
		s = strings.Repeat(" ", indent) + rest
	}
}

// leftToRight is a mark of no width: after a name that runs from right to left
// it keeps a terminal from turning the columns behind it around.
const leftToRight = "\u200e"

// pad brings s to n columns, on the right or, for figures, on the left.
func pad(s string, n int, right bool) string {
	space := strings.Repeat(" ", max(0, n-columns(s)))
	if strings.ContainsFunc(s, runsRightToLeft) {
		s += leftToRight
	}
	if right {
		return space + s
	}
	return s + space
}

func runsRightToLeft(r rune) bool {
	if r < 0x590 {
		return false
	}
	properties, _ := bidi.LookupRune(r)
	return properties.Class() == bidi.R || properties.Class() == bidi.AL
}
