package journal

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

const (
	// pruneEvery is how often a write looks for rows to prune.
	pruneEvery = time.Minute
	// pruneRows bounds what one look prunes, so that a write never waits long.
	pruneRows = 5000
)

// prune removes the oldest rows: those older than MaxAge that were pulled, and
// whatever MaxBytes does not leave room for. The newest row always stays: it
// is the one that readers' cursors name. It needs the lock on writing.
func (j *Journal) prune(ctx context.Context) {
	now := j.now()
	if since := now.Sub(j.lastPrune); since >= 0 && since < pruneEvery {
		return
	}
	j.lastPrune = now
	if err := j.pruneOnce(ctx, now); err != nil && ctx.Err() == nil {
		j.log.Error("journal can't be pruned", "path", j.path, "err", j.explain(err))
	}
}

func (j *Journal) pruneOnce(ctx context.Context, now time.Time) error {
	tx, err := j.writer.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	var head, pulled, pages, free, pageSize int64
	var first sql.NullInt64
	for _, query := range []struct {
		text string
		into []any
	}{
		{"SELECT head_seq, pulled_seq, (SELECT min(seq) FROM final) FROM journal", []any{&head, &pulled, &first}},
		{"PRAGMA page_count", []any{&pages}},
		{"PRAGMA freelist_count", []any{&free}},
		{"PRAGMA page_size", []any{&pageSize}},
	} {
		if err := tx.QueryRowContext(ctx, query.text).Scan(query.into...); err != nil {
			return fmt.Errorf("%s: %w", query.text, err)
		}
	}
	if !first.Valid || first.Int64 >= head {
		return nil
	}
	from := first.Int64
	cutoff := now.Add(-j.options.MaxAge).Unix()
	// The first row that is young enough ends what age prunes.
	var young sql.NullInt64
	if err := tx.QueryRowContext(ctx, "SELECT min(seq) FROM (SELECT seq, bucket FROM final ORDER BY seq LIMIT ?) WHERE bucket >= ?", pruneRows, cutoff).
		Scan(&young); err != nil {
		return fmt.Errorf("look for old rows: %w", err)
	}
	aged := from + pruneRows - 1
	if young.Valid {
		aged = young.Int64 - 1
	}
	aged = min(aged, head-1)
	if aged > max(pulled, from-1) && now.Sub(j.toldOld) > 24*time.Hour {
		j.toldOld = now
		j.log.Warn("rows older than the journal keeps were never pulled and are kept: is the collector running?", "older_than", j.options.MaxAge)
	}
	// The row that the newest cursor names stays, or its reader would have to
	// begin again.
	upTo := min(aged, pulled-1)
	if excess := (pages-free)*pageSize - j.options.MaxBytes; excess > 0 {
		rows := head - from + 1
		perRow := max(1, (pages-free)*pageSize/rows)
		upTo = max(upTo, min(from+min(excess/perRow+1, pruneRows)-1, head-1))
	}
	if upTo < from {
		return nil
	}
	if _, err := tx.ExecContext(ctx, "DELETE FROM final WHERE seq <= ?", upTo); err != nil {
		return fmt.Errorf("prune rows: %w", err)
	}
	if _, err := tx.ExecContext(ctx, "DELETE FROM bucket WHERE last_seq <= ?", upTo); err != nil {
		return fmt.Errorf("prune buckets: %w", err)
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	unpulled := max(0, upTo-max(pulled, from-1))
	j.log.Info("pruned the journal's oldest rows", "rows", upTo-from+1, "up_to_seq", upTo)
	if unpulled > 0 {
		j.log.Error("the journal is at its size limit: rows that were never pulled are lost to accounting; start the collector",
			"rows", unpulled, "max_bytes", j.options.MaxBytes)
	}
	j.statsMu.Lock()
	j.stats.Rows -= upTo - from + 1
	j.stats.UnpulledRows -= unpulled
	j.stats.PrunedUnpulledRows += unpulled
	j.statsMu.Unlock()
	return j.shrinkFile(ctx)
}

// shrinkFile gives freed pages back to the file system. The pragma frees one
// page a step, so its rows must be read to the end.
func (j *Journal) shrinkFile(ctx context.Context) error {
	rows, err := j.writer.QueryContext(ctx, "PRAGMA incremental_vacuum(2000)")
	if err != nil {
		return fmt.Errorf("shrink the file: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
	}
	return rows.Err()
}
