package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/usage"
)

// tests is anything a test can fail on: *testing.T and *rapid.T.
type tests interface {
	Helper()
	Fatalf(string, ...any)
}

var start = time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)

func rowOf(run string, bucket int, user string, us int64) usage.Row {
	return usage.Row{
		Key: usage.Key{Run: run, Device: "GPU-1", Slices: 1, Of: 1, Bucket: start.Add(time.Duration(bucket) * usage.BucketLength),
			State: usage.StateHeld, User: user, UID: 1001, Kind: "host"},
		Node: "gpu01", Card: "GPU-1", Model: "NVIDIA H200",
		Amounts: usage.Amounts{GPUUS: us, ShareUS: us, HeldUS: us},
	}
}

func bucketStart(bucket int) time.Time { return start.Add(time.Duration(bucket) * usage.BucketLength) }

func optionsIn(dir string) Options {
	return Options{Dir: filepath.Join(dir, "state"), LockPath: filepath.Join(dir, "lock"), Node: "gpu01", BootID: "boot",
		Now: func() time.Time { return start.Add(24 * time.Hour) }}
}

func mustOpen(t tests, options Options) *Journal {
	t.Helper()
	j, err := Open(context.Background(), options)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	return j
}

func mustWrite(t tests, j *Journal, b Batch) {
	t.Helper()
	if err := j.Write(context.Background(), b); err != nil {
		t.Fatalf("write: %v", err)
	}
}

// pull reads everything after a cursor in pages of limit rows.
func pull(t tests, j *Journal, after Cursor, limit int) (rows []usage.Row, last Page) {
	t.Helper()
	for {
		page, err := j.Usage(context.Background(), after, limit)
		if err != nil {
			t.Fatalf("usage after %q: %v", after, err)
		}
		if len(page.Rows) == 0 {
			return rows, page
		}
		rows = append(rows, page.Rows...)
		after = page.Next
	}
}

func closeLater(t *testing.T, j *Journal) {
	t.Cleanup(func() {
		if err := j.shutdown(); err != nil {
			t.Error(err)
		}
	})
}

func TestOpenRowsGrowAndBecomeFinal(t *testing.T) {
	options := optionsIn(t.TempDir())
	j := mustOpen(t, options)
	empty, err := j.Usage(t.Context(), "", 10)
	if err != nil || len(empty.Rows) != 0 || empty.Next != "" || !empty.CompleteThrough.Equal(time.Unix(0, 0)) {
		t.Fatalf("an empty journal gives %+v, %v", empty, err)
	}
	instant := bucketStart(0).Add(10 * time.Second).UnixMicro()
	mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", 0, "alice", 10)}, InstantUS: instant, OpenFrom: bucketStart(0)})
	mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", 0, "alice", 20)}, InstantUS: instant, OpenFrom: bucketStart(0)})
	if rows, page := pull(t, j, "", 10); len(rows) != 0 || !page.CompleteThrough.Equal(bucketStart(0)) {
		t.Errorf("open rows are served: %v, complete through %v", rows, page.CompleteThrough)
	}
	err = j.Write(t.Context(), Batch{Open: []usage.Row{rowOf("r1", 0, "alice", 19)}})
	if !errors.Is(err, ErrShrunk) || !strings.Contains(err.Error(), "gpu_us from 20 to 19") {
		t.Errorf("a shrinking row: %v", err)
	}
	if j.Stats().LastError == "" {
		t.Error("the error is not in the stats")
	}
	final := rowOf("r1", 0, "alice", 30)
	b := Batch{Final: []usage.Row{final}, Open: []usage.Row{rowOf("r1", 1, "alice", 5)},
		InstantUS: bucketStart(1).Add(time.Second).UnixMicro(), OpenFrom: bucketStart(1)}
	mustWrite(t, j, b)
	mustWrite(t, j, b) // a retry
	for _, other := range []Batch{{Final: []usage.Row{rowOf("r1", 0, "alice", 31)}}, {Open: []usage.Row{rowOf("r1", 0, "alice", 31)}}} {
		if err := j.Write(t.Context(), other); !errors.Is(err, ErrFinal) {
			t.Errorf("a final row with other content: %v", err)
		}
	}
	rows, page := pull(t, j, "", 10)
	if len(rows) != 1 || rows[0].Seq != 1 || !rows[0].SameContent(&final) || !page.CompleteThrough.Equal(bucketStart(1)) {
		t.Errorf("got %+v, complete through %v", rows, page.CompleteThrough)
	}
	if got, want := j.LastInstantUS(), b.InstantUS; got != want {
		t.Errorf("instant %d, want %d", got, want)
	}
	if err := j.Close(t.Context(), Batch{Open: []usage.Row{rowOf("r1", 1, "alice", 7)}}); err != nil {
		t.Fatal(err)
	}
	if err := j.Write(t.Context(), Batch{}); !errors.Is(err, ErrClosed) {
		t.Errorf("write after close: %v", err)
	}
	j = mustOpen(t, options)
	closeLater(t, j)
	rows, page = pull(t, j, page.Next, 10)
	if len(rows) != 1 || rows[0].Seq != 2 || rows[0].GPUUS != 7 || !page.CompleteThrough.Equal(bucketStart(1)) {
		t.Errorf("after close and open: %+v, complete through %v", rows, page.CompleteThrough)
	}
	if j.LastInstantUS() != b.InstantUS {
		t.Errorf("the committed instant was lost")
	}
}

