package sqlite

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

const insertUsage = `INSERT INTO usage (
	bucket, device, holder, run, placement, attribution, ingest,
	gpu_us, share_us, held_us, reserved_us, active_us, active_known_us, idle_us,
	memory_kib_seconds, memory_known_us, energy_mj, peak_memory_bytes, peak_temperature_c, estimated, review
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`

// findUsage finds the row with a key.
const findUsage = `SELECT placement, attribution, ingest.source,
	gpu_us, share_us, held_us, reserved_us, active_us, active_known_us, idle_us,
	memory_kib_seconds, memory_known_us, energy_mj, peak_memory_bytes, peak_temperature_c, estimated, review
FROM usage JOIN ingest ON ingest.id = usage.ingest WHERE bucket = ? AND device = ? AND holder = ? AND run = ?`

const replaceUsage = `UPDATE usage SET
	placement = ?, attribution = ?, ingest = ?,
	gpu_us = ?, share_us = ?, held_us = ?, reserved_us = ?, active_us = ?, active_known_us = ?, idle_us = ?,
	memory_kib_seconds = ?, memory_known_us = ?, energy_mj = ?, peak_memory_bytes = ?, peak_temperature_c = ?, estimated = ?, review = ?
WHERE bucket = ? AND device = ? AND holder = ? AND run = ?`

// Insert lets rows in that come from a file. Rows that are there already change
// nothing.
func (s *Store) Insert(ctx context.Context, batch ledger.Batch, now time.Time) (ledger.Result, error) {
	var result ledger.Result
	err := s.update(ctx, func(tx *sql.Tx) error {
		var err error
		result, err = s.insert(ctx, tx, batch, "", now)
		return err
	})
	return result, err
}

// InsertPage lets in what a target served and moves its cursor, both or
// neither. The first row that a target ever serves says which node it is; rows
// of other nodes are quarantined from then on.
func (s *Store) InsertPage(ctx context.Context, page ledger.Page, now time.Time) (ledger.Result, error) {
	var result ledger.Result
	err := s.update(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, `INSERT INTO target (url) VALUES (?) ON CONFLICT DO NOTHING`, page.Source); err != nil {
			return err
		}
		var node sql.NullString
		err := tx.QueryRowContext(ctx, `SELECT node.name FROM target LEFT JOIN node ON node.id = target.node WHERE target.url = ?`, page.Source).Scan(&node)
		if err != nil {
			return err
		}
		if !node.Valid && len(page.Rows) > 0 {
			node = sql.NullString{String: page.Rows[0].Node, Valid: true}
			id, err := s.known.name(ctx, tx, s.known.nodes, "node", node.String)
			if err != nil {
				return err
			}
			if _, err := tx.ExecContext(ctx, `UPDATE target SET node = ? WHERE url = ?`, id, page.Source); err != nil {
				return err
			}
		}
		if result, err = s.insert(ctx, tx, page.Batch, node.String, now); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `UPDATE target SET cursor = ?, last_success = ?, last_error = '', last_error_at = NULL WHERE url = ?`,
			page.Cursor, now.Unix(), page.Source); err != nil {
			return err
		}
		if page.CompleteThrough.IsZero() || !node.Valid {
			return nil
		}
		// What was complete stays so, even where a journal is read again from its start.
		_, err = tx.ExecContext(ctx, `UPDATE node SET complete_through = max(coalesce(complete_through, ?1), ?1) WHERE name = ?2`,
			page.CompleteThrough.Unix(), node.String)
		return err
	})
	return result, err
}

