package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What debug cgroup prints is the table's answer, with the table's columns for
// keys and no others.
func TestDebugCgroupPrintsTheTable(t *testing.T) {
	for name, atLeast := range map[string]int{"cgroups.tsv": 146, "further.tsv": 40} {
		data, err := os.ReadFile(filepath.Join("../../exporter/cgroup/testdata", name))
		if err != nil {
			t.Fatal(err)
		}
		unescape := strings.NewReplacer(`\\`, `\`, `\n`, "\n")
		lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
		header := strings.Split(lines[0], "\t")
		if len(lines)-1 < atLeast {
			t.Fatalf("%s has only %d rows", name, len(lines)-1)
		}
		for _, line := range lines[1:] {
			row := map[string]string{}
			for i, cell := range strings.Split(line, "\t") {
				row[header[i]] = unescape.Replace(cell)
			}
			content := row["content"]
			var out, errs bytes.Buffer
			if code := run(context.Background(), []string{"debug", "cgroup", "-"}, strings.NewReader(content+"\n"), &out, &errs); code != exitOK {
				t.Fatalf("row %s: code %d: %s", row["id"], code, errs.String())
			}
			got := map[string]string{}
			if err := json.Unmarshal(out.Bytes(), &got); err != nil {
				t.Fatalf("row %s: %v\n%s", row["id"], err, out.String())
			}
			for _, column := range header {
				if !slices.Contains([]string{"id", "category", "content", "note"}, column) && got[column] != row[column] {
					t.Errorf("row %s: %s = %q, want %q\n%s", row["id"], column, got[column], row[column], content)
				}
			}
			for key := range got {
				if !slices.Contains(header, key) {
					t.Errorf("row %s: %q is no column of the table", row["id"], key)
				}
			}
		}
	}
}
