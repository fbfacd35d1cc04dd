package journal

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"gpuledger/exporter/usage"
)

// Batch is what the meter has committed since the batch before it.
type Batch struct {
	// Open are rows of buckets that are still open, each with its sums from
	// the bucket's start. Rows that did not change may be left out.
	Open []usage.Row
	// Final are rows that will never change again, in the order in which they
	// are to be served.
	Final []usage.Row
	// InstantUS is up to where the ledger's time is committed, in microseconds
	// since 1970; 0 leaves it as it was.
	InstantUS int64
	// OpenFrom is the start of the earliest bucket that may still receive
	// rows; zero leaves it as it was. Open rows of earlier buckets that the
	// journal still has become final as they are. It is taken back to the
	// bucket of InstantUS and of the earliest row in Open if it is after them.
	OpenFrom time.Time
}

// RefusedError says which rows of a batch the journal can never take, and why.
// Nothing of the batch is stored.
type RefusedError struct{ Rows []RefusedRow }

// RefusedRow is a row that can't be taken.
type RefusedRow struct {
	Row    usage.Row
	Reason error
}

func (e *RefusedError) Error() string {
	first := e.Rows[0]
	text := fmt.Sprintf("journal refuses %s: %v", describe(&first.Row), first.Reason)
	if more := len(e.Rows) - 1; more > 0 {
		text += fmt.Sprintf(" (and %d more rows)", more)
	}
	return text
}

// Unwrap gives the reasons.
func (e *RefusedError) Unwrap() []error {
	reasons := make([]error, len(e.Rows))
	for i, row := range e.Rows {
		reasons[i] = row.Reason
	}
	return reasons
}

var (
	// ErrFinal is the reason for a row that is final already, with other
	// content.
	ErrFinal = errors.New("it is final already, with other content")
	// ErrShrunk is the reason for a row one of whose numbers is smaller than
	// it was.
	ErrShrunk = errors.New("a number shrank")
)

// Write stores a batch in one transaction: all of it or nothing. A batch that
// was stored before, in full or merged into a larger one, changes nothing. The
// error is a *RefusedError if a row can never be taken, and ErrDiskFull if the
// disk takes no writes now.
func (j *Journal) Write(ctx context.Context, b Batch) error {
	return j.writeLocked(ctx, b, false)
}

// FinishRun stores a batch as Write does, and makes every open row final,
// those of the batch and those stored before: the run is over.
func (j *Journal) FinishRun(ctx context.Context, b Batch) error {
	return j.writeLocked(ctx, finished(b), true)
}

func finished(b Batch) Batch {
	b.Final = append(slices.Clip(b.Final), b.Open...)
	b.Open = nil
	return b
}

func (j *Journal) writeLocked(ctx context.Context, b Batch, finish bool) error {
	j.writing.Lock()
	defer j.writing.Unlock()
	if j.closed {
		return ErrClosed
	}
	err := j.ready(ctx)
	if err == nil {
		err = j.write(ctx, b, finish)
	}
	if err = j.explain(err); err == nil {
		j.prune(ctx)
		return nil
	}
	j.statsMu.Lock()
	j.stats.LastError = err.Error()
	j.statsMu.Unlock()
	return fmt.Errorf("write journal: %w", err)
}

// write needs the lock on writing.
func (j *Journal) write(ctx context.Context, b Batch, finish bool) error {
	tx, err := j.writer.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	w, err := j.startWrite(ctx, tx)
	if err != nil {
		return err
	}
	for i := range b.Final {
		if err := w.final(&b.Final[i]); err != nil {
			return err
		}
	}
	inBatch := make(map[key]bool, len(b.Open))
	openFrom := b.OpenFrom
	for i := range b.Open {
		row := &b.Open[i]
		inBatch[keyOf(&row.Key)] = true
		if row.Bucket.Before(openFrom) {
			openFrom = row.Bucket
		}
		if err := w.open(row); err != nil {
			return err
		}
	}
	if len(w.refused) > 0 {
		return &RefusedError{w.refused}
	}
	w.advance(b.InstantUS, openFrom)
	if err := w.finalStored(func(k key, row *usage.Row) bool {
		return !inBatch[k] && (finish || row.Bucket.Unix() < w.openFrom)
	}); err != nil {
		return err
	}
	return w.commit()
}

