package endtoend

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	_ "github.com/mattn/go-sqlite3" // to look into a ledger while a daemon writes it

	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/usage"
	"gpuledger/lab"
)

// site is one accounting with a ledger of its own.
type site struct {
	t      *testing.T
	config string
}

func newSite(t *testing.T, targets ...string) *site {
	t.Helper()
	dir := t.TempDir()
	s := &site{t: t, config: filepath.Join(dir, "accounting.yml")}
	quoted := make([]string, len(targets))
	for i, target := range targets {
		quoted[i] = fmt.Sprintf("%q", target)
	}
	text := fmt.Sprintf(`ledger: {url: "sqlite://%s/ledger.db"}
collect: {interval: 1s, targets: [%s]}
billing:
  currency: EUR
  rates: [{name: gpu, gpu: "*", per: gpu_hour, price: "2.50"}]
`, dir, strings.Join(quoted, ", "))
	if err := os.WriteFile(s.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return s
}

// run runs a command of gpu-accounting and returns its output and exit code.
func (s *site) run(stdin []byte, arguments ...string) (string, int) {
	s.t.Helper()
	command := exec.Command(filepath.Join(programs, "gpu-accounting"), append(arguments, "--config.file="+s.config)...)
	command.Stdin = bytes.NewReader(stdin)
	output, _ := command.CombinedOutput() // the code says it
	return string(output), command.ProcessState.ExitCode()
}

func (s *site) serve() *program {
	s.t.Helper()
	return start(s.t, os.Environ(), "gpu-accounting", "serve", "--config.file="+s.config, "--web.listen-address="+freePort(s.t))
}

var hashLine = regexp.MustCompile(`(?m)^hash +(sha256:[0-9a-f]+)$`)
var rowsLine = regexp.MustCompile(`(?m)^rows +([0-9]+)$`)

// verified is the ledger's hash and number of rows; the ledger must be sound.
func (s *site) verified() (hash, rows string) {
	s.t.Helper()
	output, code := s.run(nil, "verify")
	found, count := hashLine.FindStringSubmatch(output), rowsLine.FindStringSubmatch(output)
	if code != 0 || found == nil || count == nil {
		s.t.Fatalf("verify ended with %d:\n%s", code, output)
	}
	return found[1], count[1]
}

// export is the node's journal as NDJSON.
func (n *node) export() []byte {
	n.t.Helper()
	output, err := exec.Command(filepath.Join(programs, "gpu-exporter"), "export", "--state.dir="+filepath.Join(n.dir, "state")).Output()
	if err != nil {
		n.t.Fatal(err)
	}
	return output
}

// period runs the exporter for a while and ends it, so that its rows are final.
func (n *node) period(seconds float64) {
	n.t.Helper()
	n.start()
	n.metered(seconds)
	n.exporter.stop(n.t)
}

func copyState(t *testing.T, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if output, err := exec.Command("cp", "-a", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v\n%s", err, output)
	}
}

// TestOneJournalManyWays pulls one journal three times, with two accounting
// processes at once, after it was lost and begun anew, and after it was
// restored from older copies. Each time the ledger has every row once.
func TestOneJournalManyWays(t *testing.T) {
	holder := work(t, 4713)
	n := newNode(t, "journal", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: holder.pid, SM: 50}}})
	state := filepath.Join(n.dir, "state")
	n.period(3)
	n.start()
	n.metered(7) // past a flush: the copy has open rows of this run
	copyState(t, state, state+".running")
	n.metered(9)
	n.exporter.stop(t)
	copyState(t, state, state+".stopped")
	n.start() // serves the two runs before it

	// The same rows by three pulls into three ledgers, the last by two
	// processes at once into one file, and by file.
	pulled := newSite(t, "unix://"+n.socket)
	again := newSite(t, "unix://"+n.socket)
	both := newSite(t, "unix://"+n.socket)
	byFile := newSite(t)
	rows := n.export()
	if output, code := byFile.run(rows, "import", "-"); code != 0 {
		t.Fatalf("import ended with %d:\n%s", code, output)
	}
	want, count := byFile.verified()
	daemons := []*program{pulled.serve(), again.serve(), both.serve(), both.serve()}
	for _, s := range []*site{pulled, again, both} {
		await(t, "the rows' arrival", func() bool { hash, _ := s.verified(); return hash == want })
	}
	daemons[1].kill() // kill -9 of a collector costs nothing
	if output, code := again.run(rows, "import", "-"); code != 0 {
		t.Fatalf("import ended with %d:\n%s", code, output)
	}
	if hash, _ := again.verified(); hash != want {
		t.Error("rows that came twice changed the ledger")
	}

	// The journal is lost and begun anew: what was pulled stays, what is new
	// comes.
	all := bytes.Clone(rows)
	n.exporter.kill()
	if err := os.RemoveAll(state); err != nil {
		t.Fatal(err)
	}
	n.period(3)
	n.start()
	all = append(all, n.export()...)
	expect := func(what string, sites ...*site) {
		t.Helper()
		reference := newSite(t)
		if output, code := reference.run(all, "import", "-"); code != 0 {
			t.Fatalf("import ended with %d:\n%s", code, output)
		}
		want, count = reference.verified()
		for _, s := range sites {
			await(t, what, func() bool { hash, _ := s.verified(); return hash == want })
		}
		if got := totalUS(t, reference); got != sumUS(t, all) {
			t.Errorf("%s: the report has %d µs, the journals %d", what, got, sumUS(t, all))
		}
	}
	expect("a journal begun anew", pulled, both)

	// Restored from an older copy, made while nothing ran and while a run was
	// on: its rows end early there, and the ledger knows better.
	for _, older := range []string{".stopped", ".running"} {
		n.exporter.stop(t) // what it had not served yet is lost with its disk
		copyState(t, state+older, state)
		n.period(3)
		n.start()
		all = append(all, n.export()...)
		expect("a journal restored from a copy ("+older+")", pulled, both)
	}
	_ = count
}

