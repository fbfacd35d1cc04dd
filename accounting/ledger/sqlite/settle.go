package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

// insertion is one transaction's inserting of rows.
type insertion struct {
	tx           *sql.Tx
	known        *dimensions
	insert, find *sql.Stmt
	ingest       int64
	source       string
	now          time.Time
}

// row lets an admitted row in. Where there is one with its key, the two are
// settled, together with those of the key that are in quarantine.
func (in *insertion) row(ctx context.Context, row *usage.Row) (ledger.Result, error) {
	n, err := in.known.of(ctx, in.tx, row)
	if err != nil {
		return ledger.Result{}, err
	}
	bucket := row.Bucket.Unix()
	done, err := in.insert.ExecContext(ctx, append([]any{bucket, n.device, n.holder, n.run, n.placement, n.attribution, in.ingest}, amounts(row)...)...)
	if err != nil {
		return ledger.Result{}, err
	}
	if count, err := done.RowsAffected(); err != nil || count == 1 {
		return ledger.Result{Inserted: count}, err
	}
	there := *row
	at := n
	var source string
	if err := in.find.QueryRowContext(ctx, bucket, n.device, n.holder, n.run).Scan(append([]any{&at.placement, &at.attribution, &source}, amountsInto(&there)...)...); err != nil {
		return ledger.Result{}, err
	}
	if at == n && there == *row {
		return ledger.Result{Duplicate: 1}, nil
	}
	if err := newLookup(ctx, in.tx).fill(&there, at); err != nil {
		return ledger.Result{}, err
	}
	return in.settle(ctx, row, &there, source)
}

// settle decides between a row that comes, the one that is there, and those of
// the same key in quarantine.
func (in *insertion) settle(ctx context.Context, row, there *usage.Row, source string) (ledger.Result, error) {
	before, err := in.contradicting(ctx, row)
	if err != nil {
		return ledger.Result{}, err
	}
	counted, aside := ledger.Settle(append([]usage.Row{*there, *row}, before...))
	wanted := make(map[[32]byte]bool, len(aside))
	result := ledger.Result{Duplicate: 1}
	for i := range aside {
		one := &aside[i]
		wanted[rowDigest(ledger.ReasonConflict, one)] = true
		from := in.source
		if one.SameContent(there) {
			from = source
		}
		added, err := quarantineRow(ctx, in.tx, one, &ledger.Fault{
			Reason: ledger.ReasonConflict,
			Detail: fmt.Sprintf("it contradicts the row with the same key that is counted, in %s", difference(one, &counted)),
		}, from, in.now)
		if err != nil {
			return ledger.Result{}, err
		}
		result.Quarantined += added
		if one.SameContent(row) {
			result.Duplicate = 0
		}
	}
	for i := range before {
		digest := rowDigest(ledger.ReasonConflict, &before[i])
		if wanted[digest] {
			continue
		}
		// A later state of it has come since, and is counted or kept aside itself.
		if _, err := in.tx.ExecContext(ctx, `DELETE FROM quarantine WHERE digest = ?`, digest[:]); err != nil {
			return ledger.Result{}, fmt.Errorf("release a row: %w", err)
		}
	}
	if !counted.SameContent(there) {
		n, err := in.known.of(ctx, in.tx, &counted)
		if err != nil {
			return ledger.Result{}, err
		}
		arguments := append([]any{n.placement, n.attribution, in.ingest}, amounts(&counted)...)
		if _, err := in.tx.ExecContext(ctx, replaceUsage, append(arguments, counted.Bucket.Unix(), n.device, n.holder, n.run)...); err != nil {
			return ledger.Result{}, err
		}
		result.Inserted, result.Duplicate = 1, 0
	}
	return result, nil
}

// contradicting are the rows in quarantine that contradict the one that is
// counted for a row's key.
func (in *insertion) contradicting(ctx context.Context, row *usage.Row) (list []usage.Row, err error) {
	key := ledger.KeyDigest(&row.Key)
	lines, err := in.tx.QueryContext(ctx, `SELECT line FROM quarantine WHERE row_key = ? AND reason = ?`, key[:], ledger.ReasonConflict)
	if err != nil {
		return nil, fmt.Errorf("rows in quarantine: %w", err)
	}
	defer func() { err = errors.Join(err, lines.Close()) }()
	for lines.Next() {
		var line string
		if err := lines.Scan(&line); err != nil {
			return nil, fmt.Errorf("rows in quarantine: %w", err)
		}
		one, err := usage.NewDecoder(strings.NewReader(line + "\n")).Decode()
		if err != nil {
			return nil, fmt.Errorf("rows in quarantine: %w", err)
		}
		list = append(list, one)
	}
	return list, lines.Err()
}

// difference names what is not the same in two rows with the same key.
func difference(a, b *usage.Row) string {
	var names []string
	for _, field := range []struct {
		name string
		same bool
	}{
		{"node", a.Node == b.Node},
		{"card", a.Card == b.Card},
		{"index", a.Index == b.Index},
		{"model", a.Model == b.Model},
		{"profile", a.Profile == b.Profile},
		{"amounts", a.Amounts == b.Amounts},
		{"peaks", a.PeakMemoryBytes == b.PeakMemoryBytes && a.PeakTemperatureC == b.PeakTemperatureC},
		{"estimated", a.Estimated == b.Estimated},
		{"attributed_by", a.AttributedBy == b.AttributedBy},
		{"review", a.Review == b.Review},
	} {
		if !field.same {
			names = append(names, field.name)
		}
	}
	return strings.Join(names, ", ")
}

// amounts are a row's numbers in the order of the table's columns.
func amounts(row *usage.Row) []any {
	return []any{
		row.GPUUS, row.ShareUS, row.HeldUS, row.ReservedUS, row.ActiveUS, row.ActiveKnownUS, row.IdleUS,
		row.MemoryKiBSeconds, row.MemoryKnownUS, row.EnergyMJ, row.PeakMemoryBytes, row.PeakTemperatureC, row.Estimated, row.Review,
	}
}

func amountsInto(row *usage.Row) []any {
	return []any{
		&row.GPUUS, &row.ShareUS, &row.HeldUS, &row.ReservedUS, &row.ActiveUS, &row.ActiveKnownUS, &row.IdleUS,
		&row.MemoryKiBSeconds, &row.MemoryKnownUS, &row.EnergyMJ, &row.PeakMemoryBytes, &row.PeakTemperatureC, &row.Estimated, &row.Review,
	}
}
