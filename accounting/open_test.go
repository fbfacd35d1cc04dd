package accounting

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTheLedgersFolderIsPrivate(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "gpu-accounting")
	for range 2 { // the second time it is there
		if err := makeLedgerFolder(folder); err != nil {
			t.Fatal(err)
		}
	}
	info, err := os.Stat(folder)
	if err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	// Where it can't be made, the error says what to do.
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	err = makeLedgerFolder(filepath.Join(file, "gpu-accounting"))
	if err == nil || !strings.Contains(err.Error(), file) || !strings.Contains(err.Error(), "ledger.url") {
		t.Error(err)
	}
	if path, err := sqlitePath(DefaultLedger, "/"); path != defaultLedgerPath || err != nil {
		t.Errorf("the default ledger is %q, %v", path, err)
	}
}