// writeState is one write under way.
type writeState struct {
	j       *Journal
	ctx     context.Context
	tx      *sql.Tx
	stored  map[key]usage.Row // open rows as they are stored
	refused []RefusedRow

	seq       int64
	chain     chain
	instantUS int64
	openFrom  int64
	claimed   int64 // openFrom before this write
	late      int64
}

func (j *Journal) startWrite(ctx context.Context, tx *sql.Tx) (*writeState, error) {
	w := &writeState{j: j, ctx: ctx, tx: tx, stored: map[key]usage.Row{}}
	var link []byte
	if err := tx.QueryRowContext(ctx, "SELECT head_seq, head_chain, instant_us, open_from FROM journal").
		Scan(&w.seq, &link, &w.instantUS, &w.openFrom); err != nil {
		return nil, fmt.Errorf("read where the journal ends: %w", err)
	}
	copy(w.chain[:], link)
	w.claimed = w.openFrom
	rows, err := tx.QueryContext(ctx, "SELECT key, "+columns+" FROM open")
	if err != nil {
		return nil, fmt.Errorf("read open rows: %w", err)
	}
	defer rows.Close()
	for rows.Next() {
		var hash []byte
		var row usage.Row
		if err := scan(rows, &row, &hash); err != nil {
			return nil, fmt.Errorf("read open row: %w", err)
		}
		w.stored[key(hash)] = row
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read open rows: %w", err)
	}
	return w, nil
}

func (w *writeState) refuse(row *usage.Row, reason error) {
	w.refused = append(w.refused, RefusedRow{*row, reason})
}

// check finds what makes a row impossible to take, and whether it is final
// already.
func (w *writeState) check(row *usage.Row, k key) (already bool, err error) {
	if err := row.Validate(); err != nil {
		w.refuse(row, err)
		return true, nil
	}
	if row.Node != w.j.options.Node {
		w.refuse(row, fmt.Errorf("it is of node %q and this journal of %q", row.Node, w.j.options.Node))
		return true, nil
	}
	var there usage.Row
	err = scan(w.tx.QueryRowContext(w.ctx, "SELECT "+columns+" FROM final WHERE key = ?", k[:]), &there)
	switch {
	case err == nil:
		if !row.SameContent(&there) {
			w.refuse(row, ErrFinal)
		}
		return true, nil
	case !errors.Is(err, sql.ErrNoRows):
		return false, fmt.Errorf("look for a final row: %w", err)
	}
	if earlier, ok := w.stored[k]; ok {
		if name, before, now, shrunk := row.Shrunk(&earlier); shrunk {
			w.refuse(row, fmt.Errorf("%w: %s from %d to %d", ErrShrunk, name, before, now))
			return true, nil
		}
	}
	return false, nil
}

func (w *writeState) final(row *usage.Row) error {
	k := keyOf(&row.Key)
	already, err := w.check(row, k)
	if err != nil || already {
		return err
	}
	return w.append(*row, k)
}

// append gives row the next place in the journal.
func (w *writeState) append(row usage.Row, k key) error {
	w.seq++
	row.Seq = w.seq
	w.chain = w.chain.next(&row)
	if _, err := w.tx.ExecContext(w.ctx, "INSERT INTO final (seq, chain, key, "+columns+") VALUES (?, ?, ?, "+places+")",
		append([]any{row.Seq, w.chain[:], k[:]}, values(&row)...)...); err != nil {
		return fmt.Errorf("store final row: %w", err)
	}
	bucket := row.Bucket.Unix()
	if _, err := w.tx.ExecContext(w.ctx, "INSERT INTO bucket (start, last_seq) VALUES (?, ?) ON CONFLICT (start) DO UPDATE SET last_seq = excluded.last_seq",
		bucket, row.Seq); err != nil {
		return fmt.Errorf("store bucket: %w", err)
	}
	if bucket < w.claimed {
		w.late++
	}
	if _, ok := w.stored[k]; ok {
		delete(w.stored, k)
		if _, err := w.tx.ExecContext(w.ctx, "DELETE FROM open WHERE key = ?", k[:]); err != nil {
			return fmt.Errorf("remove open row: %w", err)
		}
	}
	return nil
}

