package accounting

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/accounting/report"
)

// ErrFormat is the error of a report format that there is not.
var ErrFormat = errors.New("the format is none of csv, json, table")

// ReportOptions say which report is wanted.
type ReportOptions struct {
	Month  string // YYYY-MM; the present month of the book's time zone, if empty
	Format string // csv, json or table
	BOM    bool   // csv: begin with a byte order mark
}

// Report writes a month's statement. What a reader of it must know beside,
// such as rows in quarantine, goes to notes.
func Report(ctx context.Context, config *Config, options ReportOptions, now time.Time, out, notes io.Writer) (err error) {
	store, err := openLedger(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	statement, quarantined, err := makeStatement(ctx, store, config.Book, options.Month, now)
	if err != nil {
		return err
	}
	if quarantined > 0 {
		fmt.Fprintf(notes, "note: %d rows are in quarantine and in no sum: see gpu-accounting verify --month %s\n", quarantined, statement.Period.Name)
	}
	return writeStatement(out, statement, options)
}

func makeStatement(ctx context.Context, store *sqlite.Store, book *billing.Book, month string, now time.Time) (billing.Statement, int64, error) {
	period := billing.PeriodAt(now, book.Location)
	if month != "" {
		var err error
		if period, err = billing.ParsePeriod(month, book.Location); err != nil {
			return billing.Statement{}, 0, err
		}
	}
	data, err := store.Period(ctx, period, now)
	if err != nil {
		return billing.Statement{}, 0, err
	}
	statement, err := billing.Bill(book, period, data.Usage, data.Capacity)
	if err != nil {
		return billing.Statement{}, 0, fmt.Errorf("bill %s: %w", period.Name, err)
	}
	return statement, data.Quarantined, nil
}

func writeStatement(out io.Writer, statement billing.Statement, options ReportOptions) error {
	switch options.Format {
	case "csv":
		return report.WriteCSV(out, statement, report.Options{BOM: options.BOM})
	case "json":
		return report.WriteJSON(out, statement)
	case "table":
		return report.WriteTable(out, statement)
	}
	return fmt.Errorf("%q: %w", options.Format, ErrFormat)
}
