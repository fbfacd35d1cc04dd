package sqlite

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

// Period reads all that a statement of a period is made from, at one moment.
func (s *Store) Period(ctx context.Context, period billing.Period, now time.Time) (ledger.Period, error) {
	var result ledger.Period
	err := s.view(ctx, func(tx *sql.Tx) error {
		days := period.Days()
		audit, err := audit(ctx, tx, ledger.Span{From: period.Start, To: period.End}, days, now)
		if err != nil {
			return err
		}
		for _, in := range audit.InService {
			result.Capacity = append(result.Capacity, billing.Capacity{
				Day: in.Day, Node: in.Seat.Node, Card: in.Card, Model: in.Seat.Model, InServiceUS: in.US,
			})
		}
		for _, day := range days {
			if result.Usage, err = appendUsage(ctx, tx, result.Usage, day); err != nil {
				return err
			}
		}
		result.ReviewUS = audit.ReviewUS
		result.Quarantined, err = quarantinedCount(ctx, tx, ledger.Span{From: period.Start, To: period.End})
		return err
	})
	return result, err
}

// appendUsage appends one day's rows, summed over its buckets, in an order that
// depends on nothing but their values.
func appendUsage(ctx context.Context, tx *sql.Tx, to []billing.Usage, day billing.Day) (_ []billing.Usage, err error) {
	rows, err := tx.QueryContext(ctx, `
		SELECT node.name, p.card, p.model, p.profile, h.state, h.username, h.uid, h.kind, h.workload, h.project, h.class,
			sum(gpu_us), sum(share_us), sum(held_us), sum(reserved_us), sum(active_us), sum(active_known_us), sum(idle_us),
			sum(memory_kib_seconds), sum(memory_known_us), sum(energy_mj), max(estimated)
		FROM (
			SELECT placement, holder, sum(gpu_us) AS gpu_us, sum(share_us) AS share_us, sum(held_us) AS held_us,
				sum(reserved_us) AS reserved_us, sum(active_us) AS active_us, sum(active_known_us) AS active_known_us,
				sum(idle_us) AS idle_us, sum(memory_kib_seconds) AS memory_kib_seconds, sum(memory_known_us) AS memory_known_us,
				sum(energy_mj) AS energy_mj, max(estimated) AS estimated
			FROM usage WHERE bucket >= ? AND bucket < ? GROUP BY placement, holder
		) AS u
		JOIN placement AS p ON p.id = u.placement JOIN node ON node.id = p.node JOIN holder AS h ON h.id = u.holder
		GROUP BY p.node, p.card, p.model, p.profile, u.holder`, day.Start.Unix(), day.End.Unix())
	if err != nil {
		return nil, fmt.Errorf("usage of %s: %w", day.Name, err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	from := len(to)
	for rows.Next() {
		u := billing.Usage{Day: day.Name}
		if err := rows.Scan(&u.Node, &u.Card, &u.Model, &u.Profile, &u.State, &u.User, &u.UID, &u.Kind, &u.Workload, &u.Project, &u.Class,
			&u.GPUUS, &u.ShareUS, &u.HeldUS, &u.ReservedUS, &u.ActiveUS, &u.ActiveKnownUS, &u.IdleUS,
			&u.MemoryKiBSeconds, &u.MemoryKnownUS, &u.EnergyMJ, &u.Estimated); err != nil {
			return nil, fmt.Errorf("usage of %s: %w", day.Name, err)
		}
		to = append(to, u)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("usage of %s: %w", day.Name, err)
	}
	slices.SortFunc(to[from:], func(a, b billing.Usage) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Card, b.Card), cmp.Compare(a.Model, b.Model), cmp.Compare(a.Profile, b.Profile),
			cmp.Compare(a.State, b.State), cmp.Compare(a.User, b.User), cmp.Compare(a.UID, b.UID), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.Workload, b.Workload), cmp.Compare(a.Project, b.Project), cmp.Compare(a.Class, b.Class))
	})
	return to, nil
}

