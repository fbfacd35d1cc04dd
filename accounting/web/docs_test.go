package web

import (
	"os"
	"strings"
	"testing"

	"gpuledger/exporter/who"
)

// TestDocumentNamesEveryMetricAndPath holds docs/accounting.md to what is served.
func TestDocumentNamesEveryMetricAndPath(t *testing.T) {
	data, err := os.ReadFile("../../docs/accounting.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(data)
	for name, family := range families {
		if !strings.HasPrefix(name, "gpu_accounting_") {
			continue // go_… and process_…, as everywhere
		}
		if !strings.Contains(text, "| `"+name+"` | "+family.kind+" |") {
			t.Errorf("metric %s, a %s, is not in the document", name, family.kind)
		}
	}
	for _, path := range []string{"/", "/-/healthy", "/-/ready", "/metrics", "/api/v1/report", "/api/v1/status", who.NodesPath} {
		if !strings.Contains(text, "`"+path+"`") && !strings.Contains(text, "`"+path+"?") {
			t.Errorf("path %s is not in the document", path)
		}
	}
	if !strings.Contains(text, TokenHeader) {
		t.Errorf("the header %s is not in the document", TokenHeader)
	}
}
