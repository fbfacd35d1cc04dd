package exporter

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/journal"
	"gpuledger/exporter/usage"
)

// writer takes batches to the journal in its own goroutine, so that a slow
// disk holds up neither readings nor what people see.
type writer struct {
	buffer *journal.Buffer
	logger *slog.Logger
	wake   chan struct{}
	latest atomic.Pointer[journal.Stats]

	mu        sync.Mutex
	final     []usage.Row
	open      map[usage.Key]usage.Row // newest state of each
	instantUS int64
	openFrom  time.Time

	failing bool // touched by the writing goroutine only
}

func newWriter(buffer *journal.Buffer, logger *slog.Logger) *writer {
	w := &writer{buffer: buffer, logger: logger, wake: make(chan struct{}, 1), open: map[usage.Key]usage.Row{}}
	stats := buffer.Stats()
	w.latest.Store(&stats)
	return w
}

// put queues a batch behind those that wait.
func (w *writer) put(batch journal.Batch) {
	w.mu.Lock()
	w.final = append(w.final, batch.Final...)
	for _, row := range batch.Final {
		delete(w.open, row.Key)
	}
	for _, row := range batch.Open {
		w.open[row.Key] = row
	}
	w.instantUS = max(w.instantUS, batch.InstantUS)
	if !batch.OpenFrom.IsZero() {
		w.openFrom = batch.OpenFrom
	}
	w.mu.Unlock()
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// take empties the queue.
func (w *writer) take() journal.Batch {
	w.mu.Lock()
	defer w.mu.Unlock()
	batch := journal.Batch{
		Final: w.final, Open: slices.Collect(maps.Values(w.open)), InstantUS: w.instantUS, OpenFrom: w.openFrom,
	}
	w.final, w.open, w.instantUS, w.openFrom = nil, map[usage.Key]usage.Row{}, 0, time.Time{}
	return batch
}

// run writes until ctx ends.
func (w *writer) run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake:
		}
		// The write goes on when ctx ends: half a second more, and no row that
		// has to be written twice.
		err := w.buffer.Write(context.WithoutCancel(ctx), w.take())
		switch {
		case err != nil && !w.failing:
			w.logger.Error("the journal does not take rows; they wait in memory", "err", err)
		case err == nil && w.failing:
			w.logger.Info("the journal takes rows again")
		}
		w.failing = err != nil
		stats := w.buffer.Stats()
		w.latest.Store(&stats)
	}
}

// stats are those after the newest write: a disk that hangs must not hold up
// who asks.
func (w *writer) stats() journal.Stats { return *w.latest.Load() }