func (s *Store) insert(ctx context.Context, tx *sql.Tx, batch ledger.Batch, node string, now time.Time) (result ledger.Result, err error) {
	if len(batch.Rows) == 0 && len(batch.BadLines) == 0 {
		return result, nil
	}
	s.known.bound()
	source := cleanText(batch.Source)
	entry, err := tx.ExecContext(ctx, `INSERT INTO ingest (at, source) VALUES (?, ?)`, now.Unix(), source)
	if err != nil {
		return result, err
	}
	ingest, err := entry.LastInsertId()
	if err != nil {
		return result, err
	}
	insert, err := tx.PrepareContext(ctx, insertUsage)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, insert.Close()) }()
	find, err := tx.PrepareContext(ctx, findUsage)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, find.Close()) }()
	var waiting bool
	if err := tx.QueryRowContext(ctx, `SELECT EXISTS (SELECT 1 FROM quarantine WHERE reason IN (?, ?))`,
		ledger.ReasonNode, ledger.ReasonFuture).Scan(&waiting); err != nil {
		return result, err
	}
	in := &insertion{tx: tx, known: s.known, insert: insert, find: find, ingest: ingest, source: source, now: now}

	// The driver starts a goroutine for each call that can be cancelled.
	still := context.WithoutCancel(ctx)
	for i := range batch.Rows {
		if i%1000 == 0 && ctx.Err() != nil {
			return result, ctx.Err()
		}
		row := &batch.Rows[i]
		fault := ledger.Admit(row, node, now)
		if fault != nil {
			added, err := quarantineRow(still, tx, row, fault, source, now)
			if err != nil {
				return result, err
			}
			result.Quarantined += added
			continue
		}
		one, err := in.row(still, row)
		if err != nil {
			return result, fmt.Errorf("row %d of run %q: %w", row.Seq, row.Run, err)
		}
		result = result.Plus(one)
		if waiting {
			if err := release(still, tx, row); err != nil {
				return result, err
			}
		}
	}
	for _, bad := range batch.BadLines {
		digest := sha256.Sum256([]byte(bad.Reason + "\x00" + bad.Line))
		added, err := quarantine(ctx, tx, digest, nil, bad, source, now)
		if err != nil {
			return result, err
		}
		result.Quarantined += added
	}
	if result.Inserted == 0 && result.Quarantined == 0 {
		_, err = tx.ExecContext(ctx, `DELETE FROM ingest WHERE id = ?`, ingest)
		return result, err
	}
	_, err = tx.ExecContext(ctx, `UPDATE ingest SET inserted = ?, quarantined = ? WHERE id = ?`, result.Inserted, result.Quarantined, ingest)
	return result, err
}

// quarantineRow keeps a row aside and returns 1, or 0 if it is there already.
// Where the row stood in its journal makes no difference.
func quarantineRow(ctx context.Context, tx *sql.Tx, row *usage.Row, fault *ledger.Fault, source string, now time.Time) (int64, error) {
	bucket, key := row.Bucket, ledger.KeyDigest(&row.Key)
	return quarantine(ctx, tx, rowDigest(fault.Reason, row), key[:], ledger.BadLine{
		Line: string(usage.AppendJSON(nil, row)), Reason: fault.Reason, Detail: fault.Detail, Node: row.Node, Bucket: &bucket,
	}, source, now)
}

func rowDigest(reason string, row *usage.Row) [sha256.Size]byte {
	return sha256.Sum256(ledger.AppendContent([]byte(reason+"\x00"), row))
}

// release takes a row out of quarantine that was kept aside for coming too
// early or from the wrong target, and that has been let in since.
func release(ctx context.Context, tx *sql.Tx, row *usage.Row) error {
	for _, reason := range []string{ledger.ReasonNode, ledger.ReasonFuture} {
		digest := rowDigest(reason, row)
		if _, err := tx.ExecContext(ctx, `DELETE FROM quarantine WHERE digest = ?`, digest[:]); err != nil {
			return fmt.Errorf("release a row: %w", err)
		}
	}
	return nil
}

func quarantine(ctx context.Context, tx *sql.Tx, digest [sha256.Size]byte, key []byte, bad ledger.BadLine, source string, now time.Time) (int64, error) {
	var bucket sql.NullInt64
	if bad.Bucket != nil {
		bucket = sql.NullInt64{Int64: bad.Bucket.Unix(), Valid: true}
	}
	done, err := tx.ExecContext(ctx, `INSERT INTO quarantine (digest, row_key, reason, detail, node, bucket, source, line, first_seen)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING`,
		digest[:], key, bad.Reason, cleanText(bad.Detail), cleanText(bad.Node), bucket, source, cleanText(bad.Line), now.Unix())
	if err != nil {
		return 0, fmt.Errorf("quarantine a row: %w", err)
	}
	return done.RowsAffected()
}

// cleanText makes text of what came from outside as bytes.
func cleanText(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}
