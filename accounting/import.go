package accounting

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

// Import reads usage rows from files into the ledger, "-" being in. Rows that
// are there already change nothing, so that an import that broke off is simply
// run again. It writes to out what became of each file, and ends with the first
// file that can't be read to its end.
func Import(ctx context.Context, config *Config, files []string, now func() time.Time, in io.Reader, out io.Writer) (err error) {
	store, err := sqlite.Open(ctx, config.LedgerPath)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	for _, name := range files {
		result, err := importFile(ctx, store, name, now, in)
		fmt.Fprintf(out, "%s: %d rows new, %d there already, %d quarantined\n", name, result.Inserted, result.Duplicate, result.Quarantined)
		if err != nil {
			return fmt.Errorf("import %s: %w", name, err)
		}
	}
	return nil
}

func importFile(ctx context.Context, store *sqlite.Store, name string, now func() time.Time, in io.Reader) (ledger.Result, error) {
	source := "file:" + name
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return ledger.Result{}, err
		}
		defer file.Close()
		in = file
		if absolute, err := filepath.Abs(name); err == nil {
			source = "file:" + absolute
		}
	}
	// One goroutine reads while the other one writes. What was read before a bad
	// line is written.
	group, ctx := errgroup.WithContext(ctx)
	batches := make(chan ledger.Batch, 2)
	var readErr error
	group.Go(func() error {
		defer close(batches)
		readErr = collect.ReadRows(in, func(rows []usage.Row, bad []ledger.BadLine) error {
			select {
			case batches <- ledger.Batch{Source: source, Rows: rows, BadLines: bad}:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
		return nil
	})
	var total ledger.Result
	group.Go(func() error {
		for batch := range batches {
			result, err := store.Insert(ctx, batch, now())
			if err != nil {
				return err
			}
			total = total.Plus(result)
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return total, err
	}
	return total, readErr
}