// sumUS adds up the distinct rows of NDJSON, each in its latest state.
func sumUS(t *testing.T, lines []byte) int64 {
	t.Helper()
	latest := map[usage.Key]int64{}
	decoder := usage.NewDecoder(bytes.NewReader(lines))
	for {
		row, err := decoder.Decode()
		if err != nil {
			break // the end; a bad line would show in the sum
		}
		latest[row.Key] = max(latest[row.Key], row.GPUUS)
	}
	total := int64(0)
	for _, us := range latest {
		total += us
	}
	return total
}

// totalUS is what verify says was held, idle and down.
func totalUS(t *testing.T, s *site) int64 {
	t.Helper()
	output, _ := s.run(nil, "verify")
	total := 0.0
	for _, state := range []string{"held", "idle", "down"} {
		var hours int
		var seconds float64
		match := regexp.MustCompile(`(?m)^` + state + ` +([0-9]+) h(?: ([0-9.]+) s)?$`).FindStringSubmatch(output)
		if match == nil {
			t.Fatalf("verify says nothing of %s:\n%s", state, output)
		}
		_, _ = fmt.Sscan(match[1], &hours)
		if match[2] != "" {
			_, _ = fmt.Sscan(match[2], &seconds)
		}
		total += float64(hours)*3600 + seconds
	}
	return int64(total*1e6 + 0.5)
}

// TestPlantedOverlapsAreNamed plants two runs that filled one bucket twice, and
// two that took turns on another card.
func TestPlantedOverlapsAreNamed(t *testing.T) {
	first := time.Now().UTC().Add(-48 * time.Hour).Truncate(usage.BucketLength)
	var lines []byte
	plant := func(card, run string, bucket int, seconds int64) {
		row := usage.Row{Seq: int64(len(lines) + 1), Node: "gpu01", Card: card, Model: "NVIDIA A100", AttributedBy: "user_slice"}
		row.Key = usage.Key{
			Run: run, Device: card, Slices: 1, Of: 1, Bucket: first.Add(time.Duration(bucket) * usage.BucketLength),
			State: usage.StateHeld, User: "alice", UID: 1001, Kind: "host",
		}
		row.GPUUS = seconds * 1_000_000
		row.ShareUS, row.HeldUS = row.GPUUS, row.GPUUS
		lines = append(usage.AppendJSON(lines, &row), '\n')
	}
	plant("GPU-full", "RUN-ONE", 0, 600)
	plant("GPU-full", "RUN-TWO", 0, 600)
	for bucket := range 4 {
		plant("GPU-turns", []string{"RUN-THREE", "RUN-FOUR"}[bucket%2], bucket, 900)
	}
	plant("GPU-well", "RUN-FIVE", 0, 400) // a restart in mid-bucket
	plant("GPU-well", "RUN-SIX", 0, 400)
	plant("GPU-well", "RUN-SIX", 1, 900)
	s := newSite(t)
	if output, code := s.run(lines, "import", "-"); code != 0 {
		t.Fatalf("import ended with %d:\n%s", code, output)
	}
	output, code := s.run(nil, "verify")
	if code != 1 || !strings.Contains(output, "2 findings, 0 rows in quarantine") {
		t.Errorf("verify ended with %d and said:\n%s", code, output)
	}
	for _, finding := range []string{
		`(?m)^over-full: card "GPU-full" .*300\.000000 s more than the time there was: run "RUN-ONE" on node "gpu01" metered 600\.000000 s; run "RUN-TWO" on node "gpu01" metered 600\.000000 s$`,
		`(?m)^overlap: card "GPU-turns" .*run "RUN-THREE" on node "gpu01" metered 1800\.000000 s; run "RUN-FOUR" on node "gpu01" metered 1800\.000000 s$`,
	} {
		if !regexp.MustCompile(finding).MatchString(output) {
			t.Errorf("verify does not say %s:\n%s", finding, output)
		}
	}
}

