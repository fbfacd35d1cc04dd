package journal

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gpuledger/exporter/usage"
)

// model is what a journal must hold, kept the simple way: a list of final rows
// and a map of open ones.
type model struct {
	run      int
	bucket   int // the bucket being metered
	final    []usage.Row
	open     map[usage.Key]usage.Row
	openFrom int
	instant  int64
	written  bool
}

func (m *model) complete(served int) time.Time {
	if !m.written {
		return time.Unix(0, 0)
	}
	through := bucketStart(m.openFrom)
	for _, row := range m.final[served:] {
		if row.Bucket.Before(through) {
			through = row.Bucket
		}
	}
	for _, row := range m.open {
		if row.Bucket.Before(through) {
			through = row.Bucket
		}
	}
	return through
}

// end makes every open row final, in the order the journal finds them; the
// order among them is not promised, so it is taken from the journal.
func (m *model) end(t tests, j *Journal) {
	t.Helper()
	rows, _ := pull(t, j, "", MaxLimit)
	if len(rows) != len(m.final)+len(m.open) {
		t.Fatalf("%d rows after the run's end, want %d and %d open ones", len(rows), len(m.final), len(m.open))
	}
	for _, row := range rows[len(m.final):] {
		want, ok := m.open[row.Key]
		if !ok || !row.SameContent(&want) {
			t.Fatalf("ended row %+v, want %+v", row, want)
		}
		delete(m.open, row.Key)
		m.final = append(m.final, row)
	}
}

func (m *model) check(t tests, j *Journal, limit int) {
	t.Helper()
	var cursor Cursor
	served := 0
	for {
		page, err := j.Usage(context.Background(), cursor, limit)
		if err != nil {
			t.Fatalf("page after %q: %v", cursor, err)
		}
		if len(page.Rows) > limit || served+len(page.Rows) > len(m.final) {
			t.Fatalf("%d rows after %d, limit %d, of %d", len(page.Rows), served, limit, len(m.final))
		}
		for i, row := range page.Rows {
			if row.Seq != int64(served+i+1) || !row.SameContent(&m.final[served+i]) {
				t.Fatalf("row %d is %+v, want %+v", served+i+1, row, m.final[served+i])
			}
		}
		served += len(page.Rows)
		// Exact: neither too much nor, for ever, too little.
		if want := m.complete(served); !page.CompleteThrough.Equal(want) {
			t.Fatalf("after %d of %d rows complete through %v, want %v", served, len(m.final), page.CompleteThrough, want)
		}
		if len(page.Rows) == 0 {
			if served != len(m.final) {
				t.Fatalf("served %d rows of %d", served, len(m.final))
			}
			return
		}
		cursor = page.Next
	}
}

// batch draws what a meter could commit next.
func (m *model) batch(t *rapid.T) Batch {
	step := rapid.IntRange(0, 2).Draw(t, "buckets")
	var b Batch
	take := func(row usage.Row, final bool) {
		if final {
			b.Final = append(b.Final, row)
			m.final = append(m.final, row)
			delete(m.open, row.Key)
		} else {
			b.Open = append(b.Open, row)
			m.open[row.Key] = row
		}
	}
	next := m.bucket + step
	// Rows of the present bucket grow; if the bucket is over they are
	// final.
	for user := range rapid.IntRange(0, 4).Draw(t, "users") {
		row := rowOf(fmt.Sprint("run", m.run), m.bucket, fmt.Sprint("user", user), 0)
		if earlier, ok := m.open[row.Key]; ok {
			row = earlier
		}
		if m.isFinal(row.Key) {
			continue
		}
		row.GPUUS += rapid.Int64Range(0, 1e6).Draw(t, "us")
		row.PeakMemoryBytes += rapid.Int64Range(0, 5).Draw(t, "peak")
		take(row, step > 0)
	}
	if step > 0 {
		for _, row := range m.open {
			take(row, true)
		}
	}
	m.bucket = next
	m.openFrom = next
	m.instant = max(m.instant, bucketStart(next).UnixMicro()) + rapid.Int64Range(0, 1e6).Draw(t, "instant")
	m.written = true
	b.InstantUS, b.OpenFrom = m.instant, bucketStart(m.openFrom)
	return b
}

func (m *model) isFinal(k usage.Key) bool {
	for i := range m.final {
		if m.final[i].Key == k {
			return true
		}
	}
	return false
}

func TestJournalAgainstModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "journal")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		options := optionsIn(dir)
		j := mustOpen(t, options)
		defer func() { j.shutdown() }()
		m := &model{open: map[usage.Key]usage.Row{}}
		var last Batch
		reopen := func(how func()) {
			how()
			if err := j.shutdown(); err != nil {
				t.Fatalf("close: %v", err)
			}
			j = mustOpen(t, options)
			m.end(t, j)
			m.run++
			last = Batch{}
			if j.LastInstantUS() != m.instant {
				t.Fatalf("instant %d after a restart, want %d", j.LastInstantUS(), m.instant)
			}
		}
		copies := 0
		t.Repeat(map[string]func(*rapid.T){
			"": func(t *rapid.T) { m.check(t, j, rapid.IntRange(1, 12).Draw(t, "limit")) },
			"write": func(t *rapid.T) {
				last = m.batch(t)
				mustWrite(t, j, last)
			},
			"write again": func(t *rapid.T) { mustWrite(t, j, last) },
			"write merged with the batch before": func(t *rapid.T) {
				now := m.batch(t)
				merged := NewBuffer(j, BufferOptions{})
				merged.merge(last)
				if err := merged.Write(context.Background(), now); err != nil {
					t.Fatalf("write: %v", err)
				}
				last = now
			},
			"finish the run": func(t *rapid.T) {
				b := m.batch(t)
				if err := j.FinishRun(context.Background(), b); err != nil {
					t.Fatalf("finish: %v", err)
				}
				m.end(t, j)
				m.run++
				last = Batch{}
			},
			"crash": func(t *rapid.T) {
				// What a dead process leaves is the files as they are.
				reopen(func() {
					copies++
					crashed := filepath.Join(dir, fmt.Sprint("crashed", copies))
					copyDir(t, options.Dir, crashed)
					options.Dir = crashed
				})
			},
			"restart": func(t *rapid.T) { reopen(func() {}) },
		})
	})
}
