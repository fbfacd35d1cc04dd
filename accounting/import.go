package accounting

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

// Import reads usage rows from files into the ledger, "-" being in. Rows that
// are there already change nothing, so that an import that broke off is simply
// run again. It writes to out what became of each file, and ends with the first
// file that can't be read to its end.
//
// A file can't promise that nothing is missing before some time: an import
// leaves a node's Complete-Through as it is.
func Import(ctx context.Context, config *Config, files []string, now func() time.Time, in io.Reader, out io.Writer) (err error) {
	store, err := openLedger(ctx, config)
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
	// One goroutine reads while this one writes. What was read before a bad line
	// is written. A read that hangs, from a terminal say, is not waited for.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	batches := make(chan ledger.Batch, 2)
	read := make(chan error, 1)
	go func() {
		defer close(batches)
		read <- collect.ReadRows(in, func(rows []usage.Row, bad []ledger.BadLine) error {
			select {
			case batches <- ledger.Batch{Source: source, Rows: rows, BadLines: bad}:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	var total ledger.Result
	for {
		select {
		case <-ctx.Done():
			return total, ctx.Err()
		case batch, ok := <-batches:
			if !ok {
				return total, <-read
			}
			result, err := store.Insert(ctx, batch, now())
			if err != nil {
				return total, err
			}
			total = total.Plus(result)
		}
	}
}