func TestRefusedRowsAreNamedAndNothingIsStored(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	bad := rowOf("r1", 0, "bob", 1)
	bad.EnergyMJ = -1
	foreign := rowOf("r1", 0, "carol", 1)
	foreign.Node = "gpu02"
	err := j.Write(t.Context(), Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1), bad, foreign}})
	var refused *RefusedError
	if !errors.As(err, &refused) || len(refused.Rows) != 2 || refused.Rows[0].Row.User != "bob" || refused.Rows[1].Row.User != "carol" {
		t.Fatalf("got %v", err)
	}
	if rows, _ := pull(t, j, "", 10); len(rows) != 0 {
		t.Errorf("part of a refused batch is stored: %v", rows)
	}
	buffer := NewBuffer(j, BufferOptions{})
	if err := buffer.Write(t.Context(), Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1), bad, foreign}}); !errors.As(err, &refused) {
		t.Errorf("the buffer says %v", err)
	}
	if rows, _ := pull(t, j, "", 10); len(rows) != 1 || rows[0].User != "alice" {
		t.Errorf("the good row is not stored: %v", rows)
	}
	if s := buffer.Stats(); s.RefusedRows != 2 || s.WaitingRows != 0 || s.WaitingBytes != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestCompleteThroughIsTakenBack(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", 2, "alice", 1)}, InstantUS: bucketStart(2).UnixMicro() + 1, OpenFrom: bucketStart(9)})
	if _, page := pull(t, j, "", 10); !page.CompleteThrough.Equal(bucketStart(2)) {
		t.Errorf("claims %v with an open row at %v", page.CompleteThrough, bucketStart(2))
	}
	// The bucket ended; the meter forgot to say so.
	mustWrite(t, j, Batch{InstantUS: bucketStart(4).UnixMicro() + 1, OpenFrom: bucketStart(9).Add(time.Minute)})
	rows, page := pull(t, j, "", 10)
	if len(rows) != 1 || !page.CompleteThrough.Equal(bucketStart(4)) {
		t.Errorf("got %d rows, complete through %v", len(rows), page.CompleteThrough)
	}
}

