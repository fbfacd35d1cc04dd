package meter

import (
	"cmp"
	"slices"

	"gpuledger/exporter/usage"
)

// Book adds increments up to the rows of open buckets.
type Book struct {
	rows    map[usage.Key]*usage.Row
	changed map[usage.Key]bool
}

// NewBook returns an empty book.
func NewBook() *Book {
	return &Book{rows: map[usage.Key]*usage.Row{}, changed: map[usage.Key]bool{}}
}

// Add adds increments.
func (b *Book) Add(increments []usage.Row) {
	for _, increment := range increments {
		row, ok := b.rows[increment.Key]
		if !ok {
			row = &usage.Row{}
			*row = increment
			b.rows[increment.Key] = row
		} else {
			row.Amounts = row.Amounts.Plus(increment.Amounts)
			row.PeakMemoryBytes = max(row.PeakMemoryBytes, increment.PeakMemoryBytes)
			row.PeakTemperatureC = max(row.PeakTemperatureC, increment.PeakTemperatureC)
			row.Estimated = row.Estimated || increment.Estimated
			row.Review = row.Review || increment.Review
			row.Index, row.Model = increment.Index, increment.Model
			if increment.AttributedBy != "" {
				row.AttributedBy = increment.AttributedBy
			}
		}
		b.changed[increment.Key] = true
	}
}

// Changed returns the rows that changed since the last Changed or Finish that
// returned them, in the order of their keys, as they stand now.
func (b *Book) Changed() []usage.Row {
	rows := make([]usage.Row, 0, len(b.changed))
	for key := range b.changed {
		rows = append(rows, *b.rows[key])
	}
	clear(b.changed)
	return sorted(rows)
}

// Finish removes and returns the rows that are final: those of a bucket whose
// end lies at or before the card's settled time.
func (b *Book) Finish(settledUS func(card string) int64) []usage.Row {
	var rows []usage.Row
	for key, row := range b.rows {
		if row.Bucket.UnixMicro()+bucketUS <= settledUS(row.Card) {
			rows = append(rows, *row)
			delete(b.rows, key)
			delete(b.changed, key)
		}
	}
	return sorted(rows)
}

// FinishAll removes and returns all rows: the end of a run.
func (b *Book) FinishAll() []usage.Row {
	rows := make([]usage.Row, 0, len(b.rows))
	for _, row := range b.rows {
		rows = append(rows, *row)
	}
	clear(b.rows)
	clear(b.changed)
	return sorted(rows)
}

func sorted(rows []usage.Row) []usage.Row {
	slices.SortFunc(rows, func(a, b usage.Row) int {
		return cmp.Or(a.Bucket.Compare(b.Bucket), cmp.Compare(a.Card, b.Card), cmp.Compare(a.Device, b.Device),
			cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Of, b.Of), cmp.Compare(a.State, b.State),
			cmp.Compare(a.User, b.User), cmp.Compare(a.UID, b.UID), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.Workload, b.Workload), cmp.Compare(a.Project, b.Project), cmp.Compare(a.Class, b.Class))
	})
	return rows
}
