package accounting

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"gpuledger/accounting/ledger"
)

// yamlKeys are the keys of a configuration, its sections' and lists' too.
func yamlKeys(t reflect.Type) []string {
	for t.Kind() == reflect.Slice || t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	var keys []string
	for i := range t.NumField() {
		field := t.Field(i)
		if key, _, _ := strings.Cut(field.Tag.Get("yaml"), ","); key != "" && key != "-" {
			keys = append(keys, key)
			keys = append(keys, yamlKeys(field.Type)...)
		}
	}
	return keys
}

func document(t *testing.T, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../docs", name))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// TestDocumentNamesEveryKey holds docs/accounting.md to the keys of the
// configuration file, and docs/ledger.md to the reasons and findings.
func TestDocumentNamesEveryKey(t *testing.T) {
	text := document(t, "accounting.md")
	keys := yamlKeys(reflect.TypeFor[file]())
	if len(keys) < 30 {
		t.Errorf("only %d keys were found: %v", len(keys), keys)
	}
	for _, key := range keys {
		if !strings.Contains(text, "`"+key+"`") && !strings.Contains(text, "### "+key+"\n") {
			t.Errorf("key %s of the configuration file is not in the document", key)
		}
	}
	for _, value := range []string{DefaultConfigFile, DefaultListen, DefaultLedger} {
		if !strings.Contains(text, "`"+value+"`") {
			t.Errorf("default %s is not in the document", value)
		}
	}
	text = document(t, "ledger.md")
	for _, word := range []string{
		ledger.ReasonConflict, ledger.ReasonNode, ledger.ReasonFuture, ledger.ReasonPast, ledger.ReasonInvalid, ledger.ReasonAmounts,
		ledger.FindingOverFull, ledger.FindingOverlap,
	} {
		if !strings.Contains(text, "| `"+word+"` |") {
			t.Errorf("%s is not in the document of the ledger", word)
		}
	}
}

// TestDocumentedConfigurationIsOne loads the document's own example.
func TestDocumentedConfigurationIsOne(t *testing.T) {
	_, rest, _ := strings.Cut(document(t, "accounting.md"), "```yaml\n")
	example, _, found := strings.Cut(rest, "```")
	if !found {
		t.Fatal("the document has no example of a configuration file")
	}
	path := filepath.Join(t.TempDir(), "gpu-accounting.yml")
	if err := os.WriteFile(path, []byte(example), 0o600); err != nil {
		t.Fatal(err)
	}
	config, err := LoadConfig(path)
	if err != nil {
		t.Fatal(err)
	}
	if config.LedgerPath != defaultLedgerPath || config.Interval != DefaultInterval || len(config.Book.Accounts) != 1 || len(config.Targets) != 2 {
		t.Errorf("%+v", config)
	}
}
