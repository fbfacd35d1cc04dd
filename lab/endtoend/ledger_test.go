package endtoend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

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

// TestPlantedOverlapsAreNamed plants two runs that filled the same time.
func TestPlantedOverlapsAreNamed(t *testing.T) {
	bucket := time.Now().UTC().Add(-48 * time.Hour).Truncate(usage.BucketLength)
	var lines []byte
	for i, run := range []string{"RUN-ONE", "RUN-TWO"} {
		row := usage.Row{Seq: int64(i + 1), Node: "gpu01", Card: "GPU-a", Model: "NVIDIA A100", AttributedBy: "user_slice"}
		row.Key = usage.Key{Run: run, Device: "GPU-a", Slices: 1, Of: 1, Bucket: bucket, State: usage.StateHeld, User: "alice", UID: 1001, Kind: "host"}
		row.GPUUS, row.ShareUS, row.HeldUS = 600_000_000, 600_000_000, 600_000_000
		lines = append(usage.AppendJSON(lines, &row), '\n')
	}
	if !json.Valid(bytes.Split(lines, []byte("\n"))[0]) {
		t.Fatalf("not JSON: %s", lines)
	}
	s := newSite(t)
	if output, code := s.run(lines, "import", "-"); code != 0 {
		t.Fatalf("import ended with %d:\n%s", code, output)
	}
	output, code := s.run(nil, "verify")
	if code != 1 || !strings.Contains(output, "RUN-ONE") || !strings.Contains(output, "RUN-TWO") || !strings.Contains(output, "GPU-a") {
		t.Errorf("verify ended with %d and said:\n%s", code, output)
	}
}
