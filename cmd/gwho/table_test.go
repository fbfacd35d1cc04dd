package main

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/exporter/who"
)

var update = flag.Bool("update", false, "write golden files")

// answers are the JSON files of testdata/answers.
func answers(t *testing.T) map[string]who.Answer {
	t.Helper()
	paths, err := filepath.Glob("testdata/answers/*.json")
	if err != nil || len(paths) == 0 {
		t.Fatal("no testdata/answers: ", err)
	}
	out := map[string]who.Answer{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		var a who.Answer
		if err := json.Unmarshal(text, &a); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		out[strings.TrimSuffix(filepath.Base(path), ".json")] = a
	}
	return out
}

func TestTableGolden(t *testing.T) {
	zone := time.FixedZone("CST", 8*60*60)
	for name, a := range answers(t) {
		for variant, o := range map[string]tableOptions{
			"piped":   {Zone: zone},
			"verbose": {Zone: zone, Verbose: true},
			"narrow":  {Zone: zone, Width: 72, Colour: true},
		} {
			t.Run(name+"/"+variant, func(t *testing.T) {
				got := table(a, o)
				path := filepath.Join("testdata", "tables", name+"."+variant)
				if *update {
					if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(string(want), got); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"python3":              "python3",
		"训练 työ עברית":         "训练 työ עברית",
		"a\x1b[31mred\x1b[0m":  `a\x1b[31mred\x1b[0m`,
		"a\nb\tc\x00d\x7f":     `a\x0ab\x09c\x00d\x7f`,
		"a\u009b31m":           `a\u009b31m`,
		"\u202eesrever":        `\u202eesrever`,
		"zero\u200bwidth":      `zero\u200bwidth`,
		"bad\xffbyte":          `bad\xffbyte`,
		"real\ufffdrune":       "real\ufffdrune",
		"no\u00a0break":        `no\u00a0break`,
		"e\u0301":              "e\u0301",
		"\u0301start":          `\u0301start`,
		"z\u0301\u0301\u0301o": "z\u0301\u0301" + `\u0301o`,
		"\U000e0041tag":        `\U000e0041tag`,
	} {
		if got := clean(in); got != want {
			t.Errorf("clean(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestColumns(t *testing.T) {
	for in, want := range map[string]int{"": 0, "abc": 3, "训练": 4, "ｆｕｌｌ": 8, "e\u0301": 1, "한글": 4, "🚀": 2, "é": 1} {
		if got := columns(in); got != want {
			t.Errorf("columns(%q) = %d, want %d", in, got, want)
		}
	}
	for _, c := range []struct {
		in   string
		n    int
		want string
	}{{"abcdef", 6, "abcdef"}, {"abcdef", 4, "abc…"}, {"训练模型", 5, "训练…"}, {"训练模型", 4, "训…"}, {"abc", 0, ""}, {"abc", 1, "…"}} {
		if got := cut(c.in, c.n); got != c.want {
			t.Errorf("cut(%q, %d) = %q, want %q", c.in, c.n, got, c.want)
		}
	}
}

// Whatever names hold, a table has no more lines than it should, no byte that
// a terminal acts on, and no line wider than the terminal but the warnings.
func TestNamesCannotBreakTheTable(t *testing.T) {
	lines := func(s string) int { return strings.Count(s, "\n") }
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
		tame := func() who.Answer {
			return who.Answer{Node: "n", Cards: []who.Card{{State: who.CardUp, Name: "n", Devices: []who.Device{{Holders: []who.Holder{{User: "u"}}}}}}}
		}
		a := tame()
		a.Node = name.Draw(t, "node")
		card := &a.Cards[0]
		card.Name = name.Draw(t, "card")
		h := &card.Devices[0].Holders[0]
		h.User, h.Workload, h.Command, h.Kind = name.Draw(t, "user"), name.Draw(t, "workload"), name.Draw(t, "command"), name.Draw(t, "kind")
		width := rapid.IntRange(1, 200).Draw(t, "width")
		got := table(a, tableOptions{Width: width, Zone: time.UTC})
		if lines(got) != lines(table(tame(), tableOptions{Zone: time.UTC})) {
			t.Fatalf("a name made another number of lines:\n%s", got)
		}
		for line := range strings.Lines(got) {
			line = strings.TrimSuffix(line, "\n")
			if columns(line) > width {
				t.Fatalf("%d columns of %d: %q", columns(line), width, line)
			}
			for _, r := range line {
				if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 || r == 0x202e || r == 0x2028 {
					t.Fatalf("a terminal acts on %q of %q", r, line)
				}
			}
		}
	})
}

// What speaks against an answer stands beside the rule that gave it.
func TestDetailsSayWhatNeedsReview(t *testing.T) {
	for want, h := range map[string]who.Holder{
		"attributed by label": {AttributedBy: "label"},
		"attributed by name_prefix (needs review before billing)":                           {AttributedBy: "name_prefix", Review: true},
		"attributed by user_slice (something else names another user)":                      {AttributedBy: "user_slice", Disagrees: true},
		"attributed by x (needs review before billing) (something else names another user)": {AttributedBy: "x", Review: true, Disagrees: true},
	} {
		if got := details(h); len(got) != 1 || got[0] != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