// Audit proves a stretch of time, and hashes its rows. Zero times stand for the
// first and the last bucket of the ledger.
func (s *Store) Audit(ctx context.Context, span ledger.Span, now time.Time) (ledger.Audit, error) {
	var result ledger.Audit
	err := s.view(ctx, func(tx *sql.Tx) error {
		var first, last sql.NullInt64
		if err := tx.QueryRowContext(ctx, `SELECT min(bucket), max(bucket) FROM usage`).Scan(&first, &last); err != nil {
			return err
		}
		if span.From.IsZero() {
			span.From = time.Unix(first.Int64, 0).UTC()
			if !first.Valid {
				span.From = now.Truncate(usage.BucketLength).UTC()
			}
		}
		if span.To.IsZero() {
			span.To = now.Truncate(usage.BucketLength).UTC()
			if end := time.Unix(last.Int64, 0).Add(usage.BucketLength).UTC(); last.Valid && end.After(span.To) {
				span.To = end
			}
		}
		var err error
		result, err = audit(ctx, tx, span, nil, now)
		return err
	})
	return result, err
}

func audit(ctx context.Context, tx *sql.Tx, span ledger.Span, days []billing.Day, now time.Time) (ledger.Audit, error) {
	in := ledger.AuditInput{Span: span, Now: now, Days: days, Last: map[string]time.Time{}}
	if err := cardsBefore(ctx, tx, &in); err != nil {
		return ledger.Audit{}, fmt.Errorf("cards in service: %w", err)
	}
	var err error
	if in.Retirements, err = retirements(ctx, tx); err != nil {
		return ledger.Audit{}, err
	}
	auditor := ledger.NewAuditor(in)
	if err := walk(ctx, tx, span, auditor.Bucket); err != nil {
		return ledger.Audit{}, err
	}
	return auditor.Finish(), nil
}

// cardsBefore finds each card's last bucket before the span, and at all.
func cardsBefore(ctx context.Context, tx *sql.Tx, in *ledger.AuditInput) (err error) {
	rows, err := tx.QueryContext(ctx, `
		SELECT p.card, node.name, p.model,
			(SELECT max(bucket) FROM usage WHERE placement = p.id),
			(SELECT max(bucket) FROM usage WHERE placement = p.id AND bucket < ?)
		FROM placement AS p JOIN node ON node.id = p.node ORDER BY p.card, node.name, p.model`, in.Span.From.Unix())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	opening := map[string]ledger.Opening{}
	for rows.Next() {
		var o ledger.Opening
		var last, before sql.NullInt64
		if err := rows.Scan(&o.Card, &o.Seat.Node, &o.Seat.Model, &last, &before); err != nil {
			return err
		}
		if at := time.Unix(last.Int64, 0); last.Valid && at.After(in.Last[o.Card]) {
			in.Last[o.Card] = at
		}
		o.Bucket = time.Unix(before.Int64, 0)
		if known, ok := opening[o.Card]; before.Valid && (!ok || o.Bucket.After(known.Bucket)) {
			opening[o.Card] = o
		}
	}
	for _, o := range opening {
		in.Opening = append(in.Opening, o)
	}
	return rows.Err()
}

type placement struct {
	node, card     string
	index          int
	model, profile string
}

type device struct {
	uuid            string
	slices, sliceOf int64
}

