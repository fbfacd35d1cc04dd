package journal

import (
	"context"
	"crypto/rand"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"time"

	"github.com/mattn/go-sqlite3"
	"github.com/pressly/goose/v3"
)

//go:embed migrations/*.sql
var migrations embed.FS

// databaseFiles are the suffixes of the files that SQLite keeps in WAL mode.
var databaseFiles = []string{"", "-wal", "-shm"}

// checkTime bounds the look for damage at the start; a large journal on a slow
// disk is then only looked at in part.
const checkTime = 10 * time.Second

var errCheckFailed = errors.New("the database is damaged")

// dsn names a database file for the driver, whatever its path holds.
func dsn(path string, parameters url.Values) string {
	return (&url.URL{Scheme: "file", Path: path}).String() + "?" + parameters.Encode()
}

// openDatabase opens one connection to write and a pool of two to read. Caches
// are small: the exporter shares a machine with other people's work.
func (j *Journal) openDatabase(ctx context.Context) error {
	// SQLite gives its log and index the mode of the database file.
	file, err := os.OpenFile(j.path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	j.writer, err = sql.Open("sqlite3", dsn(j.path, url.Values{
		"_auto_vacuum":  {"incremental"},
		"_busy_timeout": {"5000"},
		"_cache_size":   {"-2048"},
		"_journal_mode": {"WAL"},
		"_synchronous":  {"FULL"},
		"_txlock":       {"immediate"},
	}))
	if err != nil {
		return err
	}
	j.writer.SetMaxOpenConns(1)
	if err := j.check(ctx); err != nil {
		return err
	}
	if err := migrate(ctx, j.writer); err != nil {
		return err
	}
	if _, err := j.writer.ExecContext(ctx, "PRAGMA journal_size_limit = 4194304"); err != nil {
		return err
	}
	id := make([]byte, chainLength)
	rand.Read(id)
	if _, err := j.writer.ExecContext(ctx, `INSERT INTO journal (only, id, node, boot, head_seq, head_chain, instant_us, open_from, pulled_seq)
		VALUES (1, ?, ?, ?, 0, ?, 0, 0, 0) ON CONFLICT DO NOTHING`, id, j.options.Node, j.options.BootID, id); err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	j.reader, err = sql.Open("sqlite3", dsn(j.path, url.Values{
		"_busy_timeout": {"5000"},
		"_cache_size":   {"-1024"},
		"_query_only":   {"1"},
		"mode":          {"rw"}, // never makes a file where the journal's was
	}))
	if err != nil {
		return err
	}
	j.reader.SetMaxOpenConns(2)
	j.reader.SetMaxIdleConns(1)
	j.reader.SetConnMaxIdleTime(time.Minute)
	return nil
}

func (j *Journal) closeDatabase() error {
	var errs []error
	// The writer is last: the last connection to close empties the log.
	for _, db := range []*sql.DB{j.reader, j.writer} {
		if db != nil {
			errs = append(errs, db.Close())
		}
	}
	j.reader, j.writer = nil, nil
	return errors.Join(errs...)
}

// check looks for damage, once and for as long as checkTime.
func (j *Journal) check(ctx context.Context) error {
	if j.checked {
		return nil
	}
	limited, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	var answer string
	err := j.writer.QueryRowContext(limited, "PRAGMA quick_check(1)").Scan(&answer)
	switch {
	case err != nil && ctx.Err() == nil && limited.Err() != nil:
		j.log.Warn("journal was not looked through for damage in full: it is large or the disk is slow", "path", j.path, "time", checkTime)
		return nil
	case err != nil:
		return fmt.Errorf("look for damage: %w", err)
	case answer != "ok":
		return fmt.Errorf("%w: %s", errCheckFailed, answer)
	}
	j.checked = true
	return nil
}

func migrate(ctx context.Context, db *sql.DB) error {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider(goose.DialectSQLite3, db, files)
	if err != nil {
		return fmt.Errorf("migrations: %w", err)
	}
	current, known, err := provider.GetVersions(ctx)
	if err != nil {
		return fmt.Errorf("read schema version: %w", err)
	}
	if current > known {
		return fmt.Errorf("the journal has schema %d and this gpu-exporter knows up to %d: it was written by a newer version; run that one, or move the journal away", current, known)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	return nil
}

// moveAside keeps a damaged database for whoever wants to read what is left of
// it, out of the way of a new one.
func (j *Journal) moveAside(why error) error {
	aside, err := j.renameDatabase("damaged")
	if err != nil {
		return fmt.Errorf("move damaged journal aside: %w", err)
	}
	j.log.Error("journal is damaged: moved aside and a new one begun; rows in it that were not pulled yet are missing from accounting until they are recovered (sqlite3 FILE .recover) and imported",
		"path", j.path, "moved_to", aside, "err", why)
	return nil
}

// renameDatabase gives whatever is in the database's place another name, which
// says why, and returns it; it is empty if there was nothing.
func (j *Journal) renameDatabase(why string) (aside string, err error) {
	stem := j.path + "." + why + "-" + j.now().UTC().Format("20060102T150405Z")
	name := stem
	for n := 1; ; n++ {
		if _, err := os.Lstat(name); errors.Is(err, fs.ErrNotExist) {
			break
		}
		name = fmt.Sprintf("%s-%d", stem, n)
	}
	for _, suffix := range databaseFiles {
		err := os.Rename(j.path+suffix, name+suffix)
		switch {
		case err == nil:
			aside = name
		case !errors.Is(err, fs.ErrNotExist):
			return "", err
		}
	}
	return aside, nil
}

func isCorrupt(err error) bool {
	var failed sqlite3.Error
	if errors.As(err, &failed) {
		return failed.Code == sqlite3.ErrCorrupt || failed.Code == sqlite3.ErrNotADB
	}
	return errors.Is(err, errCheckFailed)
}

// explain adds to a failure of the disk what can be done.
func (j *Journal) explain(err error) error {
	var failed sqlite3.Error
	if !errors.As(err, &failed) || errors.Is(err, ErrDiskFull) {
		return err
	}
	switch failed.Code {
	case sqlite3.ErrFull, sqlite3.ErrIoErr:
		return fmt.Errorf("%w: %s can't be written: free space on its file system, or move --state.dir: %w", ErrDiskFull, j.path, err)
	case sqlite3.ErrCorrupt, sqlite3.ErrNotADB:
		return fmt.Errorf("%s was damaged while in use: restart gpu-exporter to begin a new journal: %w", j.path, err)
	}
	return err
}
