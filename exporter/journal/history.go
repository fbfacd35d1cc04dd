package journal

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"gpuledger/exporter/usage"
)

// Back gives take every row, final and open, of the buckets that start at or
// after from and before to, newest bucket first and in no order within one,
// until it wants no more. All is read within one read transaction: take must be
// quick, and the writer is not held up by it. begins is the earliest bucket that
// the journal has anything of, zero if it is empty; committed is up to where its
// rows tell everything. What waits in memory while the disk is full is not in it.
func (j *Journal) Back(ctx context.Context, from, to time.Time, take func(*usage.Row) (more bool, err error)) (begins, committed time.Time, err error) {
	j.serving.RLock()
	defer j.serving.RUnlock()
	if j.reader == nil {
		return time.Time{}, time.Time{}, fmt.Errorf("read journal: %w: %s could not be opened yet", ErrDiskFull, j.path)
	}
	if begins, committed, err = readBack(ctx, j.reader, from, to, take); err != nil {
		return time.Time{}, time.Time{}, fmt.Errorf("read journal: %w", j.explain(err))
	}
	return begins, committed, nil
}

// selectBack merges both tables; the final ones come by index, so that the first
// row is there at once however many follow.
const selectBack = "SELECT " + columns + " FROM final WHERE bucket >= ?1 AND bucket < ?2 UNION ALL SELECT " + columns +
	" FROM open WHERE bucket >= ?1 AND bucket < ?2 ORDER BY bucket DESC"

func readBack(ctx context.Context, db *sql.DB, from, to time.Time, take func(*usage.Row) (bool, error)) (begins, committed time.Time, err error) {
	tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return begins, committed, fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	var instantUS int64
	var final, open sql.NullInt64
	if err := tx.QueryRowContext(ctx, "SELECT instant_us, (SELECT min(bucket) FROM final), (SELECT min(bucket) FROM open) FROM journal").
		Scan(&instantUS, &final, &open); err != nil {
		return begins, committed, fmt.Errorf("read how far the journal goes: %w", err)
	}
	committed = time.UnixMicro(instantUS).UTC()
	for _, bucket := range []sql.NullInt64{final, open} {
		if start := time.Unix(bucket.Int64, 0).UTC(); bucket.Valid && (begins.IsZero() || start.Before(begins)) {
			begins = start
		}
	}
	rows, err := tx.QueryContext(ctx, selectBack, from.Unix(), to.Unix())
	if err != nil {
		return begins, committed, fmt.Errorf("read rows: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var row usage.Row
		if err := scan(rows, &row); err != nil {
			return begins, committed, fmt.Errorf("read row: %w", err)
		}
		more, err := take(&row)
		if err != nil {
			return begins, committed, err
		}
		if !more {
			return begins, committed, nil
		}
	}
	if err := rows.Err(); err != nil {
		return begins, committed, fmt.Errorf("read rows: %w", err)
	}
	return begins, committed, nil
}
