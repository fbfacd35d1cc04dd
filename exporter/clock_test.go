package exporter

import (
	"context"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/resources"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/usage"
)

// steppedNode is a sampler with a journal, and a wall clock that can be put
// ahead and back while the monotonic one goes on.
type steppedNode struct {
	t       *testing.T
	journal *journal.Journal
	buffer  *journal.Buffer
	sampler *sampler
	now     gpu.Instant
	reading gpu.Reading // what the card says each second
}

func newSteppedNode(t *testing.T, begin time.Time, granters ...runtimes.Granter) *steppedNode {
	t.Helper()
	n := &steppedNode{t: t, now: gpu.Instant{MonotonicUS: 1_000_000, WallUS: begin.UnixMicro()}, reading: gpu.Reading{Card: gpu.Card{UUID: "GPU-1", Name: "NVIDIA H200"}}}
	dir := t.TempDir()
	var err error
	n.journal, err = journal.Open(context.Background(), journal.Options{
		Dir: filepath.Join(dir, "state"), LockPath: filepath.Join(dir, "lock"), Node: "n", Now: func() time.Time { return time.UnixMicro(n.now.WallUS) },
	})
	if err != nil {
		t.Fatal(err)
	}
	n.buffer = journal.NewBuffer(n.journal, journal.BufferOptions{})
	options := Options{
		NodeName: "n", MaxGap: DefaultMaxGap, Logger: slog.New(slog.DiscardHandler), Now: func() gpu.Instant { return n.now },
		ChildRestarts: func() int64 { return 0 }, store: &snapshot.Store{},
	}
	n.sampler = newSampler(options, holders.New(holders.Options{Granters: granters}), resources.New(resources.Options{}), newWriter(n.buffer, options.Logger), n.journal.LastInstantUS())
	return n
}

// run lets so many seconds pass, with a reading in each.
func (n *steppedNode) run(seconds int) {
	n.t.Helper()
	for range seconds {
		n.now.MonotonicUS += 1_000_000
		n.now.WallUS += 1_000_000
		reading := n.reading
		reading.At = n.now
		n.sampler.pass(context.Background(), gpu.Pass{At: n.now, Expected: 1, Readings: []gpu.Reading{reading}})
		if err := n.buffer.Write(context.Background(), n.sampler.rows.take()); err != nil {
			n.t.Fatal(err)
		}
	}
}

func (n *steppedNode) step(by time.Duration) { n.now.WallUS += by.Microseconds() }

// end ends the run and returns what the journal serves.
func (n *steppedNode) end() []usage.Row {
	n.t.Helper()
	n.sampler.finish()
	if err := n.buffer.FinishRun(context.Background(), n.sampler.rows.take()); err != nil {
		n.t.Fatal(err)
	}
	page, err := n.journal.Usage(context.Background(), "", journal.MaxLimit)
	if err != nil {
		n.t.Fatal(err)
	}
	if err := n.journal.Close(context.Background(), journal.Batch{}); err != nil {
		n.t.Fatal(err)
	}
	return page.Rows
}

// TestClockSteps sets the wall clock in the middle of buckets and looks at
// what is on the disk: no second twice, and none lost that law L8 keeps.
func TestClockSteps(t *testing.T) {
	begin := time.Date(2026, 11, 3, 8, 7, 0, 0, time.UTC)
	for _, test := range []struct {
		name string
		play func(*steppedNode)
		// seconds are metered, in so many runs and buckets.
		seconds, runs int
		buckets       []string
	}{
		{"steady", func(n *steppedNode) { n.run(61) }, 60, 1, []string{"08:00"}},
		{"over an edge", func(n *steppedNode) { n.run(600) }, 599, 1, []string{"08:00", "08:15"}},
		{"back 5 s: it stands still", func(n *steppedNode) { n.run(31); n.step(-5 * time.Second); n.run(30) }, 55, 1, []string{"08:00"}},
		{"back 5 s and ahead again", func(n *steppedNode) {
			n.run(31)
			n.step(-5 * time.Second)
			n.run(2)
			n.step(5 * time.Second)
			n.run(28)
		}, 57, 1, []string{"08:00"}}, // two seconds still, and one interval that ends in a jump
		{"ahead 0.5 s is no jump", func(n *steppedNode) { n.run(31); n.step(500 * time.Millisecond); n.run(30) }, 60, 1, []string{"08:00"}},
		{"ahead 1 h: a jump", func(n *steppedNode) { n.run(31); n.step(time.Hour); n.run(30) }, 59, 1, []string{"08:00", "09:00"}},
		{"back 10 min: it stands still", func(n *steppedNode) { n.run(31); n.step(-10 * time.Minute); n.run(630) }, 60, 1, []string{"08:00"}},
		{"back 20 min: a new run", func(n *steppedNode) { n.run(31); n.step(-20 * time.Minute); n.run(31) }, 60, 2, []string{"07:45", "08:00"}},
		{"ahead 1 h and back again", func(n *steppedNode) {
			n.run(31)
			n.step(time.Hour)
			n.run(31)
			n.step(-time.Hour)
			n.run(31)
		}, 90, 2, []string{"08:00", "09:00"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := newSteppedNode(t, begin)
			test.play(n)
			rows := n.end()
			runs := map[string]bool{}
			buckets := map[string]bool{}
			perBucket := map[string]int64{}
			total := int64(0)
			for _, row := range rows {
				runs[row.Run] = true
				bucket := row.Bucket.Format("15:04")
				buckets[bucket] = true
				perBucket[row.Run+bucket] += row.GPUUS
				total += row.GPUUS
			}
			if total != int64(test.seconds)*1_000_000 || len(runs) != test.runs {
				t.Errorf("%d µs in %d runs, want %d s in %d", total, len(runs), test.seconds, test.runs)
			}
			for _, bucket := range test.buckets {
				if !buckets[bucket] {
					t.Errorf("nothing in bucket %s: %v", bucket, buckets)
				}
			}
			if len(buckets) != len(test.buckets) {
				t.Errorf("buckets %v, want %v", buckets, test.buckets)
			}
			for bucket, us := range perBucket {
				if us > usage.BucketLength.Microseconds() {
					t.Errorf("bucket %s has %d µs", bucket, us)
				}
			}
		})
	}
}