// fillJournal puts rows into a node's journal as if it had metered for days.
func (n *node) fillJournal(rows []usage.Row) {
	n.t.Helper()
	ctx := context.Background()
	j, err := journal.Open(ctx, journal.Options{
		Dir: filepath.Join(n.dir, "state"), Node: n.name, LockPath: filepath.Join(n.dir, "lock"),
		Logger: slog.New(slog.DiscardHandler), Now: time.Now,
	})
	if err != nil {
		n.t.Fatal(err)
	}
	end := rows[len(rows)-1].Bucket.Add(usage.BucketLength)
	if err := j.Write(ctx, journal.Batch{Final: rows, InstantUS: end.UnixMicro(), OpenFrom: end}); err != nil {
		n.t.Fatal(err)
	}
	if err := j.Close(ctx, journal.Batch{}); err != nil {
		n.t.Fatal(err)
	}
}

// query asks the ledger's file for one number, 0 while there is none.
func (s *site) query(text string) (number int64) {
	s.t.Helper()
	db, err := sql.Open("sqlite3", "file:"+filepath.Join(filepath.Dir(s.config), "ledger.db")+"?mode=ro&_busy_timeout=5000")
	if err != nil {
		s.t.Fatal(err)
	}
	defer db.Close()
	if err := db.QueryRow(text).Scan(&number); err != nil {
		return 0 // the daemon has not made it yet
	}
	return number
}

// forgetCursors makes the next pull begin at the journal's start.
func (s *site) forgetCursors() {
	s.t.Helper()
	db, err := sql.Open("sqlite3", filepath.Join(filepath.Dir(s.config), "ledger.db"))
	if err != nil {
		s.t.Fatal(err)
	}
	defer db.Close()
	if _, err := db.Exec(`UPDATE target SET cursor = ''`); err != nil {
		s.t.Fatal(err)
	}
}

// TestKilledInMidPull kills the daemon between the pages of a long journal,
// twice, and then has it read the whole journal three times.
func TestKilledInMidPull(t *testing.T) {
	n := newNode(t, "gpu01", lab.Scenario{GPUs: one(t)})
	rows := slices.Collect(ledgertest.Site{
		Start: time.Now().UTC().Add(-11 * 24 * time.Hour).Truncate(usage.BucketLength), Buckets: 960, Nodes: 1, CardsPerNode: 6, HoldersPerCard: 3,
	}.Rows())
	n.fillJournal(rows)
	n.start()
	exported := n.export()
	reference := newSite(t)
	if output, code := reference.run(exported, "import", "-"); code != 0 {
		t.Fatalf("import ended with %d:\n%s", code, output)
	}
	hash, count := reference.verified()
	if count != strconv.Itoa(len(rows)) {
		t.Fatalf("%s rows were exported, want %d", count, len(rows))
	}

	s := newSite(t, "unix://"+n.socket)
	const countRows = `SELECT count(*) FROM usage`
	for range 2 {
		before := s.query(countRows)
		daemon := s.serve()
		await(t, "a page", func() bool { return s.query(countRows) > before })
		daemon.kill()
		// verify reads every page of the file and finds it sound.
		if _, count := s.verified(); s.query(countRows) >= int64(len(rows)) {
			t.Errorf("not killed in mid-pull: it has %s of %d rows", count, len(rows))
		}
	}
	for again := range 3 {
		if again > 0 {
			s.forgetCursors()
		}
		daemon := s.serve()
		// A cursor begins with the number of the row that it names.
		await(t, "the journal's end", func() bool {
			return s.query(`SELECT CAST(cursor AS INTEGER) FROM target`) == int64(len(rows))
		})
		daemon.stop(t)
		if got, count := s.verified(); got != hash {
			t.Fatalf("pull %d: %s rows with %s, want %d with %s", again, count, got, len(rows), hash)
		}
	}
	if got := totalUS(t, s); got != sumUS(t, exported) {
		t.Errorf("the ledger has %d µs, the journal %d", got, sumUS(t, exported))
	}
}
