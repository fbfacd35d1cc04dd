package text

import (
	"testing"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestClean(t *testing.T) {
	for _, test := range []struct {
		name, in, want string
		max            int
	}{
		{"plain", "python3", "python3", 0},
		{"accents and spaces stay", "josé del río", "josé del río", 0},
		{"newline and NUL", "a\nb\x00c", "a\uFFFDb\uFFFDc", 0},
		{"not UTF-8", "a\xffb", "a\uFFFDb", 0},
		{"C1 control", "a\u009bb", "a\uFFFDb", 0},
		{"direction override", "a\u202eb", "a\uFFFDb", 0},
		{"cut between runes", "aé", "a", 2},
	} {
		if got := Clean(test.in, test.max); got != test.want {
			t.Errorf("%s: Clean(%q) = %q, want %q", test.name, test.in, got, test.want)
		}
	}
}

func TestCleanIsAlwaysPrintableAndBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := string(rapid.SliceOf(rapid.Byte()).Draw(t, "in"))
		max := rapid.IntRange(1, 64).Draw(t, "max")
		got := Clean(in, max)
		if !utf8.ValidString(got) || len(got) > max {
			t.Fatalf("Clean(%q, %d) = %q", in, max, got)
		}
		for _, r := range got {
			if unsafe(r) {
				t.Fatalf("Clean(%q) kept %U", in, r)
			}
		}
		if again := Clean(got, max); again != got {
			t.Fatalf("not idempotent: %q then %q", got, again)
		}
	})
}
