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
	statement, held, err := makeStatement(ctx, store, config.Book, options.Month, now)
	if err != nil {
		return err
	}
	if held.quarantined > 0 {
		fmt.Fprintf(notes, "note: %d rows are in quarantine and in no sum: see gpu-accounting verify --month %s\n", held.quarantined, statement.Period.Name)
	}
	if held.reviewUS > 0 {
		fmt.Fprintf(notes, "note: %s of GPU time need review before they are billed: who held it is known by steps that their node does not trust\n", hours(held.reviewUS))
	}
	return writeStatement(out, statement, options)
}

// reservations are what a statement's sums don't tell.
type reservations struct {
	quarantined int64 // rows that are in no sum
	reviewUS    int64 // held time that needs review
}

func makeStatement(ctx context.Context, store *sqlite.Store, book *billing.Book, month string, now time.Time) (billing.Statement, reservations, error) {
	period := billing.PeriodAt(now, book.Location)
	if month != "" {
		var err error
		if period, err = billing.ParsePeriod(month, book.Location); err != nil {
			return billing.Statement{}, reservations{}, err
		}
	}
	data, err := store.Period(ctx, period, now)
	if err != nil {
		return billing.Statement{}, reservations{}, err
	}
	statement, err := billing.Bill(book, period, data.Usage, data.Capacity)
	if err != nil {
		return billing.Statement{}, reservations{}, fmt.Errorf("bill %s: %w", period.Name, err)
	}
	return statement, reservations{data.Quarantined, data.ReviewUS}, nil
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
