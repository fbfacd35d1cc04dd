package exporter

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestLoadConfig(t *testing.T) {
	for _, test := range []struct{ name, text, problem string }{
		{"empty", "", ""},
		{"comments only", "# nothing yet\n", ""},
		{"whole", "access: {allowed_uids: [1001]}\nowner:\n  rules: [{name: r, kind: [docker], user: alice}]\nruntimes: {docker: []}\n", ""},
		{"byte order mark", "\ufeffowner: {}\r\n", ""},
		{"one document with marks", "---\nowner: {}\n...\n", ""},
		{"second document", "---\nowner: {}\n---\nbogus: 1\n", ":3:1: a second document"},
		{"second document after an empty one", "---\n---\nbogus: 1\n", ":2:1: a second document"},
		{"second document after an end", "owner: {}\n...\nbogus: 1\n", ": a second document"},
		{"directive", "%YAML 1.2\n---\nowner: {}\n", ""},
		{"unknown key", "access:\n  allowed_uid: [1]\n", ":2:3: unknown field"},
		{"wrong type", "access:\n  allowed_uids: [alice]\n", ":2:18: "},
		{"no yaml", "access: {\n", ":1:"},
		{"step", "owner: {steps: [magic]}\n", ":1:17: owner.steps[0]: \"magic\""},
		{"step twice", "owner:\n  steps:\n    - label\n    - label\n", ":4:7: owner.steps[1]"},
		{"trusted step", "owner:\n  trusted_steps: [label, x]\n", ":2:26: owner.trusted_steps[1]"},
		{"rule without a name", "owner:\n  rules:\n    - name: a\n      user: b\n    - user: c\n", ":5:7: owner.rules[1]"},
		{"rule without effect", "owner:\n  rules:\n    - name: a\n      kind: [docker]\n", ":3:7: owner.rules[0]"},
		{"user of a rule", "owner:\n  rules:\n    - name: a\n      user: uid:x\n", ":4:13: owner.rules[0].user"},
		{"namespace", "owner:\n  namespace_users:\n    - {namespace: a, user: \"*\"}\n", ":3:19: owner.namespace_users[0].namespace"},
		{"source", "owner:\n  class_sources: [slurm:user]\n", ":2:19: owner.class_sources[0]"},
		{"key of a rule", "owner:\n  rules:\n    - {name: a, user: b, labels: {}}\n", ":3:26: unknown field"},
		{"marks before", "\ufeff---\nowner: {steps: [magic]}\n", ":2:17: owner.steps[0]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "exporter.yml")
			if err := os.WriteFile(path, []byte(test.text), 0o600); err != nil {
				t.Fatal(err)
			}
			config, err := LoadConfig(path)
			switch {
			case test.problem == "" && err != nil:
				t.Fatal(err)
			case test.problem == "" && len(config.Owner.OwnerLabels) == 0:
				t.Error("the defaults are lost")
			case test.problem != "" && (err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), test.problem)):
				t.Errorf("got %v, want one that names %s and %q", err, path, test.problem)
			}
		})
	}
}
