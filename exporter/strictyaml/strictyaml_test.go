package strictyaml

import (
	"strings"
	"testing"
)

func TestDecode(t *testing.T) {
	type config struct {
		Kept  string `yaml:"kept"`
		Given int    `yaml:"given"`
	}
	for _, test := range []struct{ name, text, problem string }{
		{"empty", "", ""}, {"nothing", "null\n", ""}, {"comment", "# nothing\n", ""}, {"marks", "---\n---", ":2:1: a second document"},
		{"value", "given: 1\n", ""}, {"byte order mark", "\ufeffgiven: 1\n", ""},
		{"unknown key", "given: 1\nother: 2\n", ":2:1: unknown field"}, {"wrong type", "given: x\n", ":1:8: "},
		{"an empty document first", "---\n---\nbogus: 1\n", ":2:1: a second document"}, {"after an end", "given: 1\n...\nbogus: 1\n", ": a second document"},
		{"no yaml", "given: {\n", ":1:"}, {"twice", "given: 1\ngiven: 2\n", ":2:1: "},
	} {
		c := config{Kept: "default"}
		err := Decode([]byte(test.text), &c)
		switch {
		case test.problem == "" && err != nil:
			t.Errorf("%s: %v", test.name, err)
		case test.problem == "" && (c.Kept != "default" || strings.Contains(test.text, "given: 1") != (c.Given == 1)):
			t.Errorf("%s: %+v", test.name, c)
		case test.problem != "" && (err == nil || !strings.HasPrefix(err.Error(), test.problem) && !strings.Contains(err.Error(), test.problem)):
			t.Errorf("%s: %v, want %q", test.name, err, test.problem)
		}
	}
}
