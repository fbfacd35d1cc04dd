package journal

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/usage"
)

// TestMain lets the test binary be the other process of a test.
func TestMain(m *testing.M) {
	switch os.Getenv("JOURNAL_TEST_ROLE") {
	case "writer":
		os.Exit(writeForEver(os.Getenv("JOURNAL_TEST_DIR")))
	case "limited":
		os.Exit(writeLimited(os.Getenv("JOURNAL_TEST_DIR")))
	}
	os.Exit(m.Run())
}

func asOtherProcess(t *testing.T, role, dir string) *exec.Cmd {
	t.Helper()
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "JOURNAL_TEST_ROLE="+role, "JOURNAL_TEST_DIR="+dir)
	command.Stderr = os.Stderr
	return command
}

// writeForEver writes one bucket after the other, and says each time what is
// committed: every row up to that bucket, and the next one open.
func writeForEver(dir string) int {
	j, err := Open(context.Background(), optionsIn(dir))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	run := fmt.Sprint("run", os.Getpid())
	first := int((j.LastInstantUS() - start.UnixMicro()) / usage.BucketLength.Microseconds())
	for bucket := max(0, first); ; bucket++ {
		b := Batch{Final: []usage.Row{rowOf(run, bucket, "alice", 900), rowOf(run, bucket, "bob", 900)},
			Open:      []usage.Row{rowOf(run, bucket+1, "alice", 1)},
			InstantUS: bucketStart(bucket + 1).UnixMicro(), OpenFrom: bucketStart(bucket + 1)}
		if err := j.Write(context.Background(), b); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		fmt.Println(bucket)
	}
}

