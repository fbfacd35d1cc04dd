package accounting

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"gpuledger/accounting/ledger/sqlite"
)

// openLedger opens the configured ledger. The folder of the default one is made
// if it is missing; a folder that somebody names is not, it may be a slip of
// the pen or a disk that isn't mounted.
func openLedger(ctx context.Context, config *Config) (*sqlite.Store, error) {
	if config.LedgerPath == defaultLedgerPath {
		if err := makeLedgerFolder(filepath.Dir(config.LedgerPath)); err != nil {
			return nil, err
		}
	}
	return sqlite.Open(ctx, config.LedgerPath)
}

// makeLedgerFolder makes a folder that is its owner's alone: who used what is
// not public.
func makeLedgerFolder(folder string) error {
	err := os.Mkdir(folder, 0o700)
	if err == nil || errors.Is(err, os.ErrExist) {
		return nil
	}
	return fmt.Errorf("make the ledger's folder: %w: run gpu-accounting as root, make %s for the user who runs it, or name another ledger in ledger.url", err, folder)
}
