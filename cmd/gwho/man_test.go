package main

import (
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

const manPage = "../../packaging/man/gwho.1"

// TestManPage keeps the manual what the program says of itself.
func TestManPage(t *testing.T) {
	flag.Parse()
	var page strings.Builder
	command := newCommand(new(int), io.Discard, io.Discard)
	command.Version, command.DisableAutoGenTag = "", true
	// No date of its own: the page is the same whenever it is made.
	date := time.Unix(0, 0)
	if err := doc.GenMan(command, &doc.GenManHeader{Title: "GWHO", Section: "1", Source: "gpuledger", Manual: "gpuledger", Date: &date}, &page); err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(page.String(), `"Jan 1970"`, `""`, 1)
	if *update {
		if err := os.WriteFile(manPage, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if kept, err := os.ReadFile(manPage); err != nil || string(kept) != text {
		t.Errorf("%s is not what the program says of itself (%v): make docs", manPage, err)
	}
}

// TestEveryFlagHasAScript looks for each flag in the scripts and in the manual
// for people.
func TestEveryFlagHasAScript(t *testing.T) {
	scripts, err := filepath.Glob("testdata/scripts/*.txtar")
	if err != nil || len(scripts) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	var all strings.Builder
	for _, script := range scripts {
		text, err := os.ReadFile(script)
		if err != nil {
			t.Fatal(err)
		}
		all.Write(text)
	}
	document, err := os.ReadFile("../../docs/gwho.md")
	if err != nil {
		t.Fatal(err)
	}
	newCommand(new(int), io.Discard, io.Discard).Flags().VisitAll(func(f *pflag.Flag) {
		if !strings.Contains(all.String(), "--"+f.Name) && (f.Shorthand == "" || !strings.Contains(all.String(), " -"+f.Shorthand)) {
			t.Errorf("no script tries --%s", f.Name)
		}
		if !strings.Contains(string(document), "--"+f.Name) && (f.Shorthand == "" || !strings.Contains(string(document), "`-"+f.Shorthand)) {
			t.Errorf("docs/gwho.md does not name --%s", f.Name)
		}
	})
}