func TestKilledWriterLosesNothingItCommitted(t *testing.T) {
	dir := t.TempDir()
	var taken []usage.Row
	var cursor Cursor
	for round := range 4 {
		writer := asOtherProcess(t, "writer", dir)
		output, err := writer.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := writer.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(output)
		committed := -1
		for range 20 + round {
			if !lines.Scan() {
				break
			}
			if committed, err = strconv.Atoi(lines.Text()); err != nil {
				t.Error(err)
			}
		}
		_, lockErr := Open(t.Context(), optionsIn(dir))
		if !errors.Is(lockErr, ErrLocked) || !strings.Contains(lockErr.Error(), fmt.Sprintf("PID %d,", writer.Process.Pid)) {
			t.Errorf("beside a running exporter: %v", lockErr)
		}
		if err := writer.Process.Kill(); err != nil {
			t.Error(err)
		}
		for lines.Scan() { // what it had still said before it died
			if committed, err = strconv.Atoi(lines.Text()); err != nil {
				t.Error(err)
			}
		}
		writer.Wait()
		if committed < 0 {
			t.Fatal("the writer wrote nothing")
		}

		j := mustOpen(t, optionsIn(dir))
		rows, page := pull(t, j, cursor, 7)
		taken, cursor = append(taken, rows...), page.Next
		if j.LastInstantUS() < bucketStart(committed+1).UnixMicro() || page.CompleteThrough.Before(bucketStart(committed+1)) {
			t.Errorf("committed through %v, the journal says instant %d and complete through %v", bucketStart(committed+1), j.LastInstantUS(), page.CompleteThrough)
		}
		run, last := fmt.Sprint("run", writer.Process.Pid), -1
		for _, row := range rows {
			if row.Run == run && row.User == "bob" {
				last = max(last, int(row.Bucket.Sub(start)/usage.BucketLength))
			}
			if !row.Bucket.Before(page.CompleteThrough) && row.GPUUS == 900 {
				t.Errorf("row at %v is final but the journal is complete only through %v", row.Bucket, page.CompleteThrough)
			}
		}
		if last < committed {
			t.Errorf("bucket %d was committed, the journal has up to %d", committed, last)
		}
		if err := j.shutdown(); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[usage.Key]bool{}
	for i, row := range taken {
		if seen[row.Key] || row.Seq != int64(i+1) {
			t.Fatalf("row %d came twice or out of order: %+v", i, row)
		}
		seen[row.Key] = true
	}
}

// fillAndRecover writes until the disk is full, goes on as the meter does,
// makes room, and looks whether every row is there once.
func fillAndRecover(dir string, full, room func() error) error {
	ctx := context.Background()
	j, err := Open(ctx, optionsIn(dir))
	if err != nil {
		return err
	}
	defer j.shutdown()
	buffer := NewBuffer(j, BufferOptions{})
	write := func(bucket int) error {
		var rows []usage.Row
		for user := range 20 {
			rows = append(rows, rowOf("r1", bucket, fmt.Sprint("user", user), 900))
		}
		return buffer.Write(ctx, Batch{Final: rows, Open: []usage.Row{rowOf("r1", bucket+1, "user0", 1)},
			InstantUS: bucketStart(bucket + 1).UnixMicro(), OpenFrom: bucketStart(bucket + 1)})
	}
	bucket := 0
	for ; bucket < 5; bucket++ {
		if err := write(bucket); err != nil {
			return err
		}
	}
	if err := full(); err != nil {
		return fmt.Errorf("fill: %w", err)
	}
	failures, stored := 0, bucket
	for ; failures < 20; bucket++ {
		err := write(bucket)
		switch {
		case err == nil && failures == 0:
			stored = bucket + 1
		case errors.Is(err, ErrDiskFull) && strings.Contains(err.Error(), j.Path()):
			failures++
		default:
			return fmt.Errorf("bucket %d, on a full disk: %w", bucket, err)
		}
		if bucket > 100_000 {
			return errors.New("the disk never got full")
		}
	}
	if waiting := buffer.Stats(); waiting.WaitingRows < int64(failures*20) || waiting.LastError == "" {
		return fmt.Errorf("stats on a full disk: %+v", waiting)
	}
	page, err := j.Usage(ctx, "", MaxLimit)
	if err != nil {
		return fmt.Errorf("serve from a full disk: %w", err)
	}
	if page.CompleteThrough.After(bucketStart(stored)) {
		return fmt.Errorf("complete through %v is claimed while rows from %v on wait in memory", page.CompleteThrough, bucketStart(stored))
	}
	if err := room(); err != nil {
		return fmt.Errorf("make room: %w", err)
	}
	if err := write(bucket); err != nil {
		return fmt.Errorf("after room was made: %w", err)
	}
	count := 0
	var cursor Cursor
	for {
		page, err := j.Usage(ctx, cursor, MaxLimit)
		if err != nil {
			return err
		}
		if len(page.Rows) == 0 {
			if !page.CompleteThrough.Equal(bucketStart(bucket + 1)) {
				return fmt.Errorf("complete through %v, want %v", page.CompleteThrough, bucketStart(bucket+1))
			}
			break
		}
		for _, row := range page.Rows {
			want := rowOf("r1", count/20, fmt.Sprint("user", count%20), 900)
			if !row.SameContent(&want) {
				return fmt.Errorf("row %d is %+v, want %+v", count, row, want)
			}
			count++
		}
		cursor = page.Next
	}
	if want := (bucket + 1) * 20; count != want {
		return fmt.Errorf("%d rows, want %d", count, want)
	}
	if s := buffer.Stats(); s.WaitingRows != 0 || s.WaitingBytes != 0 || s.DroppedRows != 0 || s.RefusedRows != 0 || s.LastError != "" {
		return fmt.Errorf("stats after recovery: %+v", s)
	}
	return nil
}

func TestFullFileSystem(t *testing.T) {
	if os.Getuid() != 0 {
		needed(t, "root, to mount a small tmpfs")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		needed(t, "the right to mount a tmpfs: "+err.Error())
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	ballast := filepath.Join(dir, "ballast")
	err := fillAndRecover(dir, func() error {
		err := os.WriteFile(ballast, make([]byte, 1<<20), 0o600)
		if !errors.Is(err, unix.ENOSPC) {
			return fmt.Errorf("the file system is not full: %w", err)
		}
		return nil
	}, func() error {
		if err := os.Remove(ballast); err != nil {
			return err
		}
		return unix.Mount("", dir, "", unix.MS_REMOUNT, "size=64m")
	})
	if err != nil {
		t.Error(err)
	}
}

func needed(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal("needs " + what)
	}
	t.Skip("needs " + what)
}

// The same with a limit on the size of files, which needs no rights and fails
// with another error.
func TestFileSizeLimit(t *testing.T) {
	output, err := asOtherProcess(t, "limited", t.TempDir()).Output()
	if err != nil {
		t.Fatalf("%v: %s", err, output)
	}
}

func writeLimited(dir string) int {
	signal.Ignore(syscall.SIGXFSZ)
	var before unix.Rlimit
	err := unix.Getrlimit(unix.RLIMIT_FSIZE, &before)
	if err == nil {
		err = fillAndRecover(dir, func() error {
			return unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 600 << 10, Max: before.Max})
		}, func() error { return unix.Setrlimit(unix.RLIMIT_FSIZE, &before) })
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

func TestBufferBounds(t *testing.T) {
	options := optionsIn(t.TempDir())
	now := bucketStart(100)
	options.Now = func() time.Time { return now }
	j := mustOpen(t, options)
	closeLater(t, j)
	gone, cancel := context.WithCancel(t.Context())
	cancel() // every write fails
	one := rowOf("r1", 0, "alice", 1)
	buffer := NewBuffer(j, BufferOptions{MaxBytes: 10 * rowBytes(&one)})
	for i := range 15 {
		if err := buffer.Write(gone, Batch{Final: []usage.Row{rowOf("r1", 85+i, "alice", 1)}}); err == nil {
			t.Fatal("a write that was cancelled succeeded")
		}
	}
	if s := buffer.Stats(); s.WaitingRows != 10 || s.DroppedRows != 5 || s.WaitingBytes != 10*rowBytes(&one) {
		t.Errorf("at the byte bound: %+v", s)
	}
	now = bucketStart(96 + 95).Add(1)
	if err := buffer.Write(gone, Batch{}); err == nil {
		t.Fatal("a write that was cancelled succeeded")
	}
	if s := buffer.Stats(); s.WaitingRows != 5 || s.DroppedRows != 10 {
		t.Errorf("at the age bound: %+v", s)
	}
	if err := buffer.Write(t.Context(), Batch{}); err != nil {
		t.Fatal(err)
	}
	rows, _ := pull(t, j, "", 100)
	if len(rows) != 5 || !rows[0].Bucket.Equal(bucketStart(95)) {
		t.Errorf("kept %d rows", len(rows))
	}
}

// A run that ends on a full disk ends once the disk takes writes again, and
// the next run's rows stay open.
func TestBufferFinishesTheRunLater(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	buffer := NewBuffer(j, BufferOptions{})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := buffer.Write(t.Context(), Batch{Open: []usage.Row{rowOf("r1", 0, "alice", 1), rowOf("r1", 0, "bob", 1)}}); err != nil {
		t.Fatal(err)
	}
	if err := buffer.FinishRun(gone, Batch{Open: []usage.Row{rowOf("r1", 0, "alice", 2)}}); err == nil {
		t.Fatal("a write that was cancelled succeeded")
	}
	if err := buffer.Write(t.Context(), Batch{Open: []usage.Row{rowOf("r2", 0, "alice", 5)}}); err != nil {
		t.Fatal(err)
	}
	rows, _ := pull(t, j, "", 10)
	if len(rows) != 2 || rows[0].User != "alice" || rows[0].GPUUS != 2 || rows[1].User != "bob" {
		t.Errorf("after the run's end: %+v", rows)
	}
	if err := buffer.Close(t.Context(), Batch{}); err != nil {
		t.Fatal(err)
	}
}
