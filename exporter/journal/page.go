package journal

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/usage"
)

// MaxLimit is the most rows one page can have.
const MaxLimit = 10_000

var (
	// ErrCursorGone says that the journal does not have the row that the
	// cursor names. The reader begins again with the empty cursor: a row it
	// has already is the same row.
	ErrCursorGone = errors.New("this journal does not have the row that the cursor names: it was lost, restored or pruned; read again from the start, without a cursor")
	// ErrBadCursor says that the text is no cursor.
	ErrBadCursor = errors.New("not a cursor of a journal")
)

// Cursor names the last row that a reader has taken; empty before the first.
// Its text means nothing to a reader.
type Cursor string

func cursorAt(seq int64, c chain) Cursor {
	return Cursor(strconv.FormatInt(seq, 10) + "-" + hex.EncodeToString(c[:]))
}

func (c Cursor) parse() (seq int64, link chain, err error) {
	number, text, found := strings.Cut(string(c), "-")
	seq, err = strconv.ParseInt(number, 10, 64)
	raw, hexErr := hex.DecodeString(text)
	if !found || err != nil || seq < 1 || hexErr != nil || len(raw) != chainLength {
		return 0, chain{}, fmt.Errorf("%w: %.100q", ErrBadCursor, string(c))
	}
	return seq, chain(raw), nil
}

// Page is what a reader takes at once.
type Page struct {
	Rows []usage.Row
	Next Cursor // where the next page begins; the same as before if there were no rows
	// CompleteThrough is a bucket's start: every row of this node before it has
	// been served up to Next. It is the start of 1970 if nothing is known.
	CompleteThrough time.Time
}

// Usage returns up to limit final rows after a cursor, in order. There are more
// for as long as a page has rows.
func (j *Journal) Usage(ctx context.Context, after Cursor, limit int) (Page, error) {
	var rows []usage.Row
	page, err := j.page(ctx, after, limit, func(row *usage.Row) (bool, error) {
		rows = append(rows, *row)
		return true, nil
	})
	page.Rows = rows
	return page, err
}

// page reads one page and remembers how far its reader is.
func (j *Journal) page(ctx context.Context, after Cursor, limit int, take func(*usage.Row) (more bool, err error)) (Page, error) {
	j.serving.RLock()
	defer j.serving.RUnlock()
	if j.reader == nil {
		return Page{}, fmt.Errorf("read journal: %w: %s could not be opened yet", ErrDiskFull, j.path)
	}
	page, seq, err := readPage(ctx, j.reader, after, limit, take)
	if err != nil {
		return Page{}, fmt.Errorf("read journal: %w", j.explain(err))
	}
	for {
		pulled := j.pulledSeq.Load()
		if seq <= pulled || j.pulledSeq.CompareAndSwap(pulled, seq) {
			return page, nil
		}
	}
}

// readPage gives up to limit rows to take, until it wants no more, within one
// read transaction. It returns the place that after names too.
func readPage(ctx context.Context, db *sql.DB, after Cursor, limit int, take func(*usage.Row) (more bool, err error)) (page Page, afterSeq int64, err error) {
	if limit < 1 || limit > MaxLimit {
		return Page{}, 0, fmt.Errorf("limit %d is not between 1 and %d", limit, MaxLimit)
	}
	var link chain
	if after != "" {
		if afterSeq, link, err = after.parse(); err != nil {
			return Page{}, 0, err
		}
	}
	tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return Page{}, 0, fmt.Errorf("begin: %w", err)
	}
	defer tx.Rollback()
	if after != "" {
		var there []byte
		err := tx.QueryRowContext(ctx, "SELECT chain FROM final WHERE seq = ?", afterSeq).Scan(&there)
		if errors.Is(err, sql.ErrNoRows) || (err == nil && string(there) != string(link[:])) {
			return Page{}, 0, ErrCursorGone
		}
		if err != nil {
			return Page{}, 0, fmt.Errorf("look for the cursor's row: %w", err)
		}
	}
	page.Next = after
	next, link, err := takeRows(ctx, tx, afterSeq, limit, take)
	if err != nil {
		return Page{}, 0, err
	}
	if next != afterSeq {
		page.Next = cursorAt(next, link)
	}
	if page.CompleteThrough, err = completeThrough(ctx, tx, next); err != nil {
		return Page{}, 0, err
	}
	return page, afterSeq, nil
}

func takeRows(ctx context.Context, tx *sql.Tx, after int64, limit int, take func(*usage.Row) (bool, error)) (last int64, link chain, err error) {
	rows, err := tx.QueryContext(ctx, "SELECT seq, chain, "+columns+" FROM final WHERE seq > ? ORDER BY seq LIMIT ?", after, limit)
	if err != nil {
		return 0, chain{}, fmt.Errorf("read rows: %w", err)
	}
	defer rows.Close()
	last = after
	var raw sql.RawBytes
	for rows.Next() {
		var row usage.Row
		if err := scan(rows, &row, &row.Seq, &raw); err != nil {
			return 0, chain{}, fmt.Errorf("read row after %d: %w", last, err)
		}
		last = row.Seq
		copy(link[:], raw)
		more, err := take(&row)
		if err != nil {
			return 0, chain{}, err
		}
		if !more {
			break
		}
	}
	if err := rows.Err(); err != nil {
		return 0, chain{}, fmt.Errorf("read rows: %w", err)
	}
	return last, link, nil
}

// completeThrough is the earliest bucket that still has, or may still get, a
// row that a reader at seq has not taken.
func completeThrough(ctx context.Context, tx *sql.Tx, seq int64) (time.Time, error) {
	var openFrom int64
	var open, unserved sql.NullInt64
	err := tx.QueryRowContext(ctx, `SELECT open_from, (SELECT min(bucket) FROM open),
		(SELECT min(start) FROM bucket INDEXED BY bucket_last_seq WHERE last_seq > ?) FROM journal`, seq).Scan(&openFrom, &open, &unserved)
	if err != nil {
		return time.Time{}, fmt.Errorf("read how far the journal is complete: %w", err)
	}
	through := openFrom
	for _, bucket := range []sql.NullInt64{open, unserved} {
		if bucket.Valid {
			through = min(through, bucket.Int64)
		}
	}
	return time.Unix(through, 0).UTC(), nil
}
