package who

import (
	"os"
	"strings"
	"testing"
)

func TestLocalHost(t *testing.T) {
	own, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"", "127.0.0.1", "127.0.0.1:10094", "[::1]:10094", "[::1]", "::1", "localhost", "LOCALHOST:1", "localhost.", "gpu01:10094", "a.localhost", own, strings.ToUpper(own) + ":1"} {
		if !LocalHost(host) {
			t.Errorf("%q is not taken for this machine", host)
		}
	}
	for _, host := range []string{"evil.example", "evil.example:10094", "127.0.0.1.evil.example", "localhost.evil.example:1", "evil.example.", own + ".evil.example"} {
		if LocalHost(host) {
			t.Errorf("%q is taken for this machine", host)
		}
	}
}
