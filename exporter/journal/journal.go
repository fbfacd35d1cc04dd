// Package journal keeps a node's usage rows on disk and serves them by cursor.
//
// Rows of buckets that are still open are written over and over, their numbers
// only grow. When a bucket or a run ends they become final: they get a
// sequence number, never change again, and are served from then on.
//
// It is one SQLite database with one writer, in WAL mode and with synchronous
// FULL: a commit is on the disk before Write returns. NORMAL would survive the
// death of the process too, but a power failure could take back a row that was
// already served as final, and the same row would later be served with other
// content. At one commit every ten seconds the difference costs nothing.
package journal

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"
)

// Defaults of Options.
const (
	DefaultMaxAge   = 400 * 24 * time.Hour
	DefaultMaxBytes = 1 << 30
)

// minMaxBytes is room for some thousand rows beside the empty database.
const minMaxBytes = 1 << 20

// maxNodeBytes is more than any host name has.
const maxNodeBytes = 255

// fileName is the database within the state directory.
const fileName = "journal.db"

var (
	// ErrLocked says that another exporter meters this node or uses this
	// state directory.
	ErrLocked = errors.New("journal is in use")
	// ErrDiskFull says that the disk does not take what must be written.
	// Nothing of the batch is stored; it can be written again.
	ErrDiskFull = errors.New("disk is full or fails")
	// ErrClosed says that the journal was closed before.
	ErrClosed = errors.New("journal is closed")
)

// Options says where the journal is and how much it keeps.
type Options struct {
	Dir    string // state directory, made with mode 0700 if it is not there
	Node   string // every row written must be of this node
	BootID string // this boot of the machine, told in logs only
	// LockPath is the file that keeps a second exporter off this node. It
	// must not be in Dir, because two exporters may have two. Empty means
	// DefaultLockPath.
	LockPath string
	MaxAge   time.Duration // rows older than this are pruned; 0 means DefaultMaxAge
	MaxBytes int64         // bound of the database file; 0 means DefaultMaxBytes
	Logger   *slog.Logger
	Now      func() time.Time
}

// Journal is an open journal. Its methods may be called from several
// goroutines.
type Journal struct {
	options Options
	path    string
	log     *slog.Logger
	now     func() time.Time
	locks   []*os.File

	writing   sync.Mutex             // one writer; guards writer and the six below
	writer    *sql.DB                // nil while the database could not be opened
	files     map[string]fs.FileInfo // of the open database and its log, by suffix
	checked   bool                   // for damage
	closed    bool
	lastPrune time.Time
	toldOld   time.Time

	serving sync.RWMutex  // guards reader
	reader  *sql.DB       // nil while the database could not be opened
	pages   chan struct{} // slots for pages held in memory by the handler

	instantUS atomic.Int64
	pulledSeq atomic.Int64 // newest row that a reader has named in a cursor

	statsMu sync.Mutex
	stats   Stats
	oldest  int64 // start of the earliest bucket with a row never pulled, in seconds; -1 if there is none
}

// Stats is how the journal does.
type Stats struct {
	Bytes          int64         // on disk, write-ahead log included
	Rows           int64         // final rows kept
	UnpulledRows   int64         // of these, never pulled
	OldestUnpulled time.Duration // age of the earliest bucket with a row never pulled; 0 if all were
	// PrunedUnpulledRows counts rows that MaxBytes forced out before anyone
	// pulled them, since the journal was opened.
	PrunedUnpulledRows int64
	// LateRows counts final rows of a bucket before one that was already
	// reported complete, since the journal was opened. Only a clock that was
	// set back makes any.
	LateRows  int64
	LastError string // of the newest write; empty if it went well

	// Of a Buffer, while the disk takes nothing:
	WaitingRows  int64
	WaitingBytes int64
	DroppedRows  int64 // rows given up because the buffer was full or they waited too long
	RefusedRows  int64 // rows that the journal can never take, such as one that shrank
}

// Open opens or begins the journal in options.Dir. Open rows that an earlier
// run left become final. A database that is damaged is moved aside and a new
// one begun. If another exporter has the node or the directory, the error is
// ErrLocked. A disk that takes no writes is no error: each Write tries again to
// open the database, and is refused with ErrDiskFull until then.
func Open(ctx context.Context, options Options) (*Journal, error) {
	j, err := newJournal(options)
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := j.lock(); err != nil {
		j.unlock()
		return nil, fmt.Errorf("open journal in %s: %w", j.options.Dir, err)
	}
	j.writing.Lock()
	defer j.writing.Unlock()
	if err = j.explain(j.start(ctx)); err == nil {
		return j, nil
	}
	err = fmt.Errorf("open journal %s: %w", j.path, err)
	if !errors.Is(err, ErrDiskFull) {
		j.unlock()
		return nil, err
	}
	j.log.Error("the journal can't be opened; it is tried again with every write", "err", err)
	j.stats.LastError = err.Error()
	j.instantUS.Store(committedTo(ctx, j.path))
	return j, nil
}