func (w *writeState) open(row *usage.Row) error {
	k := keyOf(&row.Key)
	already, err := w.check(row, k)
	if err != nil || already {
		return err
	}
	if earlier, ok := w.stored[k]; ok && row.SameContent(&earlier) {
		return nil
	}
	if _, err := w.tx.ExecContext(w.ctx, "INSERT OR REPLACE INTO open (key, "+columns+") VALUES (?, "+places+")",
		append([]any{k[:]}, values(row)...)...); err != nil {
		return fmt.Errorf("store open row: %w", err)
	}
	w.stored[k] = *row
	return nil
}

// advance moves the committed instant and the earliest open bucket.
func (w *writeState) advance(instantUS int64, openFrom time.Time) {
	// The ledger's time falls only where a clock that was far ahead was set
	// back and a new run began; a little less is an old batch written again.
	if instantUS > w.instantUS || (instantUS > 0 && w.instantUS-instantUS > usage.BucketLength.Microseconds()) {
		if instantUS < w.instantUS {
			w.j.log.Warn("the ledger's time was set back", "from", time.UnixMicro(w.instantUS).UTC(), "to", time.UnixMicro(instantUS).UTC())
		}
		w.instantUS = instantUS
	}
	if openFrom.IsZero() {
		return
	}
	bucket := int64(usage.BucketLength / time.Second)
	from := openFrom.Unix()
	if w.instantUS > 0 {
		from = min(from, w.instantUS/1e6)
	}
	w.openFrom = max(0, from-from%bucket)
}

// finalStored makes open rows final as they are stored, in a fixed order.
func (w *writeState) finalStored(which func(key, *usage.Row) bool) error {
	type ended struct {
		key  key
		row  usage.Row
		line []byte
	}
	var rows []ended
	for k, row := range w.stored {
		if which(k, &row) {
			rows = append(rows, ended{k, row, usage.AppendJSON(nil, &row)})
		}
	}
	slices.SortFunc(rows, func(a, b ended) int {
		if c := a.row.Bucket.Compare(b.row.Bucket); c != 0 {
			return c
		}
		return bytes.Compare(a.line, b.line)
	})
	for _, r := range rows {
		if err := w.append(r.row, r.key); err != nil {
			return err
		}
	}
	return nil
}

func (w *writeState) commit() error {
	j := w.j
	pulled := j.pulledSeq.Load()
	if _, err := w.tx.ExecContext(w.ctx, "UPDATE journal SET node = ?, boot = ?, head_seq = ?, head_chain = ?, instant_us = ?, open_from = ?, pulled_seq = ?",
		j.options.Node, j.options.BootID, w.seq, w.chain[:], w.instantUS, w.openFrom, pulled); err != nil {
		return fmt.Errorf("store where the journal ends: %w", err)
	}
	var first, oldest sql.NullInt64
	if err := w.tx.QueryRowContext(w.ctx, "SELECT (SELECT min(seq) FROM final), (SELECT min(start) FROM bucket INDEXED BY bucket_last_seq WHERE last_seq > ?)", pulled).
		Scan(&first, &oldest); err != nil {
		return fmt.Errorf("count rows: %w", err)
	}
	if err := w.tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	j.instantUS.Store(w.instantUS)
	if w.late > 0 {
		j.log.Warn("rows came for a bucket that was reported complete: the clock was set back", "rows", w.late, "complete_through", time.Unix(w.claimed, 0).UTC())
	}
	j.statsMu.Lock()
	defer j.statsMu.Unlock()
	j.stats.LastError = ""
	j.stats.LateRows += w.late
	j.stats.Rows, j.stats.UnpulledRows, j.oldest = 0, 0, -1
	if first.Valid {
		j.stats.Rows = w.seq - first.Int64 + 1
		j.stats.UnpulledRows = w.seq - max(pulled, first.Int64-1)
	}
	if oldest.Valid {
		j.oldest = oldest.Int64
	}
	return nil
}
