package journal

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"
	"unsafe"

	"gpuledger/exporter/usage"
)

// Defaults of BufferOptions.
const (
	DefaultBufferAge   = 24 * time.Hour
	DefaultBufferBytes = 64 << 20
)

// BufferOptions bounds what waits in memory.
type BufferOptions struct {
	MaxAge   time.Duration // of a row since its bucket's end; 0 means DefaultBufferAge
	MaxBytes int64         // of all rows, about; 0 means DefaultBufferBytes
}

// Buffer writes to a journal and keeps in memory what the disk does not take.
// Every write tries all that waits again, in order and in one transaction, so
// that nothing is lost and nothing doubled once the disk takes writes again.
// Rows wait within bounds; what is dropped there is logged and counted.
type Buffer struct {
	journal *Journal
	options BufferOptions
	log     *slog.Logger

	mu         sync.Mutex
	final      []usage.Row
	finalKeys  map[key]int // index in final
	open       map[key]usage.Row
	instantUS  int64
	openFrom   time.Time
	finish     bool
	bytes      int64
	dropped    int64
	refused    int64
	toldRefuse time.Time
}

// NewBuffer puts a buffer before a journal. From then on the journal must only
// be written through it.
func NewBuffer(j *Journal, options BufferOptions) *Buffer {
	if options.MaxAge == 0 {
		options.MaxAge = DefaultBufferAge
	}
	if options.MaxBytes == 0 {
		options.MaxBytes = DefaultBufferBytes
	}
	return &Buffer{journal: j, options: options, log: j.log, finalKeys: map[key]int{}, open: map[key]usage.Row{}}
}

// Write takes a batch, and stores it with whatever waits. After an error that
// is a *RefusedError the rows it names are given up and all others are on the
// disk; after any other the rows wait for the next Write. Either way the batch
// must not be written again.
func (b *Buffer) Write(ctx context.Context, batch Batch) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.merge(batch)
	return b.flush(ctx)
}

// FinishRun takes a batch as Write does and makes every open row final.
func (b *Buffer) FinishRun(ctx context.Context, batch Batch) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.merge(batch)
	open := make([]usage.Row, 0, len(b.open))
	for _, row := range b.open {
		open = append(open, row)
	}
	slices.SortFunc(open, func(x, y usage.Row) int { return x.Bucket.Compare(y.Bucket) })
	b.merge(Batch{Final: open})
	b.finish = true
	return b.flush(ctx)
}

// Close ends the run and closes the journal. Rows that the disk does not take
// now are lost, and the error says so.
func (b *Buffer) Close(ctx context.Context, final Batch) error {
	err := b.FinishRun(ctx, final)
	if waiting := b.Stats().WaitingRows; waiting > 0 {
		b.log.Error("the exporter ends while the disk takes no writes: rows are lost", "rows", waiting, "err", err)
	}
	return errors.Join(err, b.journal.shutdown())
}

// Stats are the journal's, and what waits.
func (b *Buffer) Stats() Stats {
	stats := b.journal.Stats()
	b.mu.Lock()
	defer b.mu.Unlock()
	stats.WaitingRows = int64(len(b.final) + len(b.open))
	stats.WaitingBytes = b.bytes
	stats.DroppedRows = b.dropped
	stats.RefusedRows = b.refused
	return stats
}

// merge puts a batch onto what waits: newest open state, final over open.
func (b *Buffer) merge(batch Batch) {
	for _, row := range batch.Final {
		k := keyOf(&row.Key)
		if earlier, ok := b.open[k]; ok {
			b.bytes -= rowBytes(&earlier)
			delete(b.open, k)
		}
		if i, ok := b.finalKeys[k]; ok {
			if !row.SameContent(&b.final[i]) {
				b.giveUp(RefusedRow{row, ErrFinal})
			}
			continue
		}
		b.finalKeys[k] = len(b.final)
		b.final = append(b.final, row)
		b.bytes += rowBytes(&row)
	}
	for _, row := range batch.Open {
		k := keyOf(&row.Key)
		if i, ok := b.finalKeys[k]; ok {
			if !row.SameContent(&b.final[i]) {
				b.giveUp(RefusedRow{row, ErrFinal})
			}
			continue
		}
		if earlier, ok := b.open[k]; ok {
			if _, _, _, shrunk := row.Shrunk(&earlier); shrunk {
				b.giveUp(RefusedRow{row, ErrShrunk})
				continue
			}
			b.bytes -= rowBytes(&earlier)
		}
		b.open[k] = row
		b.bytes += rowBytes(&row)
	}
	if batch.InstantUS > 0 {
		b.instantUS = batch.InstantUS
	}
	if !batch.OpenFrom.IsZero() {
		b.openFrom = batch.OpenFrom
	}
}

