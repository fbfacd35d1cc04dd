package suspects

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
)

const testMinor = 250

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

func realProc(t testing.TB) *procfs.FS {
	t.Helper()
	fs, err := procfs.Open("")
	if errors.Is(err, procfs.ErrNotInitialPIDNamespace) {
		missing(t, "the initial PID namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

// grandchild starts a process of a shell that has the card's device open: our
// own children are not looked at. It returns its PID.
func grandchild(t testing.TB) uint32 {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root, to make a device node")
	}
	path := filepath.Join(t.TempDir(), "card")
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(gpuMajor, testMinor))); errors.Is(err, unix.EPERM) {
		missing(t, "CAP_MKNOD")
	} else if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0) // takes no driver
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	// The shell has it closed itself.
	command := exec.Command("sh", "-c", "sleep 1000 & exec 3>&-; echo $!; wait")
	command.ExtraFiles = []*os.File{file}
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Kill(-command.Process.Pid, unix.SIGKILL); _ = command.Wait() })
	line := make([]byte, 32)
	n, err := output.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	pid := uint32(0)
	for _, b := range line[:n-1] {
		pid = pid*10 + uint32(b-'0')
	}
	for deadline := time.Now().Add(20 * time.Second); ; { // until the shell's copy has become it
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		if string(comm) == "sleep\n" {
			return pid
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%d is %q, %v", pid, comm, err)
		}
	}
}

func card(unexplained uint64, pids ...uint32) Card {
	c := Card{UUID: "GPU-a", Minor: gpu.Some[int64](testMinor), UnexplainedBytes: gpu.Some(unexplained), Listed: map[uint32]meter.ProcessKey{}}
	for _, pid := range pids {
		c.Listed[pid] = meter.ProcessKey{PID: pid, StartTicks: 1}
	}
	return c
}

func start(t *testing.T, threshold uint64) *Watcher {
	t.Helper()
	w := New(Options{FS: realProc(t), ThresholdBytes: threshold})
	w.every = 10 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func await(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s does not happen", what)
		}
	}
}

func suspected(w *Watcher, pid uint32) bool {
	findings := w.Findings()
	return findings != nil && slices.ContainsFunc(findings.Cards["GPU-a"].Suspects, func(s Suspect) bool {
		return s.Key.PID == pid && s.Reason == ReasonDeviceOpen && s.Strength == Strong
	})
}

func TestWatcherFindsWhoHasTheDevice(t *testing.T) {
	pid := grandchild(t)
	w := start(t, DefaultThreshold)
	w.Note([]Card{card(1 << 30)})
	if w.Needy("GPU-a") {
		t.Error("looked into after one pass")
	}
	await(t, "a finding", func() bool { w.Note([]Card{card(1 << 30)}); return suspected(w, pid) })
	if !w.Needy("GPU-a") || w.Needy("GPU-b") {
		t.Error("the wrong card is looked into")
	}
	await(t, "an acquittal: now NVML lists it", func() bool { w.Note([]Card{card(1<<30, pid)}); return !suspected(w, pid) })
	w.Note([]Card{card(1 << 20)})
	if w.Needy("GPU-a") {
		t.Error("little memory is looked into")
	}
}

func TestWatcherRests(t *testing.T) {
	w := New(Options{FS: realProc(t), ThresholdBytes: 1})
	if w.Findings() != nil {
		t.Error("findings before anything was looked at")
	}
	off := New(Options{FS: realProc(t)})
	for range 3 {
		w.Note([]Card{card(0), {UUID: "GPU-b"}})
		off.Note([]Card{card(1 << 40)})
	}
	select {
	case <-w.wake:
		t.Error("woken without a need")
	case <-off.wake:
		t.Error("woken though it is switched off")
	default:
	}
}

// TestWatcherBacksOff wants fewer and fewer walks while nothing changes, and
// one soon when something does.
func TestWatcherBacksOff(t *testing.T) {
	w := start(t, 1)
	walks, last := 0, time.Time{}
	note := func(listed ...uint32) {
		w.Note([]Card{card(1<<30, listed...)})
		if f := w.Findings(); f != nil && f.At != last {
			walks, last = walks+1, f.At
		}
	}
	begun := time.Now()
	for time.Since(begun) < 700*time.Millisecond {
		note()
		time.Sleep(time.Millisecond)
	}
	// 10, 20, 40, … ms apart: six of them, and what other processes on this
	// machine change.
	if walks < 2 || walks > 30 {
		t.Errorf("%d walks in 700 ms", walks)
	}
	before := walks
	await(t, "a walk because another process is listed", func() bool { note(1<<22 - 1); return walks > before })
}

func TestHeldIsRememberedAndBounded(t *testing.T) {
	w := New(Options{FS: realProc(t), ThresholdBytes: 1})
	w.Note([]Card{card(0, 7)})
	w.Note([]Card{card(0)})
	if !w.had(meter.ProcessKey{PID: 7, StartTicks: 1}, "GPU-a") || w.had(meter.ProcessKey{PID: 7, StartTicks: 1}, "GPU-b") || w.had(meter.ProcessKey{PID: 7, StartTicks: 2}, "GPU-a") {
		t.Error("who held the card is not what was seen")
	}
	for pid := range uint32(3 * mostHeld) {
		w.Note([]Card{card(0, pid)})
	}
	if len(w.held) > mostHeld+1 {
		t.Errorf("%d are remembered", len(w.held))
	}
}

func TestLookOnce(t *testing.T) {
	pid := grandchild(t)
	fs := realProc(t)
	cards := []Card{card(1 << 30)}
	findings := Look(t.Context(), fs, cards, cards, 10*time.Second)
	if findings.Error != "" || !findings.Whole || !slices.ContainsFunc(findings.Cards["GPU-a"].Suspects, func(s Suspect) bool { return s.Key.PID == pid }) {
		t.Errorf("%+v", findings)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if findings := Look(ended, fs, cards, cards, time.Second); findings.Error == "" {
		t.Errorf("%+v without an error", findings)
	}
}