func TestSecondExporterIsRefused(t *testing.T) {
	dir := t.TempDir()
	options := optionsIn(dir)
	closeLater(t, mustOpen(t, options))
	for name, other := range map[string]Options{
		"same node":      {Dir: filepath.Join(dir, "other"), LockPath: options.LockPath, Node: "gpu01"},
		"same directory": {Dir: options.Dir, LockPath: filepath.Join(dir, "lock2"), Node: "gpu01"},
	} {
		_, err := Open(t.Context(), other)
		if !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), fmt.Sprintf("PID %d", os.Getpid())) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBadOptions(t *testing.T) {
	for name, options := range map[string]Options{
		"no directory": {Node: "gpu01"},
		"no node":      {Dir: t.TempDir()},
		"NUL":          {Dir: t.TempDir(), Node: "a\x00"},
		"two lines":    {Dir: t.TempDir(), Node: "a\nb"},
		"escape":       {Dir: t.TempDir(), Node: "\x1b[31ma"},
		"long":         {Dir: t.TempDir(), Node: strings.Repeat("x", 5000)},
		"too small":    {Dir: t.TempDir(), Node: "gpu01", MaxBytes: 1000},
	} {
		if _, err := Open(t.Context(), options); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestStateIsPrivateAndPathsMayHoldAnything(t *testing.T) {
	options := optionsIn(filepath.Join(t.TempDir(), "a b?mode=ro&x#%41'\""))
	if err := os.MkdirAll(filepath.Dir(options.LockPath), 0o700); err != nil {
		t.Fatal(err)
	}
	j := mustOpen(t, options)
	closeLater(t, j)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1)}})
	for _, suffix := range databaseFiles {
		info, err := os.Stat(j.Path() + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v: others' history must not be readable", info.Name(), info.Mode())
		}
	}
	var mode int
	if err := j.writer.QueryRow("PRAGMA auto_vacuum").Scan(&mode); err != nil || mode != 2 {
		t.Errorf("auto_vacuum is %d, %v: the file could not shrink", mode, err)
	}
}

func copyDir(t tests, from, to string) {
	t.Helper()
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		t.Fatalf("copy: %v", err)
	}
}

func TestRestoredOlderCopyAnswersGone(t *testing.T) {
	dir := t.TempDir()
	options := optionsIn(dir)
	j := mustOpen(t, options)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1), rowOf("r1", 1, "alice", 1)}})
	_, shared := pull(t, j, "", 10)
	backup := filepath.Join(dir, "backup")
	copyDir(t, options.Dir, backup)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 2, "alice", 1), rowOf("r1", 3, "alice", 1)}})
	_, lost := pull(t, j, "", 10)
	if err := j.shutdown(); err != nil {
		t.Fatal(err)
	}

	options.Dir = backup
	j = mustOpen(t, options)
	closeLater(t, j)
	if _, err := j.Usage(t.Context(), lost.Next, 10); !errors.Is(err, ErrCursorGone) {
		t.Errorf("a cursor beyond the copy: %v", err)
	}
	// Grown past it with another row third and the very same row fourth.
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r2", 2, "alice", 1), rowOf("r1", 3, "alice", 1), rowOf("r2", 4, "alice", 1)}})
	if _, err := j.Usage(t.Context(), lost.Next, 10); !errors.Is(err, ErrCursorGone) {
		t.Errorf("a cursor of the other history: %v", err)
	}
	if rows, _ := pull(t, j, shared.Next, 10); len(rows) != 3 {
		t.Errorf("a cursor of what both have gives %d rows, want 3", len(rows))
	}
	for _, bad := range []Cursor{"x", "1", "1-", "0-" + Cursor(strings.Repeat("0", 32)), "-1-" + Cursor(strings.Repeat("0", 32)), "1-zz"} {
		if _, err := j.Usage(t.Context(), bad, 10); !errors.Is(err, ErrBadCursor) {
			t.Errorf("cursor %q: %v", bad, err)
		}
	}
}