// flush writes what waits. Rows that can never be taken are given up, because
// they would hold all others up for ever.
func (b *Buffer) flush(ctx context.Context) error {
	var given error
	for {
		batch := Batch{Final: b.final, InstantUS: b.instantUS, OpenFrom: b.openFrom}
		for _, row := range b.open {
			batch.Open = append(batch.Open, row)
		}
		err := b.journal.writeLocked(ctx, batch, b.finish)
		if err == nil {
			b.final, b.finalKeys, b.open, b.bytes, b.finish = nil, map[key]int{}, map[key]usage.Row{}, 0, false
			return given
		}
		var refused *RefusedError
		if !errors.As(err, &refused) {
			b.bound()
			return errors.Join(given, err)
		}
		given = errors.Join(given, err)
		gone := map[key]bool{}
		for _, row := range refused.Rows {
			b.giveUp(row)
			gone[keyOf(&row.Row.Key)] = true
		}
		b.remove(func(k key, _ *usage.Row) bool { return gone[k] })
	}
}

// bound drops the oldest final rows that the bounds leave no room for.
func (b *Buffer) bound() {
	oldest := b.journal.now().Add(-b.options.MaxAge - usage.BucketLength)
	excess := b.bytes - b.options.MaxBytes
	dropped := b.remove(func(_ key, row *usage.Row) bool {
		if excess <= 0 && !row.Bucket.Before(oldest) {
			return false
		}
		excess -= rowBytes(row)
		return true
	})
	if dropped > 0 {
		b.dropped += int64(dropped)
		b.log.Error("the disk takes no writes and what may wait in memory is full: the oldest rows are lost", "rows", dropped,
			"lost_in_all", b.dropped, "max_age", b.options.MaxAge, "max_bytes", b.options.MaxBytes)
	}
}

// remove takes rows out: final ones in order, then open ones.
func (b *Buffer) remove(which func(key, *usage.Row) bool) (removed int) {
	kept := make([]usage.Row, 0, len(b.final))
	keys := make(map[key]int, len(b.final))
	for i := range b.final {
		row := &b.final[i]
		k := keyOf(&row.Key)
		if which(k, row) {
			b.bytes -= rowBytes(row)
			removed++
			continue
		}
		keys[k] = len(kept)
		kept = append(kept, *row)
	}
	b.final, b.finalKeys = kept, keys
	for k, row := range b.open {
		if which(k, &row) {
			b.bytes -= rowBytes(&row)
			removed++
			delete(b.open, k)
		}
	}
	return removed
}

func (b *Buffer) giveUp(row RefusedRow) {
	b.refused++
	if now := b.journal.now(); now.Sub(b.toldRefuse) >= time.Minute || now.Before(b.toldRefuse) {
		b.toldRefuse = now
		b.log.Error("a row can't be stored and is given up; this is a fault of gpu-exporter: please report it", "row", describe(&row.Row), "why", row.Reason, "given_up_in_all", b.refused)
	}
}

// rowBytes is about what a row takes in memory: itself, its texts, and its
// place in the index.
func rowBytes(r *usage.Row) int64 {
	texts := len(r.Run) + len(r.Device) + len(r.State) + len(r.User) + len(r.Kind) + len(r.Workload) + len(r.Project) + len(r.Class) +
		len(r.Node) + len(r.Card) + len(r.Model) + len(r.Profile) + len(r.AttributedBy)
	return int64(unsafe.Sizeof(*r)) + int64(texts) + 2*chainLength
}
