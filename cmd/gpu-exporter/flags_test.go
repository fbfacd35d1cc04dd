package main

import (
	"bytes"
	"strings"
	"testing"
)

// TestNonsenseIsRefused wants an end at once that names the flag.
func TestNonsenseIsRefused(t *testing.T) {
	for _, arguments := range [][]string{
		{"--sample.interval=0"},
		{"--sample.interval=-1s"},
		{"--sample.interval=1"},
		{"--sample.max-gap=1ms"},
		{"--journal.max-size=0"},
		{"--metrics.max-workloads=-5"},
		{"--metrics.max-workloads=many"},
		{"--log.level=loud"},
		{"--bogus"},
		{"extra"},
	} {
		var stderr bytes.Buffer
		code := run(t.Context(), append(arguments, "--state.dir="+t.TempDir()), nil, &stderr, &stderr)
		flag, _, _ := strings.Cut(arguments[0], "=")
		if code != exitUsage || !strings.Contains(stderr.String(), flag) {
			t.Errorf("%v ended with %d and said:\n%s", arguments, code, stderr.String())
		}
	}
}
