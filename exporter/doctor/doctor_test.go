package doctor

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter"
)

func TestTextReport(t *testing.T) {
	var out bytes.Buffer
	if err := WriteText(&out, []Finding{
		ok("clock", "synchronised"),
		{Check: "nvml.cards", Level: Problem, Found: "0 of\x1b[31m 2", Consequence: "none", Remedy: "dmesg"},
		{Check: "x", Level: Warning, Found: "y"},
	}); err != nil {
		t.Fatal(err)
	}
	const want = `ok       clock       synchronised
problem  nvml.cards  0 of` + "\uFFFD" + `[31m 2
                     so:  none
                     do:  dmesg
warning  x           y

1 ok, 1 warning, 1 problem
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

// TestCheckThatHangs is a problem of its own, and holds nothing up.
func TestCheckThatHangs(t *testing.T) {
	h := &host{Options: Options{Patience: 10 * time.Millisecond}}
	release := make(chan struct{})
	defer close(release)
	found := bounded(t.Context(), h, check{"disk", func(context.Context, *host) []Finding { <-release; return nil }})
	if len(found) != 1 || found[0].Level != Problem || !strings.Contains(found[0].Found, "did not end") {
		t.Errorf("%+v", found)
	}
}

// TestEveryListOfSocketsIsAsked: an engine that the configuration learns of is
// asked without this package being told.
func TestEveryListOfSocketsIsAsked(t *testing.T) {
	config := exporter.RuntimesConfig{Docker: []string{"/run/a.sock"}}
	if got := socketsOf(config)["docker"]; len(got) != 1 || got[0] != "/run/a.sock" {
		t.Errorf("docker's sockets are %v", got)
	}
}

func TestHasTrace(t *testing.T) {
	for status, want := range map[string]bool{
		"Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n": true,
		"CapEff:\t0000000000080000\n":                       true,
		"CapEff:\t0000000000000004\n":                       false,
		"CapBnd:\t000001ffffffffff\n":                       false,
		"":                                                  false,
	} {
		if got := hasTrace(status); got != want {
			t.Errorf("%q: %v", status, got)
		}
	}
}

func TestReachable(t *testing.T) {
	for listen, want := range map[string]string{
		":10094": "127.0.0.1:10094", "0.0.0.0:1": "127.0.0.1:1", "[::]:1": "[::1]:1", "10.0.0.1:2": "10.0.0.1:2", "nonsense": "nonsense",
	} {
		if got := reachable(listen); got != want {
			t.Errorf("%s is asked at %s, want %s", listen, got, want)
		}
	}
}
