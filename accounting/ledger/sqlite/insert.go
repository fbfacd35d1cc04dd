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
	memory_kib_seconds, memory_known_us, energy_mj, peak_memory_bytes, peak_temperature_c, estimated
) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING`

// isThere finds the content of the row with this key, and says whether it is
// at the same place and attributed the same way.
const isThere = `SELECT
	placement = ?, attribution = ?,
	gpu_us, share_us, held_us, reserved_us, active_us, active_known_us, idle_us,
	memory_kib_seconds, memory_known_us, energy_mj, peak_memory_bytes, peak_temperature_c, estimated
FROM usage WHERE bucket = ? AND device = ? AND holder = ? AND run = ?`

const supersedeUsage = `UPDATE usage SET
	attribution = ?, ingest = ?,
	gpu_us = ?, share_us = ?, held_us = ?, reserved_us = ?, active_us = ?, active_known_us = ?, idle_us = ?,
	memory_kib_seconds = ?, memory_known_us = ?, energy_mj = ?, peak_memory_bytes = ?, peak_temperature_c = ?, estimated = ?
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
	there, err := tx.PrepareContext(ctx, isThere)
	if err != nil {
		return result, err
	}
	defer func() { err = errors.Join(err, there.Close()) }()

	// The driver starts a goroutine for each call that can be cancelled.
	still := context.WithoutCancel(ctx)
	for i := range batch.Rows {
		if i%1000 == 0 && ctx.Err() != nil {
			return result, ctx.Err()
		}
		row := &batch.Rows[i]
		fault := ledger.Admit(row, node, now)
		if fault == nil {
			var inserted bool
			inserted, fault, err = s.insertRow(still, tx, insert, there, row, ingest)
			if err != nil {
				return result, fmt.Errorf("row %d of run %q: %w", row.Seq, row.Run, err)
			}
			switch {
			case inserted:
				result.Inserted++
			case fault == nil:
				result.Duplicate++
			}
		}
		if fault != nil {
			added, err := quarantineRow(ctx, tx, row, fault, source, now)
			if err != nil {
				return result, err
			}
			result.Quarantined += added
		}
	}
	for _, bad := range batch.BadLines {
		digest := sha256.Sum256([]byte(bad.Reason + "\x00" + bad.Line))
		added, err := quarantine(ctx, tx, digest, bad, source, now)
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

func (s *Store) insertRow(ctx context.Context, tx *sql.Tx, insert, there *sql.Stmt, row *usage.Row, ingest int64) (bool, *ledger.Fault, error) {
	n, err := s.known.of(ctx, tx, row)
	if err != nil {
		return false, nil, err
	}
	bucket := row.Bucket.Unix()
	done, err := insert.ExecContext(ctx, bucket, n.device, n.holder, n.run, n.placement, n.attribution, ingest,
		row.GPUUS, row.ShareUS, row.HeldUS, row.ReservedUS, row.ActiveUS, row.ActiveKnownUS, row.IdleUS,
		row.MemoryKiBSeconds, row.MemoryKnownUS, row.EnergyMJ, row.PeakMemoryBytes, row.PeakTemperatureC, row.Estimated)
	if err != nil {
		return false, nil, err
	}
	if count, err := done.RowsAffected(); err != nil || count == 1 {
		return count == 1, nil, err
	}
	have := *row
	var samePlace, sameAttribution bool
	err = there.QueryRowContext(ctx, n.placement, n.attribution, bucket, n.device, n.holder, n.run).Scan(&samePlace, &sameAttribution,
		&have.GPUUS, &have.ShareUS, &have.HeldUS, &have.ReservedUS, &have.ActiveUS, &have.ActiveKnownUS, &have.IdleUS,
		&have.MemoryKiBSeconds, &have.MemoryKnownUS, &have.EnergyMJ, &have.PeakMemoryBytes, &have.PeakTemperatureC, &have.Estimated)
	if err != nil {
		return false, nil, err
	}
	switch {
	case samePlace && sameAttribution && ledger.SameContent(row, &have):
		return false, nil, nil
	case samePlace && ledger.Supersedes(&have, row):
		return false, nil, nil
	case samePlace && ledger.Supersedes(row, &have):
		_, err = tx.ExecContext(ctx, supersedeUsage, n.attribution, ingest,
			row.GPUUS, row.ShareUS, row.HeldUS, row.ReservedUS, row.ActiveUS, row.ActiveKnownUS, row.IdleUS,
			row.MemoryKiBSeconds, row.MemoryKnownUS, row.EnergyMJ, row.PeakMemoryBytes, row.PeakTemperatureC, row.Estimated,
			bucket, n.device, n.holder, n.run)
		return err == nil, nil, err
	}
	return false, &ledger.Fault{Reason: ledger.ReasonConflict, Detail: "a row with the same key and other content is in the ledger already"}, nil
}

// quarantineRow keeps a row aside and returns 1, or 0 if it is there already.
// Where the row stood in its journal makes no difference.
func quarantineRow(ctx context.Context, tx *sql.Tx, row *usage.Row, fault *ledger.Fault, source string, now time.Time) (int64, error) {
	digest := sha256.Sum256(ledger.AppendContent([]byte(fault.Reason+"\x00"), row))
	bucket := row.Bucket
	return quarantine(ctx, tx, digest, ledger.BadLine{
		Line: string(usage.AppendJSON(nil, row)), Reason: fault.Reason, Detail: fault.Detail, Node: row.Node, Bucket: &bucket,
	}, source, now)
}

func quarantine(ctx context.Context, tx *sql.Tx, digest [sha256.Size]byte, bad ledger.BadLine, source string, now time.Time) (int64, error) {
	var bucket sql.NullInt64
	if bad.Bucket != nil {
		bucket = sql.NullInt64{Int64: bad.Bucket.Unix(), Valid: true}
	}
	done, err := tx.ExecContext(ctx, `INSERT INTO quarantine (digest, reason, detail, node, bucket, source, line, first_seen)
		VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (digest) DO NOTHING`,
		digest[:], bad.Reason, cleanText(bad.Detail), cleanText(bad.Node), bucket, source, cleanText(bad.Line), now.Unix())
	if err != nil {
		return 0, fmt.Errorf("quarantine a row: %w", err)
	}
	return done.RowsAffected()
}

// cleanText makes text of what came from outside as bytes.
func cleanText(text string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
}