func TestDamagedJournalIsMovedAside(t *testing.T) {
	for name, damage := range map[string]func([]byte) []byte{
		"no database":  func([]byte) []byte { return []byte(strings.Repeat("not a database. ", 1000)) },
		"header gone":  func(b []byte) []byte { copy(b, make([]byte, 100)); return b },
		"page damaged": func(b []byte) []byte { copy(b[2*4096:], bytes.Repeat([]byte{0xa5}, len(b)-2*4096)); return b },
		"cut off":      func(b []byte) []byte { return b[:len(b)/2] },
	} {
		t.Run(name, func(t *testing.T) {
			options := optionsIn(t.TempDir())
			var logged bytes.Buffer
			options.Logger = slog.New(slog.NewTextHandler(&logged, nil))
			j := mustOpen(t, options)
			var rows []usage.Row
			for i := range 200 {
				rows = append(rows, rowOf("r1", i, "alice", 1))
			}
			mustWrite(t, j, Batch{Final: rows})
			_, before := pull(t, j, "", 1000)
			if err := j.Close(t.Context(), Batch{}); err != nil {
				t.Fatal(err)
			}
			content, err := os.ReadFile(j.Path())
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(j.Path(), damage(content), 0o600); err != nil {
				t.Fatal(err)
			}
			j = mustOpen(t, options)
			closeLater(t, j)
			aside, err := filepath.Glob(j.Path() + ".damaged-*")
			if err != nil || len(aside) == 0 || !strings.Contains(logged.String(), "damaged") {
				t.Fatalf("nothing was moved aside: %v, %v, log %s", aside, err, logged.String())
			}
			if _, err := j.Usage(t.Context(), before.Next, 10); !errors.Is(err, ErrCursorGone) {
				t.Errorf("the old cursor: %v", err)
			}
			mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r2", 0, "alice", 1)}})
		})
	}
}

func TestNewerSchemaIsLeftAlone(t *testing.T) {
	options := optionsIn(t.TempDir())
	j := mustOpen(t, options)
	if _, err := j.writer.Exec("INSERT INTO goose_db_version (version_id, is_applied) VALUES (99, 1)"); err != nil {
		t.Fatal(err)
	}
	if err := j.shutdown(); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), options); err == nil || !strings.Contains(err.Error(), "newer version") {
		t.Errorf("got %v", err)
	}
}

func TestFinalRowsNeverChange(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1)}})
	if _, err := j.writer.Exec("UPDATE final SET gpu_us = 2"); err == nil {
		t.Error("a final row was changed")
	}
}

func TestPrune(t *testing.T) {
	options := optionsIn(t.TempDir())
	now := bucketStart(100)
	options.Now = func() time.Time { now = now.Add(pruneEvery); return now }
	options.MaxAge = 90 * usage.BucketLength
	options.MaxBytes = minMaxBytes
	j := mustOpen(t, options)
	closeLater(t, j)
	write := func(from, to int) {
		var rows []usage.Row
		for i := from; i < to; i++ {
			rows = append(rows, rowOf("r1", i, "alice", 1))
		}
		mustWrite(t, j, Batch{Final: rows})
	}
	write(0, 50)
	mustWrite(t, j, Batch{})
	if got := j.Stats(); got.Rows != 50 || got.UnpulledRows != 50 || got.OldestUnpulled <= 0 {
		t.Fatalf("rows that were never pulled: %+v", got)
	}
	page, err := j.Usage(t.Context(), "", 6)
	if err != nil {
		t.Fatal(err)
	}
	// A page that was sent is not pulled yet: the reader must come back for it.
	mustWrite(t, j, Batch{})
	if got := j.Stats(); got.UnpulledRows != 50 {
		t.Fatalf("after a page was sent: %+v", got)
	}
	if _, err := j.Usage(t.Context(), page.Next, 1); err != nil {
		t.Fatal(err)
	}
	mustWrite(t, j, Batch{})
	rows, _ := pull(t, j, "", 100)
	if len(rows) != 45 || rows[0].Seq != 6 {
		t.Fatalf("pruned to %d rows from %d, want 45 from the reader's row 6", len(rows), rows[0].Seq)
	}
	if _, err := j.Usage(t.Context(), page.Next, 1); err != nil {
		t.Errorf("the reader's cursor was pruned: %v", err)
	}
	now = bucketStart(0) // nothing is old any more; only the size counts
	for i := 0; i < 10; i++ {
		write(50+i*1000, 50+(i+1)*1000)
	}
	for range 5 {
		mustWrite(t, j, Batch{})
	}
	stats := j.Stats()
	info, err := os.Stat(j.Path())
	if err != nil {
		t.Fatal(err)
	}
	if stats.PrunedUnpulledRows == 0 || info.Size() > 2*minMaxBytes || stats.Rows < 100 {
		t.Errorf("%d bytes of file, stats %+v", info.Size(), stats)
	}
	rows, _ = pull(t, j, "", 1000)
	if int64(len(rows)) != stats.Rows || rows[len(rows)-1].Seq != 10_050 {
		t.Errorf("%d rows up to %d, stats say %d", len(rows), rows[len(rows)-1].Seq, stats.Rows)
	}
}