func newJournal(options Options) (*Journal, error) {
	if options.Dir == "" {
		return nil, errors.New("no state directory given: set --state.dir")
	}
	// What rows can't hold would be found out row by row, too late.
	if options.Node == "" || !utf8.ValidString(options.Node) || strings.ContainsFunc(options.Node, unicode.IsControl) || len(options.Node) > maxNodeBytes {
		return nil, fmt.Errorf("node name %.100q is empty, longer than %d bytes, or not plain text: give another with --node.name", options.Node, maxNodeBytes)
	}
	if options.MaxAge == 0 {
		options.MaxAge = DefaultMaxAge
	}
	if options.MaxBytes == 0 {
		options.MaxBytes = DefaultMaxBytes
	}
	if options.MaxAge < 0 || options.MaxBytes < minMaxBytes {
		return nil, fmt.Errorf("a journal of at most %s and %d bytes is too small: allow it %d bytes at least", options.MaxAge, options.MaxBytes, minMaxBytes)
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if options.Now == nil {
		options.Now = time.Now
	}
	dir, err := filepath.Abs(options.Dir)
	if err != nil {
		return nil, fmt.Errorf("state directory %s: %w", options.Dir, err)
	}
	options.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make state directory: %w", err)
	}
	return &Journal{
		options: options,
		path:    filepath.Join(dir, fileName),
		log:     options.Logger,
		now:     options.Now,
		pages:   make(chan struct{}, 2),
		oldest:  -1,
	}, nil
}

// begin opens the database and makes final what an earlier run left open.
func (j *Journal) begin(ctx context.Context) error {
	if err := j.openDatabase(ctx); err != nil {
		return err
	}
	var left int64
	var boot string
	err := j.writer.QueryRowContext(ctx, "SELECT (SELECT count(*) FROM open), boot, instant_us, pulled_seq FROM journal").
		Scan(&left, &boot, int64Into(&j.instantUS), int64Into(&j.pulledSeq))
	if err != nil {
		return fmt.Errorf("read where the journal ends: %w", err)
	}
	if left > 0 {
		how := "the exporter was killed"
		if boot != j.options.BootID {
			how = "the machine stopped"
		}
		j.log.Info("an earlier run ended without closing its rows: they are final now", "rows", left, "why", how,
			"committed_to", time.UnixMicro(j.instantUS.Load()).UTC())
	}
	return j.write(ctx, Batch{}, true)
}

// LastInstantUS is the newest instant of the ledger's time that is committed,
// in microseconds since 1970; 0 if there is none. Right after Open it is where
// the earlier runs ended, also where a full disk lets the database be read only:
// a new run must not meter anything before it.
func (j *Journal) LastInstantUS() int64 { return j.instantUS.Load() }

// Path is the database file.
func (j *Journal) Path() string { return j.path }

// Stats says how the journal does. It reads no database.
func (j *Journal) Stats() Stats {
	j.statsMu.Lock()
	stats, oldest := j.stats, j.oldest
	j.statsMu.Unlock()
	for _, suffix := range databaseFiles {
		if info, err := os.Stat(j.path + suffix); err == nil {
			stats.Bytes += info.Size()
		}
	}
	if oldest >= 0 {
		stats.OldestUnpulled = max(0, j.now().Sub(time.Unix(oldest, 0)))
	}
	return stats
}

// Close ends the run as FinishRun does, and closes the journal whether that
// went well or not.
func (j *Journal) Close(ctx context.Context, final Batch) error {
	return errors.Join(j.FinishRun(ctx, final), j.shutdown())
}

func (j *Journal) shutdown() error {
	j.writing.Lock()
	defer j.writing.Unlock()
	if j.closed {
		return nil
	}
	j.closed = true
	j.serving.Lock() // a page that is being read ends first
	err := j.closeDatabase()
	j.serving.Unlock()
	j.unlock()
	if err != nil {
		return fmt.Errorf("close journal %s: %w", j.path, err)
	}
	return nil
}

// atomicScanner lets Scan store into an atomic.
type atomicScanner struct{ into *atomic.Int64 }

func int64Into(into *atomic.Int64) sql.Scanner { return atomicScanner{into} }

func (s atomicScanner) Scan(value any) error {
	n, ok := value.(int64)
	if !ok {
		return fmt.Errorf("%T is not a whole number", value)
	}
	s.into.Store(n)
	return nil
}
