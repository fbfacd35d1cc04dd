package doctor

import (
	"strings"
	"testing"

	"gpuledger/exporter"
)

// TestOnlySocketsAreTakenForSockets: not every list of the section is one.
func TestOnlySocketsAreTakenForSockets(t *testing.T) {
	found := socketsOf(exporter.DefaultConfig().Runtimes)
	for kind, sockets := range found {
		for _, socket := range sockets {
			if !strings.HasSuffix(socket, ".sock") {
				t.Errorf("%s: %s is taken for a socket", kind, socket)
			}
		}
	}
	if len(found) < 4 {
		t.Errorf("only %v", found)
	}
}
