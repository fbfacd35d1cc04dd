package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"gpuledger/accounting/ledger"
)

const selectTargets = `SELECT url, coalesce(node.name, ''), cursor, last_success, last_error, last_error_at, node.complete_through
	FROM target LEFT JOIN node ON node.id = target.node`

// Target is what is known of a target; one that was never pulled from has
// nothing but its URL.
func (s *Store) Target(ctx context.Context, url string) (ledger.Target, error) {
	targets, err := s.targets(ctx, selectTargets+` WHERE url = ?`, url)
	if err != nil || len(targets) == 0 {
		return ledger.Target{URL: url}, err
	}
	return targets[0], nil
}

// Targets are all targets that were ever pulled from, by URL.
func (s *Store) Targets(ctx context.Context) ([]ledger.Target, error) {
	return s.targets(ctx, selectTargets+` ORDER BY url`)
}

func (s *Store) targets(ctx context.Context, query string, args ...any) (list []ledger.Target, err error) {
	err = s.view(ctx, func(tx *sql.Tx) (err error) {
		rows, err := tx.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, rows.Close()) }()
		for rows.Next() {
			var t ledger.Target
			var success, failure, complete sql.NullInt64
			if err := rows.Scan(&t.URL, &t.Node, &t.Cursor, &success, &t.LastError, &failure, &complete); err != nil {
				return err
			}
			t.LastSuccess, t.LastErrorAt, t.CompleteThrough = moment(success), moment(failure), moment(complete)
			list = append(list, t)
		}
		return rows.Err()
	})
	return list, err
}

func moment(at sql.NullInt64) time.Time {
	if !at.Valid {
		return time.Time{}
	}
	return time.Unix(at.Int64, 0).UTC()
}

// RecordFailure notes that a pull from a target failed.
func (s *Store) RecordFailure(ctx context.Context, url, reason string, at time.Time) error {
	return s.update(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO target (url, last_error, last_error_at) VALUES (?1, ?2, ?3)
			ON CONFLICT (url) DO UPDATE SET last_error = ?2, last_error_at = ?3`, url, cleanText(reason), at.Unix())
		return err
	})
}

// RetireNode ends the time in service of all cards that are on a node, and
// returns when. A row of a later bucket puts its card back into service.
func (s *Store) RetireNode(ctx context.Context, node string, at, now time.Time) (time.Time, error) {
	return s.retire(ctx, ledger.Retirement{Node: node, At: ledger.CeilQuarter(at)}, now,
		`SELECT EXISTS (SELECT 1 FROM node JOIN placement ON placement.node = node.id WHERE node.name = ?)`, node, ledger.ErrUnknownNode)
}

// RetireDevice ends the time in service of one card, by its UUID.
func (s *Store) RetireDevice(ctx context.Context, card string, at, now time.Time) (time.Time, error) {
	return s.retire(ctx, ledger.Retirement{Card: card, At: ledger.CeilQuarter(at)}, now,
		`SELECT EXISTS (SELECT 1 FROM placement WHERE card = ?)`, card, ledger.ErrUnknownCard)
}

func (s *Store) retire(ctx context.Context, r ledger.Retirement, now time.Time, exists, name string, unknown error) (time.Time, error) {
	err := s.update(ctx, func(tx *sql.Tx) error {
		var there bool
		if err := tx.QueryRowContext(ctx, exists, name).Scan(&there); err != nil {
			return err
		}
		if !there {
			return fmt.Errorf("retire %q: %w", name, unknown)
		}
		_, err := tx.ExecContext(ctx, `INSERT INTO retirement (node, card, at, recorded_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING`,
			r.Node, r.Card, r.At.Unix(), now.Unix())
		return err
	})
	return r.At, err
}

func retirements(ctx context.Context, tx *sql.Tx) (list []ledger.Retirement, err error) {
	rows, err := tx.QueryContext(ctx, `SELECT node, card, at FROM retirement ORDER BY at, node, card`)
	if err != nil {
		return nil, fmt.Errorf("retirements: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		var r ledger.Retirement
		var at int64
		if err := rows.Scan(&r.Node, &r.Card, &at); err != nil {
			return nil, fmt.Errorf("retirements: %w", err)
		}
		r.At = time.Unix(at, 0).UTC()
		list = append(list, r)
	}
	return list, rows.Err()
}

// Quarantined are the rows kept aside that belong to a span, or to no time that
// can be read: at most limit of them, the oldest first, and how many there are.
// Zero times are unbounded.
func (s *Store) Quarantined(ctx context.Context, span ledger.Span, limit int) (list []ledger.Quarantined, count int64, err error) {
	err = s.view(ctx, func(tx *sql.Tx) (err error) {
		if count, err = quarantinedCount(ctx, tx, span); err != nil || limit == 0 {
			return err
		}
		from, to := bounds(span)
		rows, err := tx.QueryContext(ctx, `SELECT reason, detail, node, bucket, source, line, first_seen FROM quarantine
			WHERE bucket IS NULL OR (bucket >= ? AND bucket < ?) ORDER BY id LIMIT ?`, from, to, limit)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, rows.Close()) }()
		for rows.Next() {
			var q ledger.Quarantined
			var bucket, seen sql.NullInt64
			if err := rows.Scan(&q.Reason, &q.Detail, &q.Node, &bucket, &q.Source, &q.Line, &seen); err != nil {
				return err
			}
			if at := moment(bucket); bucket.Valid {
				q.Bucket = &at
			}
			q.FirstSeen = moment(seen)
			list = append(list, q)
		}
		return rows.Err()
	})
	return list, count, err
}

func quarantinedCount(ctx context.Context, tx *sql.Tx, span ledger.Span) (count int64, err error) {
	from, to := bounds(span)
	err = tx.QueryRowContext(ctx, `SELECT count(*) FROM quarantine WHERE bucket IS NULL OR (bucket >= ? AND bucket < ?)`, from, to).Scan(&count)
	return count, err
}

func bounds(span ledger.Span) (from, to int64) {
	from, to = -1<<62, 1<<62
	if !span.From.IsZero() {
		from = span.From.Unix()
	}
	if !span.To.IsZero() {
		to = span.To.Unix()
	}
	return from, to
}

// Check reads the whole file and reports damage to it.
func (s *Store) Check(ctx context.Context) error {
	return s.view(ctx, func(tx *sql.Tx) error {
		var result string
		if err := tx.QueryRowContext(ctx, `PRAGMA quick_check(1)`).Scan(&result); err != nil {
			return err
		}
		if result != "ok" {
			return fmt.Errorf("the file %s is damaged: %s: restore it from a backup, or import the journals into a new one", s.path, result)
		}
		return nil
	})
}
