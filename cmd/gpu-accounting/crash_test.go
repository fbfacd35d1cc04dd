package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"testing"
	"time"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

func program(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	command := exec.Command(os.Args[0], args...)
	command.Env = append(os.Environ(), asProgram+"=1")
	return command
}

func writeConfig(t *testing.T, dir, more string) string {
	t.Helper()
	name := filepath.Join(dir, "c.yml")
	if err := os.WriteFile(name, []byte("ledger: {url: \"sqlite:ledger.db\"}\n"+more), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

func audit(t *testing.T, path string) ledger.Audit {
	t.Helper()
	store, err := sqlite.Open(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if err := store.Check(context.Background()); err != nil {
		t.Fatal(err)
	}
	audit, err := store.Audit(context.Background(), ledger.Span{}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return audit
}

// count is the number of rows in a ledger that may not be there yet.
func count(path string) (rows int64) {
	db, err := sql.Open("sqlite3", "file:"+path+"?mode=ro")
	if err != nil {
		return 0
	}
	defer db.Close()
	if err := db.QueryRow(`SELECT count(*) FROM usage`).Scan(&rows); err != nil {
		return 0
	}
	return rows
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// An import that is killed is simply run again: nothing is lost, nothing is
// there twice, and the ledger is the same as if nothing had happened.
func TestKilledImport(t *testing.T) {
	site := ledgertest.Site{Start: time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC), Buckets: 120, Nodes: 2, CardsPerNode: 10, HoldersPerCard: 4}
	var text bytes.Buffer
	encoder := usage.NewEncoder(&text)
	rows := slices.Collect(site.Rows())
	for i := range rows {
		if err := encoder.Encode(&rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	clean := t.TempDir()
	command := program(t, "import", "--config.file="+writeConfig(t, clean, ""), "-")
	command.Stdin = bytes.NewReader(text.Bytes())
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	want := audit(t, filepath.Join(clean, "ledger.db"))
	if want.Rows != int64(len(rows)) {
		t.Fatalf("%d rows, want %d", want.Rows, len(rows))
	}

	dir := t.TempDir()
	config := writeConfig(t, dir, "")
	path := filepath.Join(dir, "ledger.db")
	for _, batches := range []int64{0, 1, 1} {
		killed := program(t, "import", "--config.file="+config, "-")
		stdin, err := killed.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := killed.Start(); err != nil {
			t.Fatal(err)
		}
		fed := make(chan error, 1)
		go func() {
			// It never sees the end of its input, so it is killed in mid-work.
			_, err := stdin.Write(text.Bytes())
			fed <- err
		}()
		await(t, "rows", func() bool {
			return count(path) >= batches*collect.BatchRows
		})
		if err := killed.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := killed.Wait(); err == nil {
			t.Fatal("it was not killed")
		}
		stdin.Close()
		<-fed
		if got := audit(t, path); got.Rows%collect.BatchRows != 0 || got.Rows >= want.Rows {
			t.Errorf("killed in mid-work with %d of %d rows", got.Rows, want.Rows)
		}
	}
	again := program(t, "import", "--config.file="+config, "-")
	again.Stdin = bytes.NewReader(text.Bytes())
	if out, err := again.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if got := audit(t, path); got.ContentHash != want.ContentHash || got.Rows != want.Rows {
		t.Errorf("%d rows %s, want %d rows %s", got.Rows, got.ContentHash, want.Rows, want.ContentHash)
	}
}

// An import from an input that hangs ends at the first signal.
func TestInterruptedImport(t *testing.T) {
	dir := t.TempDir()
	command := program(t, "import", "--config.file="+writeConfig(t, dir, ""), "-")
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- command.Wait() }()
	await(t, "the ledger", func() bool {
		_, err := os.Stat(filepath.Join(dir, "ledger.db-wal"))
		return err == nil
	})
	if err := command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
		if code := command.ProcessState.ExitCode(); code != exitFailed && code != -1 {
			t.Errorf("exit code %d", code)
		}
	case <-time.After(20 * time.Second):
		command.Process.Kill()
		t.Fatal("it goes on")
	}
}

// The daemon answers, and ends soon after SIGTERM though a request hangs on.
func TestServeUntilSIGTERM(t *testing.T) {
	dir := t.TempDir()
	command := program(t, "serve", "--config.file="+writeConfig(t, dir, "collect: {targets: [\"http://127.0.0.1:1\"]}\n"), "--web.listen-address=127.0.0.1:0")
	stderr, err := command.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	defer func() {
		command.Process.Kill()
	}()
	address := make(chan string, 1)
	var log bytes.Buffer
	go func() {
		scanner := bufio.NewScanner(io.TeeReader(stderr, &log))
		found := regexp.MustCompile(`msg=Listening address=(\S+)`)
		for scanner.Scan() {
			if match := found.FindStringSubmatch(scanner.Text()); match != nil {
				address <- match[1]
			}
		}
		ended <- command.Wait()
	}()
	var base string
	select {
	case host := <-address:
		base = "http://" + host
	case err := <-ended:
		t.Fatalf("%v: %s", err, log.String())
	case <-time.After(30 * time.Second):
		t.Fatal("it does not listen")
	}
	response, err := http.Get(base + "/-/ready")
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Error(response.Status)
	}
	if err := command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("%v: %s", err, log.String())
		}
	case <-time.After(5 * time.Second):
		t.Fatal("it does not stop")
	}
}