func TestExport(t *testing.T) {
	options := optionsIn(t.TempDir())
	if _, err := Export(t.Context(), options.Dir, io.Discard); err == nil {
		t.Error("exported what is not there")
	}
	j := mustOpen(t, options)
	var want []usage.Row
	for i := range 2500 {
		want = append(want, rowOf("r1", i, "alice", int64(i)))
	}
	mustWrite(t, j, Batch{Final: want, Open: []usage.Row{rowOf("r1", 2500, "bob", 1)}, InstantUS: bucketStart(2500).UnixMicro(), OpenFrom: bucketStart(2500)})
	check := func(when string, wanted int) {
		t.Helper()
		var wire bytes.Buffer
		exported, err := Export(t.Context(), options.Dir, &wire)
		if err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		decoder := usage.NewDecoder(&wire)
		var got []usage.Row
		for {
			row, err := decoder.Decode()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, row)
		}
		if len(got) != wanted || exported.Rows != int64(wanted) || !exported.CompleteThrough.Equal(bucketStart(2500)) {
			t.Fatalf("%s: %d rows, %+v", when, len(got), exported)
		}
		if !slices.EqualFunc(got[:len(want)], want, func(a, b usage.Row) bool { return a.SameContent(&b) }) {
			t.Errorf("%s: other rows than were written", when)
		}
	}
	check("while it runs", 2500)
	if err := j.Close(t.Context(), Batch{}); err != nil {
		t.Fatal(err)
	}
	check("after it ended", 2501)
}

// A journal from before there were reviews is taken over: its rows need none.
func TestJournalFromBeforeReviews(t *testing.T) {
	options := optionsIn(t.TempDir())
	j := mustOpen(t, options)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1)}, Open: []usage.Row{rowOf("r1", 1, "alice", 1)}})
	for _, statement := range []string{
		"ALTER TABLE open DROP COLUMN review", "ALTER TABLE final DROP COLUMN review", "DELETE FROM goose_db_version WHERE version_id >= 3",
	} {
		if _, err := j.writer.Exec(statement); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.shutdown(); err != nil {
		t.Fatal(err)
	}
	j = mustOpen(t, options)
	closeLater(t, j)
	doubtful := rowOf("r2", 2, "bob", 1)
	doubtful.Review = true
	mustWrite(t, j, Batch{Final: []usage.Row{doubtful}})
	rows, _ := pull(t, j, "", 10)
	reviews := map[string]bool{}
	for _, row := range rows {
		reviews[row.User] = reviews[row.User] || row.Review
	}
	if len(rows) != 3 || reviews["alice"] || !reviews["bob"] {
		t.Errorf("%+v", rows)
	}
}
