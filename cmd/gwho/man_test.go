package main

import (
	"flag"
	"fmt"
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
	more, err := os.ReadFile("../../packaging/man/gwho.md")
	if err != nil {
		t.Fatal(err)
	}
	command.Long += "\n\n" + string(more)
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

// TestEveryExitCodeHasAScript looks for each exit code in the scripts, in --help
// and in the manual for people.
func TestEveryExitCodeHasAScript(t *testing.T) {
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
	for _, code := range []int{exitOK, exitNoGPU, exitUsage, exitMissing, exitNotFree} {
		tried := fmt.Sprintf("\ncode %d gwho", code)
		if code == exitOK {
			tried = "\nexec gwho"
		}
		if !strings.Contains(all.String(), tried) {
			t.Errorf("no script ends with %d", code)
		}
		if !strings.Contains(long, fmt.Sprintf("%d ", code)) {
			t.Errorf("--help does not name exit code %d", code)
		}
		if !strings.Contains(string(document), fmt.Sprintf("\n| %d |", code)) {
			t.Errorf("docs/gwho.md does not name exit code %d", code)
		}
	}
}

// TestCompletionOffersNoCommands: a name can be chosen to be one.
func TestCompletionOffersNoCommands(t *testing.T) {
	for word, want := range map[string]bool{
		"alice": true, "vision/prep/main": true, "ollama.service": true, "uid:4711": true, "a@b": true, "张伟": true, "train-2_x+y": true,
		"$(reboot)": false, "`reboot`": false, "a;reboot": false, "two words": false, "tab\tname": false, "line\nname": false,
		"--socket=x": false, `CORP\alice`: false, "a'b": false, "a\xffb": false, "a*": false,
	} {
		if harmless(word) != want {
			t.Errorf("harmless(%q) = %t", word, !want)
		}
	}
}