// walk hands over all rows of a span, bucket by bucket.
func walk(ctx context.Context, tx *sql.Tx, span ledger.Span, take func([]usage.Row)) (err error) {
	// A cancelled context is looked at once a bucket; see insert.
	still := context.WithoutCancel(ctx)
	lookup := newLookup(still, tx)
	rows, err := tx.QueryContext(still, `
		SELECT bucket, device, holder, run, placement, attribution,
			gpu_us, share_us, held_us, reserved_us, active_us, active_known_us, idle_us,
			memory_kib_seconds, memory_known_us, energy_mj, peak_memory_bytes, peak_temperature_c, estimated, review
		FROM usage WHERE bucket >= ? AND bucket < ? ORDER BY bucket`, span.From.Unix(), span.To.Unix())
	if err != nil {
		return fmt.Errorf("rows: %w", err)
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	var batch []usage.Row
	var at int64
	var bucket int64
	var n numbers
	var r usage.Row
	into := []any{&bucket, &n.device, &n.holder, &n.run, &n.placement, &n.attribution,
		&r.GPUUS, &r.ShareUS, &r.HeldUS, &r.ReservedUS, &r.ActiveUS, &r.ActiveKnownUS, &r.IdleUS,
		&r.MemoryKiBSeconds, &r.MemoryKnownUS, &r.EnergyMJ, &r.PeakMemoryBytes, &r.PeakTemperatureC, &r.Estimated, &r.Review}
	for rows.Next() {
		if err := rows.Scan(into...); err != nil {
			return fmt.Errorf("rows: %w", err)
		}
		if bucket != at {
			if err := ctx.Err(); err != nil {
				return err
			}
			take(batch)
			batch, at = batch[:0], bucket
			r.Bucket = time.Unix(bucket, 0).UTC()
		}
		if err := lookup.fill(&r, n); err != nil {
			return fmt.Errorf("rows of bucket %s: %w", r.Bucket.Format(time.RFC3339), err)
		}
		batch = append(batch, r)
	}
	take(batch)
	return rows.Err()
}

// lookup reads what stands behind the numbers of a row, each once.
type lookup struct {
	ctx                context.Context //nolint:containedctx // lives as long as one walk
	tx                 *sql.Tx
	runs, attributions map[int64]string
	devices            map[int64]device
	holders            map[int64]holderKey
	placements         map[int64]placement
}

func newLookup(ctx context.Context, tx *sql.Tx) *lookup {
	return &lookup{
		ctx: ctx, tx: tx, runs: map[int64]string{}, attributions: map[int64]string{},
		devices: map[int64]device{}, holders: map[int64]holderKey{}, placements: map[int64]placement{},
	}
}

func (l *lookup) fill(r *usage.Row, n numbers) error {
	run, err := found(l, l.runs, n.run, `SELECT name FROM run WHERE id = ?`, func(v *string) []any { return []any{v} })
	if err != nil {
		return err
	}
	attribution, err := found(l, l.attributions, n.attribution, `SELECT name FROM attribution WHERE id = ?`, func(v *string) []any { return []any{v} })
	if err != nil {
		return err
	}
	d, err := found(l, l.devices, n.device, `SELECT uuid, slices, slice_of FROM device WHERE id = ?`,
		func(v *device) []any { return []any{&v.uuid, &v.slices, &v.sliceOf} })
	if err != nil {
		return err
	}
	h, err := found(l, l.holders, n.holder, `SELECT state, username, uid, kind, workload, project, class FROM holder WHERE id = ?`,
		func(v *holderKey) []any {
			return []any{&v.state, &v.user, &v.uid, &v.kind, &v.workload, &v.project, &v.class}
		})
	if err != nil {
		return err
	}
	p, err := found(l, l.placements, n.placement,
		`SELECT node.name, card, card_index, model, profile FROM placement JOIN node ON node.id = placement.node WHERE placement.id = ?`,
		func(v *placement) []any { return []any{&v.node, &v.card, &v.index, &v.model, &v.profile} })
	if err != nil {
		return err
	}
	r.Run, r.AttributedBy = run, attribution
	r.Device, r.Slices, r.Of = d.uuid, d.slices, d.sliceOf
	r.State, r.User, r.UID, r.Kind, r.Workload, r.Project, r.Class = h.state, h.user, h.uid, h.kind, h.workload, h.project, h.class
	r.Node, r.Card, r.Index, r.Model, r.Profile = p.node, p.card, p.index, p.model, p.profile
	return nil
}

func found[V any](l *lookup, known map[int64]V, id int64, query string, into func(*V) []any) (V, error) {
	value, ok := known[id]
	if ok {
		return value, nil
	}
	if err := l.tx.QueryRowContext(l.ctx, query, id).Scan(into(&value)...); err != nil {
		return value, fmt.Errorf("number %d: %w", id, err)
	}
	if len(known) > maxKnown {
		clear(known)
	}
	known[id] = value
	return value, nil
}
