package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"gpuledger/exporter/usage"
)

// maxKnown bounds how many numbers of one kind are remembered.
const maxKnown = 200_000

type deviceKey struct {
	uuid            string
	slices, sliceOf int64
}

type holderKey struct {
	state, user                    string
	uid                            int64
	kind, workload, project, class string
}

type placementKey struct {
	node, card     string
	index          int
	model, profile string
}

// dimensions remembers the numbers of what repeats in rows.
type dimensions struct {
	nodes, runs, attributions map[string]int64
	devices                   map[deviceKey]int64
	holders                   map[holderKey]int64
	placements                map[placementKey]int64
}

func newDimensions() *dimensions {
	return &dimensions{
		nodes: map[string]int64{}, runs: map[string]int64{}, attributions: map[string]int64{},
		devices: map[deviceKey]int64{}, holders: map[holderKey]int64{}, placements: map[placementKey]int64{},
	}
}

func (d *dimensions) bound() {
	if len(d.nodes) > maxKnown || len(d.runs) > maxKnown || len(d.attributions) > maxKnown ||
		len(d.devices) > maxKnown || len(d.holders) > maxKnown || len(d.placements) > maxKnown {
		*d = *newDimensions()
	}
}

// numbers are a row's dimensions.
type numbers struct {
	device, holder, run, placement, attribution int64
}

func (d *dimensions) of(ctx context.Context, tx *sql.Tx, row *usage.Row) (numbers, error) {
	var n numbers
	var err error
	if n.device, err = number(ctx, tx, d.devices, deviceKey{row.Device, row.Slices, row.Of},
		`INSERT INTO device (uuid, slices, slice_of) VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING id`,
		`SELECT id FROM device WHERE uuid = ? AND slices = ? AND slice_of = ?`,
		row.Device, row.Slices, row.Of); err != nil {
		return n, err
	}
	if n.holder, err = number(ctx, tx, d.holders, holderKey{row.State, row.User, row.UID, row.Kind, row.Workload, row.Project, row.Class},
		`INSERT INTO holder (state, username, uid, kind, workload, project, class) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id`,
		`SELECT id FROM holder WHERE state = ? AND username = ? AND uid = ? AND kind = ? AND workload = ? AND project = ? AND class = ?`,
		row.State, row.User, row.UID, row.Kind, row.Workload, row.Project, row.Class); err != nil {
		return n, err
	}
	if n.run, err = d.name(ctx, tx, d.runs, "run", row.Run); err != nil {
		return n, err
	}
	if n.attribution, err = d.name(ctx, tx, d.attributions, "attribution", row.AttributedBy); err != nil {
		return n, err
	}
	node, err := d.name(ctx, tx, d.nodes, "node", row.Node)
	if err != nil {
		return n, err
	}
	n.placement, err = number(ctx, tx, d.placements, placementKey{row.Node, row.Card, row.Index, row.Model, row.Profile},
		`INSERT INTO placement (node, card, card_index, model, profile) VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id`,
		`SELECT id FROM placement WHERE node = ? AND card = ? AND card_index = ? AND model = ? AND profile = ?`,
		node, row.Card, row.Index, row.Model, row.Profile)
	return n, err
}

// name gives the number of a name in a table of names, which is never from outside.
func (d *dimensions) name(ctx context.Context, tx *sql.Tx, known map[string]int64, table, name string) (int64, error) {
	return number(ctx, tx, known, name,
		`INSERT INTO `+table+` (name) VALUES (?) ON CONFLICT DO NOTHING RETURNING id`,
		`SELECT id FROM `+table+` WHERE name = ?`, name)
}

func number[K comparable](ctx context.Context, tx *sql.Tx, known map[K]int64, key K, insert, find string, args ...any) (int64, error) {
	if id, ok := known[key]; ok {
		return id, nil
	}
	var id int64
	err := tx.QueryRowContext(ctx, find, args...).Scan(&id)
	if errors.Is(err, sql.ErrNoRows) {
		err = tx.QueryRowContext(ctx, insert, args...).Scan(&id)
	}
	if err != nil {
		return 0, fmt.Errorf("number of %v: %w", key, err)
	}
	known[key] = id
	return id, nil
}
