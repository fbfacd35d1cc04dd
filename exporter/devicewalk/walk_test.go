package devicewalk

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs"
)

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

var card = procfs.DeviceNumber{Major: 195, Minor: 251}

// holder starts a process under uid that has the device open, in namespaces
// of its own where flags say so.
func holder(t testing.TB, uid uint32, flags ...uintptr) uint32 {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root, to make a device node")
	}
	path := filepath.Join(t.TempDir(), "card")
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(card.Major, card.Minor))); errors.Is(err, unix.EPERM) {
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
	command := exec.Command("sleep", "1000")
	command.ExtraFiles = []*os.File{file}
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, Pdeathsig: syscall.SIGKILL}
	for _, flag := range flags {
		command.SysProcAttr.Cloneflags |= flag
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	return uint32(command.Process.Pid)
}

func walker(t testing.TB) *Walker {
	return New(Options{FS: realProc(t), Wanted: func(d procfs.DeviceNumber) bool { return d == card }, Privileged: os.Geteuid() == 0})
}

func TestWalkFindsWhoHasTheDevice(t *testing.T) {
	pid := holder(t, 4711)
	result, err := walker(t).Walk(t.Context(), true)
	if err != nil || !result.Whole || result.Looked == 0 || result.Hidden != 0 || len(result.Stuck) != 0 {
		t.Fatalf("%+v, %v", result, err)
	}
	at := slices.IndexFunc(result.Processes, func(p Process) bool { return p.PID == pid })
	if at < 0 {
		t.Fatalf("%d is not among %+v", pid, result.Processes)
	}
	if p := result.Processes[at]; p.UID != 4711 || len(p.Devices) != 1 || !strings.HasSuffix(p.Executable, "sleep") || p.NamespacePID != 0 {
		t.Errorf("%+v", p)
	}
}

func TestWalkSeesOtherPIDNamespaces(t *testing.T) {
	pid := holder(t, 4711, unix.CLONE_NEWPID)
	result, err := walker(t).Walk(t.Context(), false)
	at := slices.IndexFunc(result.Processes, func(p Process) bool { return p.PID == pid })
	if err != nil || at < 0 || result.Processes[at].NamespacePID != 1 {
		t.Errorf("%d in %+v, %v", pid, result.Processes, err)
	}
}

func TestWalkSkips(t *testing.T) {
	pid := holder(t, 4711)
	w := walker(t)
	w.options.Skip = func(_, parent uint32) bool { return parent == uint32(os.Getpid()) }
	result, err := w.Walk(t.Context(), false)
	if err != nil || slices.ContainsFunc(result.Processes, func(p Process) bool { return p.PID == pid }) {
		t.Errorf("%+v, %v", result, err)
	}
}

// TestWalkGoesOn wants a walk that runs out of time to be taken up where it
// ended, with nothing forgotten that was found.
func TestWalkGoesOn(t *testing.T) {
	w := walker(t)
	pids, err := w.options.FS.PIDs()
	if err != nil || len(pids) < 3 {
		t.Fatal(pids, err)
	}
	var looked []uint32
	w.examine = func(pid uint32, _ bool) (look, error) {
		looked = append(looked, pid)
		if len(looked) == 1 || len(looked) == 2 {
			time.Sleep(2 * time.Millisecond) // uses the budget up
		}
		return look{process: Process{PID: pid}, of: len(looked) <= 2}, nil
	}
	w.options.Budget = time.Millisecond
	first, err := w.Walk(t.Context(), false)
	if err != nil || first.Whole || len(looked) != 1 {
		t.Fatalf("%+v, %v after %v", first, err, looked)
	}
	second, err := w.Walk(t.Context(), false)
	if err != nil || second.Whole || len(looked) != 2 || looked[1] <= looked[0] {
		t.Fatalf("%+v, %v after %v", second, err, looked)
	}
	if len(second.Processes) != 2 {
		t.Errorf("%+v: what the first walk found is forgotten", second.Processes)
	}
	w.options.Budget = time.Minute
	third, err := w.Walk(t.Context(), false)
	if err != nil || !third.Whole || len(third.Processes) != 0 || !slices.Contains(looked[2:], looked[0]) {
		t.Errorf("%+v, %v: not all were looked at again", third, err)
	}
}

// TestHungLooksAreLeftAlone wants a process whose look hangs to cost its
// patience once, and too many of them to end the walk.
func TestHungLooksAreLeftAlone(t *testing.T) {
	w := walker(t)
	pids, err := w.options.FS.PIDs()
	if err != nil || len(pids) < maxStuck+1 {
		t.Fatal(pids, err)
	}
	w.patience = 100 * time.Millisecond
	release, looks := make(chan struct{}), make(chan uint32, 1<<16)
	bad := pids[0]
	w.examine = func(pid uint32, _ bool) (look, error) {
		looks <- pid
		if pid == bad {
			<-release
		}
		return look{}, nil
	}
	for range 2 {
		result, err := w.Walk(t.Context(), false)
		if err != nil || !result.Whole || !slices.Equal(result.Stuck, []uint32{bad}) {
			t.Fatalf("%+v, %v", result, err)
		}
	}
	count := 0
	for range len(looks) {
		if <-looks == bad {
			count++
		}
	}
	if count != 1 {
		t.Errorf("the hung process was looked at %d times", count)
	}
	close(release)
	for deadline := time.Now().Add(20 * time.Second); w.stuckCount() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it stays stuck")
		}
	}

	all := make(chan struct{})
	defer close(all)
	w.examine = func(uint32, bool) (look, error) { <-all; return look{}, nil }
	result, err := w.Walk(t.Context(), false)
	if err != nil || result.Whole || len(result.Stuck) != maxStuck {
		t.Errorf("%+v, %v", result, err)
	}
}

func TestStrangersAreCountedAsHidden(t *testing.T) {
	w := walker(t)
	w.examine = func(pid uint32, _ bool) (look, error) {
		if pid == 1 {
			return look{}, procfs.ErrHidden
		}
		return look{}, procfs.ErrGone
	}
	result, err := w.Walk(t.Context(), false)
	if err != nil || result.Hidden != 1 || result.Looked != 0 || !result.Whole {
		t.Errorf("%+v, %v", result, err)
	}
}

func BenchmarkWalk(b *testing.B) {
	w := walker(b)
	for _, mapped := range []bool{false, true} {
		b.Run(map[bool]string{false: "descriptors", true: "mappings too"}[mapped], func(b *testing.B) {
			for b.Loop() {
				result, err := w.Walk(b.Context(), mapped)
				if err != nil || !result.Whole {
					b.Fatalf("%+v, %v", result, err)
				}
				b.ReportMetric(float64(result.Looked+result.Hidden), "processes")
			}
		})
	}
}
