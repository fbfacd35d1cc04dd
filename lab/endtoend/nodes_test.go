package endtoend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/history"
	"gpuledger/exporter/usage"
	"gpuledger/exporter/who"
	"gpuledger/lab"
)

// asUser runs gwho as another user, and returns its output and exit code.
func asUser(t *testing.T, uid uint32, arguments ...string) (string, int) {
	t.Helper()
	var output, problems bytes.Buffer
	command := exec.Command(filepath.Join(programs, "gwho"), arguments...)
	command.Dir = "/"
	command.Stdout, command.Stderr = &output, &problems
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	_ = command.Run() // the code says it
	if code := command.ProcessState.ExitCode(); code != 0 && code != 3 {
		t.Fatalf("gwho %s ended with %d:\n%s%s", strings.Join(arguments, " "), code, &output, &problems)
	}
	return output.String(), command.ProcessState.ExitCode()
}

// TestAllNodes asks gpu-accounting who holds what on two nodes, one over its
// socket as root and one over TCP with a token, and then stops each in its way.
func TestAllNodes(t *testing.T) {
	first, second := work(t, 4711), work(t, 4712)
	left := newNode(t, "gpu01", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: first.pid, SM: 50}}})
	right := newNode(t, "gpu02", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: second.pid, SM: 50}}})
	left.start()
	right.start()
	s := newSite(t, "unix://"+left.socket, "http://"+right.address)
	address := freePort(t)
	daemon := start(t, os.Environ(), "gpu-accounting", "serve", "--config.file="+s.config, "--web.listen-address="+address)
	nodes := func() (who.Nodes, int) {
		output, code := asUser(t, 4713, "--nodes", "--json", "--server=http://"+address)
		var a who.Nodes
		if err := json.Unmarshal([]byte(output), &a); err != nil && output != "" {
			t.Fatalf("%v: %s", err, output)
		}
		return a, code
	}
	var a who.Nodes
	await(t, "both nodes' answers", func() bool { a, _ = nodes(); return len(a.Nodes) == 2 })
	if len(a.Missing) != 0 {
		t.Errorf("missing %+v", a.Missing)
	}
	for i, want := range []struct {
		node string
		uid  int64
	}{{"gpu01", 4711}, {"gpu02", 4712}} {
		got := a.Nodes[i]
		holders := got.Cards[0].Devices[0].Holders
		if got.Node != want.node || len(holders) != 1 || *holders[0].UID != want.uid || holders[0].Command != "sleep" || holders[0].CommandLine != nil || got.ViewerUID != nil {
			t.Errorf("%s: %+v", got.Node, holders)
		}
	}
	if direct, _ := left.gwho(); direct.Cards[0].Devices[0].Holders[0].CommandLine == nil {
		t.Error("the socket told root no command line, so that none has crossed proves nothing")
	}
	// Once its rows have come, the ledger knows whose address it is.
	right.exporter.stop(t)
	right.start()
	rows := `SELECT count(*) FROM target JOIN node ON node.id = target.node WHERE target.url LIKE 'unix:%'`
	left.exporter.stop(t) // its rows are final now
	left.start()
	await(t, "the first node's rows", func() bool { return s.query(rows) == 1 })

	// One node is stopped and one hangs: each is named, nobody waits long.
	left.exporter.stop(t)
	var last who.Nodes
	await(t, "the stopped node to be missing", func() bool {
		last, _ = nodes()
		for _, m := range last.Missing {
			if m.Target == "unix://"+left.socket {
				return m.Node == "gpu01"
			}
		}
		return false
	})
	left.start()
	await(t, "the node's return", func() bool { last, _ = nodes(); return len(last.Nodes) > 0 && last.Nodes[0].Node == "gpu01" })
	if err := left.exporter.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	await(t, "the hung node to be missing", func() bool {
		begun := time.Now()
		output, code := asUser(t, 4713, "--nodes", "--server=http://"+address)
		if took := time.Since(begun); took > 10*time.Second {
			t.Errorf("gwho took %v", took)
		}
		return code == 3 && strings.Contains(output, "! gpu01: no answer within 2s")
	})
	if err := left.exporter.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	daemon.stop(t)
}

// TestWhoHeldItBefore reads a real exporter's journal back as two users and as
// root, after a time in which it did not run.
func TestWhoHeldItBefore(t *testing.T) {
	mine, others := work(t, 4711), work(t, 4712)
	n := newNode(t, "gpu01", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: mine.pid, SM: 50}, {PID: others.pid, SM: 0}}})
	// Yesterday 4712 held it with a job that is nobody else's business.
	bucket := time.Now().UTC().Add(-20 * time.Hour).Truncate(usage.BucketLength)
	card := usage.Row{
		Key:  usage.Key{Run: "RUN-OLD", Device: "GPU-before", Slices: 1, Of: 1, Bucket: bucket, State: usage.StateHeld, User: "uid:4712", UID: 4712, Kind: "docker", Workload: "private"},
		Node: "gpu01", Card: "GPU-before", Index: 7, Model: "NVIDIA A100", AttributedBy: "label", Amounts: usage.Amounts{GPUUS: 900e6, ShareUS: 900e6, HeldUS: 900e6},
	}
	n.fillJournal([]usage.Row{card})
	n.start()
	ask := func(uid uint32, arguments ...string) (a history.Answer) {
		output, code := asUser(t, uid, append([]string{"--socket=" + n.socket, "--json", "--history"}, arguments...)...)
		if err := json.Unmarshal([]byte(output), &a); err != nil || code != 0 {
			t.Fatalf("code %d, %v: %s", code, err, output)
		}
		return a
	}
	var a history.Answer
	held := func(a history.Answer) (told, untold string) {
		for _, c := range a.Cards {
			for _, s := range c.Stretches {
				if s.State != usage.StateHeld {
					continue
				}
				if s.Detail != nil {
					told += fmt.Sprintf("%d:%s ", *s.UID, s.Detail.Workload)
				} else {
					untold += fmt.Sprintf("%d ", *s.UID)
				}
			}
		}
		return told, untold
	}
	await(t, "the first rows in the journal", func() bool { a = ask(4711); return len(a.Cards) == 2 })
	if told, untold := held(a); told != "4711: " || untold != "4712 4712 " {
		t.Errorf("4711 is told %q in full and of %q when", told, untold)
	}
	if told, untold := held(ask(4712)); told != "4712: 4712:private " || untold != "4711 " {
		t.Errorf("4712 is told %q in full and of %q when", told, untold)
	}
	if told, untold := held(ask(0)); untold != "" || !strings.Contains(told, "4712:private") || !strings.Contains(told, "4711:") {
		t.Errorf("root is told %q in full and of %q when", told, untold)
	}
	// For each card, all of the time is accounted for: held, or not observed.
	all := ask(0)
	for _, c := range all.Cards {
		total := int64(0)
		for _, s := range c.Stretches {
			total += s.Detail.GPUUS
		}
		whole := all.To.Sub(all.From)
		if lack := whole - time.Duration(total)*time.Microsecond; lack < 0 || lack > 30*time.Second {
			t.Errorf("card %d: %v of %v", c.Index, time.Duration(total)*time.Microsecond, whole)
		}
	}
	if len(ask(4711, "1h").Cards) != 1 {
		t.Error("an hour back there was yesterday's card")
	}
}
