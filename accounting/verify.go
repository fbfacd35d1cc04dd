package accounting

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/ledger"
)

// VerifyOptions say what is to be proved.
type VerifyOptions struct {
	Month string // YYYY-MM of the book's time zone; everything, if empty
}

// ErrNotSound is the error of a ledger in which something is wrong.
var ErrNotSound = errors.New("the ledger is not sound")

// maxShown bounds how many findings are written out.
const maxShown = 1000

// Verify proves every bucket of every card and writes what it found. It returns
// ErrNotSound if anything is over-full, overlapping, quarantined or damaged.
func Verify(ctx context.Context, config *Config, options VerifyOptions, now time.Time, out io.Writer) (err error) {
	var span ledger.Span
	if options.Month != "" {
		period, err := billing.ParsePeriod(options.Month, config.Book.Location)
		if err != nil {
			return err
		}
		span = ledger.Span{From: period.Start, To: period.End}
	}
	store, err := openLedger(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	if err := store.Check(ctx); err != nil {
		return err
	}
	audit, err := store.Audit(ctx, span, now)
	if err != nil {
		return err
	}
	quarantined, count, err := store.Quarantined(ctx, span, maxShown)
	if err != nil {
		return err
	}
	if _, err := out.Write(verification(audit, quarantined, count)); err != nil {
		return err
	}
	if len(audit.Findings) > 0 || count > 0 {
		return fmt.Errorf("%w: %d findings, %d rows in quarantine", ErrNotSound, len(audit.Findings), count)
	}
	return nil
}

func verification(audit ledger.Audit, quarantined []ledger.Quarantined, count int64) []byte {
	var out bytes.Buffer
	for i, finding := range audit.Findings {
		if i == maxShown {
			fmt.Fprintf(&out, "and %d findings more\n", len(audit.Findings)-maxShown)
			break
		}
		fmt.Fprintln(&out, finding)
	}
	for _, q := range quarantined {
		fmt.Fprintf(&out, "quarantined (%s): %s; from %q on %s\n", q.Reason, q.Detail, q.Source, q.FirstSeen.Format(time.RFC3339))
	}
	if more := count - int64(len(quarantined)); more > 0 {
		fmt.Fprintf(&out, "and %d rows more in quarantine\n", more)
	}
	fmt.Fprintf(&out, "from        %s\nto          %s\n", audit.Span.From.UTC().Format(time.RFC3339), audit.Span.To.UTC().Format(time.RFC3339))
	fmt.Fprintf(&out, "rows        %d\ncards       %d\nbuckets     %d\n", audit.Rows, audit.Cards, audit.Buckets)
	for _, line := range []struct {
		name string
		us   int64
	}{
		{"held", audit.HeldUS}, {"idle", audit.IdleUS}, {"down", audit.DownUS}, {"unobserved", audit.UnobservedUS}, {"capacity", audit.CapacityUS},
	} {
		fmt.Fprintf(&out, "%-12s%s\n", line.name, hours(line.us))
	}
	if audit.OverFullUS > 0 {
		fmt.Fprintf(&out, "%-12s%s more than the time there was\n", "over-full", hours(audit.OverFullUS))
	}
	if audit.ReviewUS > 0 {
		fmt.Fprintf(&out, "%-12s%s of the held time are attributed by steps that their node does not trust\n", "review", hours(audit.ReviewUS))
	}
	fmt.Fprintf(&out, "quarantined %d\nhash        %s\n", count, audit.ContentHash)
	return out.Bytes()
}

// hours writes microseconds as hours, all their digits: two sums that differ
// must look different.
func hours(us int64) string {
	const hour = 3600_000_000
	text := fmt.Sprintf("%d", us/hour)
	if rest := us % hour; rest != 0 {
		text += fmt.Sprintf(" h %d.%06d s", rest/1_000_000, rest%1_000_000)
		return text
	}
	return text + " h"
}
