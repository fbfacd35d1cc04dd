package journal

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/usage"
)

// TestDatabaseTakenAway takes the journal's files away while it is in use, in
// every way in which people do: no row is lost, and cursors stay good.
func TestDatabaseTakenAway(t *testing.T) {
	remove := func(suffixes ...string) func(*testing.T, *Journal) {
		return func(t *testing.T, j *Journal) {
			for _, suffix := range suffixes {
				if err := os.Remove(j.Path() + suffix); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	for name, takeAway := range map[string]func(*testing.T, *Journal){
		"the directory is deleted": func(t *testing.T, j *Journal) {
			if err := os.RemoveAll(j.options.Dir); err != nil {
				t.Fatal(err)
			}
		},
		"the directory is moved": func(t *testing.T, j *Journal) {
			if err := os.Rename(j.options.Dir, filepath.Join(t.TempDir(), "away")); err != nil {
				t.Fatal(err)
			}
		},
		"all files are deleted":   remove("", "-wal", "-shm"),
		"the database is deleted": remove(""),
		"the log is deleted":      remove("-wal"),
		"another file is put there": func(t *testing.T, j *Journal) {
			other := mustOpen(t, optionsIn(t.TempDir()))
			mustWrite(t, other, Batch{Final: []usage.Row{rowOf("other", 0, "mallory", 7)}})
			if err := other.shutdown(); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(other.Path(), j.Path()); err != nil {
				t.Fatal(err)
			}
		},
		"an empty file is put there": func(t *testing.T, j *Journal) {
			remove("")(t, j)
			if err := os.WriteFile(j.Path(), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			options := optionsIn(t.TempDir())
			j := mustOpen(t, options)
			mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r", 0, "alice", 10)}, Open: []usage.Row{rowOf("r", 1, "alice", 5)}})
			first, page := pull(t, j, "", 10)
			for round := range 2 {
				takeAway(t, j)
				mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r", 1, "alice", int64(6+round))}})
			}
			mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r", 1, "alice", 9)}})
			rest, _ := pull(t, j, page.Next, 10)
			if len(first) != 1 || len(rest) != 1 || rest[0].GPUUS != 9 {
				t.Errorf("served %v and then %v", first, rest)
			}
			info, err := os.Stat(j.Path())
			if err != nil || info.Mode().Perm() != 0o600 {
				t.Errorf("the new file: %v, %v", info.Mode(), err)
			}
			var mode int
			if err := j.writer.QueryRow("PRAGMA auto_vacuum").Scan(&mode); err != nil || mode != 2 {
				t.Errorf("auto_vacuum of the new file is %d, %v", mode, err)
			}
			if _, err := Open(context.Background(), options); !errors.Is(err, ErrLocked) {
				t.Errorf("a second exporter on the new directory: %v", err)
			}
			if err := j.Close(context.Background(), Batch{}); err != nil {
				t.Fatal(err)
			}
			var exported strings.Builder
			if told, err := Export(context.Background(), options.Dir, &exported); err != nil || told.Rows != 2 {
				t.Errorf("exported %+v, %v:\n%s", told, err, exported.String())
			}
			if left, _ := filepath.Glob(j.Path() + ".copy*"); len(left) > 0 {
				t.Errorf("left behind: %v", left)
			}
		})
	}
}

// TestNoPlaceForTheDatabase keeps rows in memory while a journal that was
// taken away can't be written anew.
func TestNoPlaceForTheDatabase(t *testing.T) {
	options := optionsIn(t.TempDir())
	j := mustOpen(t, options)
	closeLater(t, j)
	buffer := NewBuffer(j, BufferOptions{})
	ctx := context.Background()
	if err := buffer.Write(ctx, Batch{Final: []usage.Row{rowOf("r", 0, "alice", 10)}}); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(options.Dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(options.Dir, nil, 0o600); err != nil { // in the way of the directory
		t.Fatal(err)
	}
	if err := buffer.Write(ctx, Batch{Final: []usage.Row{rowOf("r", 1, "alice", 20)}}); err == nil || buffer.Stats().WaitingRows != 1 {
		t.Fatalf("written to nowhere: %v, %+v", err, buffer.Stats())
	}
	if err := os.Remove(options.Dir); err != nil {
		t.Fatal(err)
	}
	if err := buffer.Write(ctx, Batch{Final: []usage.Row{rowOf("r", 2, "alice", 30)}}); err != nil {
		t.Fatal(err)
	}
	if rows, _ := pull(t, j, "", 10); len(rows) != 3 {
		t.Errorf("%d rows, want 3: %v", len(rows), rows)
	}
}

// TestOpenOnAFullDisk starts where nothing can be written, with and without a
// journal of before, and loses nothing.
func TestOpenOnAFullDisk(t *testing.T) {
	if os.Geteuid() != 0 {
		needed(t, "root, to mount a small tmpfs")
	}
	for name, before := range map[string]func(*testing.T, Options){
		"no journal": func(*testing.T, Options) {},
		"closed journal": func(t *testing.T, options Options) {
			j := mustOpen(t, options)
			mustWrite(t, j, Batch{Open: []usage.Row{rowOf("before", 0, "alice", 10)}, InstantUS: bucketStart(0).UnixMicro() + 10})
			if err := j.shutdown(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
				needed(t, "the right to mount a tmpfs: "+err.Error())
			}
			t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
			options := optionsIn(dir)
			var log strings.Builder
			options.Logger = slog.New(slog.NewTextHandler(&log, nil))
			before(t, options)
			filler := filepath.Join(dir, "filler")
			file, err := os.Create(filler)
			if err != nil {
				t.Fatal(err)
			}
			defer file.Close()
			for err == nil {
				_, err = file.Write(make([]byte, 4096))
			}

			j := mustOpen(t, options)
			buffer := NewBuffer(j, BufferOptions{})
			if want := name == "closed journal"; (j.LastInstantUS() == bucketStart(0).UnixMicro()+10) != want {
				t.Errorf("earlier runs ended at %d", j.LastInstantUS())
			}
			ctx := context.Background()
			for i := range 3 {
				err := buffer.Write(ctx, Batch{Open: []usage.Row{rowOf("now", 1, "alice", int64(i))}})
				if !errors.Is(err, ErrDiskFull) {
					t.Fatalf("write on a full disk: %v", err)
				}
			}
			if stats := buffer.Stats(); stats.LastError == "" || stats.WaitingRows != 1 {
				t.Errorf("stats on a full disk: %+v", stats)
			}
			answer := httptest.NewRecorder()
			j.Handler().ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
			if answer.Code != http.StatusServiceUnavailable {
				body, _ := io.ReadAll(answer.Body)
				t.Errorf("a reader is answered %d: %s", answer.Code, body)
			}
			if n := strings.Count(log.String(), "\n"); n > 3 {
				t.Errorf("%d lines of log:\n%s", n, log.String())
			}
			if err := os.Remove(filler); err != nil {
				t.Fatal(err)
			}
			file.Close()
			if err := buffer.Write(ctx, Batch{Open: []usage.Row{rowOf("now", 1, "alice", 5)}}); err != nil {
				t.Fatal(err)
			}
			if err := buffer.Close(ctx, Batch{Final: []usage.Row{rowOf("now", 1, "alice", 7)}}); err != nil {
				t.Fatal(err)
			}
			want := map[string]int64{"now": 7}
			if name == "closed journal" {
				want["before"] = 10
			}
			j = mustOpen(t, options)
			closeLater(t, j)
			rows, _ := pull(t, j, "", 10)
			for _, row := range rows {
				if want[row.Run] != row.GPUUS {
					t.Errorf("row %v", row)
				}
				delete(want, row.Run)
			}
			if len(want) > 0 {
				t.Errorf("missing: %v", want)
			}
		})
	}
}
