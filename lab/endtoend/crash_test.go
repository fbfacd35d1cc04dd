package endtoend

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/usage"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// sums adds up rows by user (or state), and in all.
func sums(rows []usage.Row) (byWho map[string]int64, total int64) {
	byWho = map[string]int64{}
	for _, row := range rows {
		name := row.User
		if row.State != usage.StateHeld {
			name = row.State
		}
		byWho[name] += row.GPUUS
		total += row.GPUUS
	}
	return byWho, total
}

// metered waits until the exporter has metered so many more seconds.
func (n *node) metered(seconds float64) {
	n.t.Helper()
	series := `gpu_metered_seconds_total{gpu="0",uuid="` + uuidOf(n) + `"}`
	await(n.t, "metered time", func() bool {
		have, _ := strconv.ParseFloat(n.metric(series), 64)
		return have >= seconds
	})
}

// TestKillNine kills the exporter in mid-bucket, twice, and counts what is
// missing.
func TestKillNine(t *testing.T) {
	holder := work(t, 4713)
	n := newNode(t, "killed", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: holder.pid, SM: 50}}})
	begun := time.Now()
	downtime := time.Duration(0)
	for range 2 {
		n.start()
		n.metered(8)
		killed := time.Now()
		n.exporter.kill()
		restarted := time.Now()
		n.start()
		downtime += time.Since(restarted) + restarted.Sub(killed)
		n.metered(2)
		killed = time.Now()
		n.exporter.kill()
		downtime += time.Since(killed)
	}
	restarted := time.Now()
	n.start()
	downtime += time.Since(restarted)
	n.metered(3)
	if text := n.metric(`gpu_conservation_error_seconds{gpu="0",uuid="` + uuidOf(n) + `"}`); text != "0" {
		t.Errorf("conservation error %q after kill -9", text)
	}
	n.exporter.stop(t)
	whole := time.Since(begun)
	rows := n.rows()
	_, total := sums(rows)
	metered := time.Duration(total) * time.Microsecond
	if metered > whole {
		t.Errorf("metered %v in %v: time is counted twice", metered, whole)
	}
	// Five runs, four of them killed: each may lose 10 s and an interval.
	if lost := whole - metered - downtime; lost > 4*(10*time.Second+2*time.Second) {
		t.Errorf("%v are unobserved beyond the downtime of %v", lost, downtime)
	}
	// No bucket holds more than its length, whatever run filled it.
	perBucket := map[time.Time]int64{}
	runs := map[string]bool{}
	for _, row := range rows {
		perBucket[row.Bucket] += row.GPUUS
		runs[row.Run] = true
	}
	for bucket, us := range perBucket {
		if us > usage.BucketLength.Microseconds() {
			t.Errorf("bucket %v has %d µs", bucket, us)
		}
	}
	// The two runs killed within 5 s of their start had nothing on disk yet.
	if len(runs) < 3 || len(runs) > 5 {
		t.Errorf("%d runs in the journal, want 3 to 5", len(runs))
	}
}

// childOf is the exporter's NVML child.
func childOf(t *testing.T, parent int) int {
	t.Helper()
	child := 0
	await(t, "an NVML child", func() bool {
		tasks, _ := filepath.Glob("/proc/" + strconv.Itoa(parent) + "/task/*/children")
		for _, task := range tasks {
			text, _ := os.ReadFile(task)
			for _, field := range strings.Fields(string(text)) {
				child, _ = strconv.Atoi(field)
				return true
			}
		}
		return false
	})
	return child
}

// TestKillTheChild kills the NVML child: at most two intervals are lost, and
// the exporter stays.
func TestKillTheChild(t *testing.T) {
	holder := work(t, 4713)
	n := newNode(t, "childless", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: holder.pid, SM: 50}}})
	n.start()
	n.metered(2)
	begun := time.Now()
	for range 3 {
		child := childOf(t, n.exporter.Process.Pid)
		if err := syscall.Kill(child, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		await(t, "another child", func() bool { return childOf(t, n.exporter.Process.Pid) != child })
		before, _ := strconv.ParseFloat(n.metric(`gpu_metered_seconds_total{gpu="0",uuid="`+uuidOf(n)+`"}`), 64)
		n.metered(before + 2)
	}
	whole := time.Since(begun)
	n.exporter.stop(t)
	_, total := sums(n.rows())
	if missing := whole - time.Duration(total)*time.Microsecond; missing > 3*2*time.Second {
		t.Errorf("%v of %v are missing after three kills of the child", missing, whole)
	}
}

// TestSecondExporter is refused, by name, and the first goes on.
func TestSecondExporter(t *testing.T) {
	n := newNode(t, "twice", lab.Scenario{GPUs: one(t)})
	n.start()
	second := exec.Command(filepath.Join(programs, "gpu-exporter"), "--state.dir="+filepath.Join(n.dir, "other"),
		"--state.lock="+filepath.Join(n.dir, "lock"), "--socket="+filepath.Join(n.dir, "other.sock"),
		"--web.listen-address="+freePort(t), "--nvml.library-path="+n.library)
	output, err := second.CombinedOutput()
	if err == nil || second.ProcessState.ExitCode() != 1 || !strings.Contains(string(output), strconv.Itoa(n.exporter.Process.Pid)) {
		t.Errorf("a second exporter ended with %v and said:\n%s", err, output)
	}
	n.metered(1)
}

// TestOrdinaryUser sees who holds what, and not the journal.
func TestOrdinaryUser(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		labtest.Missing(t, "curl")
	}
	holder := work(t, 4713)
	n := newNode(t, "open", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: holder.pid, SM: 50}}})
	n.start()
	as := func(arguments ...string) (string, int) {
		command := exec.Command(arguments[0], arguments[1:]...)
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4714, Gid: 4714}}
		command.Dir = "/"
		output, _ := command.CombinedOutput()
		return string(output), command.ProcessState.ExitCode()
	}
	output, code := as(filepath.Join(programs, "gwho"), "--socket="+n.socket)
	if code != 0 || !strings.Contains(output, "uid:4713") || strings.Contains(output, "3600") {
		t.Errorf("gwho as another user ended with %d:\n%s", code, output)
	}
	output, _ = as("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "--unix-socket", n.socket, "http://exporter/api/v1/usage")
	if output != "403" {
		t.Errorf("the journal over the socket answers %q to an ordinary user", output)
	}
	output, _ = as("curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "http://"+n.address+"/api/v1/usage")
	if output != "401" && output != "403" {
		t.Errorf("the journal over TCP answers %q to an ordinary user", output)
	}
}
