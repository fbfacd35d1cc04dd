// Package sqlite keeps the ledger in one SQLite file: one writer at a time,
// any number of readers, and any number of processes.
package sqlite

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	_ "github.com/mattn/go-sqlite3" // the driver "sqlite3"
	"github.com/pressly/goose/v3"
	"golang.org/x/sys/unix"

	"gpuledger/accounting/ledger/migrations"
)

// busyTimeout is how long one process waits for another one's transaction.
const busyTimeout = 20 * time.Second

// Store is an open ledger.
type Store struct {
	path   string
	writer *sql.DB // one connection
	reader *sql.DB

	write sync.Mutex // one transaction at a time, so that none waits in SQLite
	known *dimensions
}

// Open opens the ledger at a path, makes it if there is none, and brings its
// schema up to date. The folder must exist.
func Open(ctx context.Context, path string) (*Store, error) {
	absolute, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("open ledger %s: %w", path, err)
	}
	// Only its owner may read who used what. SQLite gives its -wal and -shm
	// files the mode of the main file.
	file, err := os.OpenFile(absolute, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	switch {
	case err == nil:
		if err := file.Close(); err != nil {
			return nil, fmt.Errorf("make ledger %s: %w", path, err)
		}
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("make ledger %s: the folder %s does not exist: make it, owned by the user who runs gpu-accounting", path, filepath.Dir(absolute))
	case !errors.Is(err, os.ErrExist):
		return nil, fmt.Errorf("make ledger %s: %w", path, err)
	}

	s := &Store{path: absolute, known: newDimensions()}
	s.writer, err = sql.Open("sqlite3", dsn(absolute, url.Values{"_txlock": {"immediate"}}))
	if err != nil {
		return nil, fmt.Errorf("open ledger %s: %w", path, err)
	}
	s.writer.SetMaxOpenConns(1)
	s.reader, err = sql.Open("sqlite3", dsn(absolute, url.Values{"_query_only": {"on"}}))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open ledger %s: %w", path, err), s.writer.Close())
	}
	s.reader.SetMaxOpenConns(4)
	if err := s.migrate(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open ledger %s: %w", path, err), s.Close())
	}
	return s, nil
}

func dsn(path string, more url.Values) string {
	query := url.Values{
		"_busy_timeout": {fmt.Sprint(busyTimeout.Milliseconds())},
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"}, // a power cut must not take back what a report showed
		"_foreign_keys": {"on"},
		"_cache_size":   {"-65536"}, // KiB
	}
	for key, values := range more {
		query[key] = values
	}
	return (&url.URL{Scheme: "file", Path: path, RawQuery: query.Encode()}).String()
}

// migrate brings the schema up to date, one process at a time. The lock is on
// the folder, because a lock on the file itself would be lost with the first
// descriptor of it that this process closes (fcntl(2)).
func (s *Store) migrate(ctx context.Context) (err error) {
	folder, err := os.Open(filepath.Dir(s.path))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, folder.Close()) }()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := unix.Flock(int(folder.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock %s: %w", folder.Name(), err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("lock %s: another process holds it: %w", folder.Name(), ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	files, err := migrations.SQLite()
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, s.writer, files, goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return err
	}
	current, target, err := provider.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("read the schema's version: %w", err)
	}
	if current > target {
		return fmt.Errorf("its schema has version %d, this program knows versions up to %d: use the newer gpu-accounting", current, target)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("bring the schema up to date: %w", err)
	}
	return nil
}

// Path is where the ledger is.
func (s *Store) Path() string { return s.path }

// Size is the size of the ledger's files in bytes.
func (s *Store) Size() (int64, error) {
	var size int64
	for _, suffix := range []string{"", "-wal"} {
		info, err := os.Stat(s.path + suffix)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return 0, err
		}
		size += info.Size()
	}
	return size, nil
}

// Close closes the ledger.
func (s *Store) Close() error { return errors.Join(s.reader.Close(), s.writer.Close()) }

// update runs do in one write transaction.
func (s *Store) update(ctx context.Context, do func(*sql.Tx) error) error {
	s.write.Lock()
	defer s.write.Unlock()
	tx, err := s.writer.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("write to ledger: %w", err)
	}
	err = do(tx)
	if err == nil {
		err = tx.Commit()
	}
	if err != nil {
		// Numbers that this transaction gave out are void.
		s.known = newDimensions()
		if undo := tx.Rollback(); undo != nil && !errors.Is(undo, sql.ErrTxDone) {
			err = errors.Join(err, undo)
		}
		return fmt.Errorf("write to ledger: %w", err)
	}
	return nil
}

// view runs do in one read transaction: all that it reads is of one moment.
func (s *Store) view(ctx context.Context, do func(*sql.Tx) error) (err error) {
	tx, err := s.reader.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("read ledger: %w", err)
	}
	defer func() {
		if undo := tx.Rollback(); undo != nil && !errors.Is(undo, sql.ErrTxDone) {
			err = errors.Join(err, undo)
		}
	}()
	if err := do(tx); err != nil {
		return fmt.Errorf("read ledger: %w", err)
	}
	return nil
}
