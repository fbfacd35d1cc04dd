package journal

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/mattn/go-sqlite3"

	"gpuledger/exporter/usage"
)

// Exported says what Export wrote.
type Exported struct {
	Rows int64
	Next Cursor // of the last row written
	// CompleteThrough is up to when the rows tell everything of the node.
	CompleteThrough time.Time
}

// Export writes every final row of the journal in dir to w as NDJSON. It needs
// no exporter running, and is in no running exporter's way: it changes nothing
// and reads page by page, so that a slow w holds no transaction. So a node
// without a network can be carried to accounting in a file. The lines are those
// of the HTTP API.
func Export(ctx context.Context, dir string, w io.Writer) (Exported, error) {
	exported, err := export(ctx, dir, w)
	if err != nil {
		return exported, fmt.Errorf("export journal in %s: %w", dir, err)
	}
	return exported, nil
}

func export(ctx context.Context, dir string, w io.Writer) (Exported, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return Exported{}, err
	}
	path := filepath.Join(dir, fileName)
	if _, err := os.Stat(path); err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return Exported{}, fmt.Errorf("there is no %s: is this the exporter's --state.dir? %w", fileName, err)
		}
		return Exported{}, err
	}
	db, err := openToRead(ctx, path)
	if err != nil {
		return Exported{}, err
	}
	defer db.Close()
	var lines bytes.Buffer
	encoder := usage.NewEncoder(&lines)
	exported := Exported{CompleteThrough: time.Unix(0, 0).UTC()}
	for {
		before := exported.Rows
		page, _, err := readPage(ctx, db, exported.Next, defaultLimit, func(row *usage.Row) (bool, error) {
			exported.Rows++
			return true, encoder.Encode(row)
		})
		if err != nil {
			return exported, err
		}
		exported.Next, exported.CompleteThrough = page.Next, page.CompleteThrough
		if exported.Rows == before {
			return exported, nil
		}
		if _, err := lines.WriteTo(w); err != nil {
			return exported, fmt.Errorf("write rows: %w", err)
		}
	}
}

// openToRead opens a database without changing it. One that was closed well
// has nothing in a log beside it, and can be read where nothing can be written
// at all.
func openToRead(ctx context.Context, path string) (*sql.DB, error) {
	open := func(more url.Values) (*sql.DB, error) {
		more.Set("_busy_timeout", "5000")
		more.Set("_cache_size", "-1024")
		more.Set("_query_only", "1")
		more.Set("mode", "ro")
		db, err := sql.Open("sqlite3", dsn(path, more))
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(1)
		var version int64
		if err := db.QueryRowContext(ctx, "SELECT head_seq FROM journal").Scan(&version); err != nil {
			db.Close()
			return nil, fmt.Errorf("%s is not a journal that can be read: %w", path, err)
		}
		return db, nil
	}
	db, err := open(url.Values{})
	var failed sqlite3.Error
	if errors.As(err, &failed) && slices.Contains([]sqlite3.ErrNo{sqlite3.ErrCantOpen, sqlite3.ErrReadonly, sqlite3.ErrFull, sqlite3.ErrIoErr}, failed.Code) {
		if log, statErr := os.Stat(path + "-wal"); errors.Is(statErr, fs.ErrNotExist) || statErr == nil && log.Size() == 0 {
			return open(url.Values{"immutable": {"1"}})
		}
	}
	return db, err
}

// committedTo is the newest instant in a database that can only be read, 0 if
// it can't be read either.
func committedTo(ctx context.Context, path string) (instantUS int64) {
	db, err := openToRead(ctx, path)
	if err != nil {
		return 0
	}
	defer db.Close()
	if err := db.QueryRowContext(ctx, "SELECT instant_us FROM journal").Scan(&instantUS); err != nil {
		return 0
	}
	return instantUS
}
