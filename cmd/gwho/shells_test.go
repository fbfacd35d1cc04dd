package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"gpuledger/lab/labtest"
)

// TestCompletionInShells gives each shell its script, and lets fish, which can be
// asked without a terminal, complete words by it.
func TestCompletionInShells(t *testing.T) {
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	exporterAt(t, socket, "good")
	for _, shell := range []string{"bash", "zsh", "fish"} {
		t.Run(shell, func(t *testing.T) {
			if _, err := exec.LookPath(shell); err != nil {
				labtest.Missing(t, shell)
			}
			script, err := exec.Command("gwho", "completion", shell).Output()
			if err != nil || len(script) == 0 {
				t.Fatalf("no script: %v", err)
			}
			path := filepath.Join(dir, shell)
			if err := os.WriteFile(path, script, 0o644); err != nil {
				t.Fatal(err)
			}
			if output, err := exec.Command(shell, "-n", path).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, output)
			}
			if shell != "fish" {
				return
			}
			fish := exec.Command("fish", "-c", `source $argv[1]; complete -C "gwho --socket $argv[2] "`, path, socket)
			fish.Env = append(os.Environ(), "HOME="+dir)
			words, err := fish.CombinedOutput()
			if err != nil {
				t.Fatalf("%v: %s", err, words)
			}
			for _, word := range []string{"alice\tuser\n", "1\tNVIDIA H200\n", "train\tdocker of alice\n"} {
				if !strings.Contains(string(words), word) {
					t.Errorf("%q is not among\n%s", word, words)
				}
			}
		})
	}
}
