package holders

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
)

// program is root's copy of a program under another name, for everyone to run.
func program(t *testing.T, from, name string) string {
	t.Helper()
	source, err := exec.LookPath(from)
	if err != nil {
		missing(t, from)
	}
	directory, err := os.MkdirTemp("", "holders")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	content, err := os.ReadFile(source)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(directory, name)
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(directory, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestMPSServerIsTheSystems wants the server that root's daemon starts under a
// user's uid to be the system's, its client the user's, and a server that the
// user started the user's.
func TestMPSServerIsTheSystems(t *testing.T) {
	needRoot(t)
	if _, err := exec.LookPath("setpriv"); err != nil {
		missing(t, "setpriv")
	}
	server := program(t, "sleep", "nvidia-cuda-mps-server")
	for name, test := range map[string]struct {
		daemon string // the parent
		uid    uint32 // of the parent
		kind   string
	}{
		"root's daemon":       {"nvidia-cuda-mps-control", 0, meter.KindSystem},
		"another of root's":   {"launcher", 0, meter.KindHost},
		"a person's daemon":   {"nvidia-cuda-mps-control", 4711, meter.KindHost},
		"of a user namespace": {"nvidia-cuda-mps-control", 4711, meter.KindHost},
	} {
		t.Run(name, func(t *testing.T) {
			become := "setpriv --reuid 4711 --regid 4711 --clear-groups "
			if test.uid != 0 {
				become = ""
			}
			command := exec.Command(program(t, "sh", test.daemon), "-c", become+server+" 1000 & echo $!; wait")
			command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: test.uid, Gid: test.uid}, Setpgid: true, Pdeathsig: syscall.SIGKILL}
			if name == "of a user namespace" {
				command.SysProcAttr.Credential = &syscall.Credential{Uid: 0, Gid: 0}
				command.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER
				command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 4711, Size: 1}}
				command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 4711, Size: 1}}
			}
			output, err := command.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Kill(-command.Process.Pid, unix.SIGKILL); _ = command.Wait() })
			line := make([]byte, 32)
			n, err := io.ReadAtLeast(output, line, 2)
			if err != nil {
				t.Fatal(err)
			}
			number, err := strconv.Atoi(strings.TrimSpace(string(line[:n])))
			if err != nil {
				t.Fatal(err)
			}
			pid := uint32(number)
			r := newRig(t)
			// setpriv becomes the server a moment later.
			for exe := ""; exe != server; exe, _ = os.Readlink("/proc/" + strconv.Itoa(number) + "/exe") {
				if unix.Kill(number, 0) != nil {
					t.Fatal("the server has ended")
				}
			}
			listing := reading(pid)
			r.Refresh(t.Context(), gpu.Pass{Readings: []gpu.Reading{listing}})
			got := r.Attribute(r.Keys(listing)[pid]).Workload
			if got.Kind != test.kind || got.User != "alice" || test.kind == meter.KindSystem && got.Name != "nvidia-cuda-mps-server" {
				t.Errorf("%+v, want kind %s of alice", got, test.kind)
			}
		})
	}
}
