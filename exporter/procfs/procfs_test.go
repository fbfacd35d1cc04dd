package procfs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// tree makes a procfs of the files in it. Names that end in "@" are links.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		link := strings.HasSuffix(name, "@")
		path := filepath.Join(root, strings.TrimSuffix(name, "@"))
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if link {
			err = os.Symlink(content, path)
		} else {
			err = os.WriteFile(path, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

const (
	initial = "pid:[4026531836]"
	nested  = "pid:[4026532001]"
	kernel  = "2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 5 0"
	shell   = "2 (bash) S 1 0 0 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 5 0"
)

func TestOpenAcceptsOnlyTheInitialPIDNamespace(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		ok    bool
	}{
		{"we are in it", map[string]string{"self/ns/pid@": initial}, true},
		{"the host's procfs in a container", map[string]string{"self/ns/pid@": nested, "1/ns/pid@": initial}, true},
		{"the host's procfs without privilege", map[string]string{"self/ns/pid@": nested, "2/stat": kernel}, true},
		{"a container's own procfs", map[string]string{"self/ns/pid@": nested, "1/ns/pid@": nested, "2/stat": kernel}, false},
		{"a container's own procfs without privilege", map[string]string{"self/ns/pid@": nested, "2/stat": shell}, false},
		{"nothing may be read", map[string]string{"self/ns/pid@": nested}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.files["sys/kernel/random/boot_id"] = "b007\n"
			test.files["stat"] = "cpu 1\nbtime 1700000000\n"
			fs, err := Open(tree(t, test.files))
			if test.ok {
				if err != nil || fs.BootID() != "b007" {
					t.Fatalf("Open: %v", err)
				}
				return
			}
			if !errors.Is(err, ErrNotInitialPIDNamespace) || !strings.Contains(err.Error(), "--pid=host") {
				t.Fatalf("Open = %v, want a refusal with a remedy", err)
			}
		})
	}
	if _, err := Open(t.TempDir()); err == nil {
		t.Error("an empty directory was taken for a procfs")
	}
}

func real(t testing.TB) *FS {
	t.Helper()
	fs, err := Open("")
	if errors.Is(err, ErrNotInitialPIDNamespace) && os.Getenv("CI") != "true" {
		t.Skip("needs the initial PID namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

func TestReadOurselves(t *testing.T) {
	fs := real(t)
	h, err := fs.Process(uint32(os.Getpid()))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	p, err := h.Read()
	if err != nil {
		t.Fatal(err)
	}
	executable, _ := os.Executable()
	if p.Executable != executable || p.ExecutableUID != int64(os.Geteuid()) || p.RealUID != uint32(os.Getuid()) ||
		p.Command == "" || p.Cgroup == "" || p.Zombie() || p.Exiting() || p.ParentPID != uint32(os.Getppid()) {
		t.Errorf("read %+v", p)
	}
	if age := time.Since(fs.StartTime(p.StartTicks)); age < -2*time.Second || age > time.Hour {
		t.Errorf("we are %v old", age)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		t.Fatal(err)
	}
	if start := fs.StartMonotonicUS(p.StartTicks); start <= 0 || start > now.Nano()/1000 {
		t.Errorf("started at %d µs of the monotonic clock, now is %d", start, now.Nano()/1000)
	}
	arguments, err := h.CommandLine()
	if err != nil || len(arguments) == 0 || !strings.Contains(arguments[0], "procfs") {
		t.Errorf("command line %q, %v", arguments, err)
	}
}

func TestZombieThenGone(t *testing.T) {
	fs := real(t)
	command := exec.Command("sleep", "1000")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	h, err := fs.Process(uint32(command.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	if h.PIDFD() < 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("no pidfd on this kernel")
		}
		t.Skip("no pidfd on this kernel")
	}
	poll := []unix.PollFd{{Fd: int32(h.PIDFD())}}
	if ended, err := Ended(poll); err != nil || len(ended) != 0 {
		t.Fatalf("Ended = %v, %v while it lives", ended, err)
	}
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); ; {
		ended, err := Ended(poll)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("Ended = %v, %v", ended, err)
		}
		if len(ended) == 1 {
			break
		}
	}
	p, err := h.Read()
	if err != nil || !p.Zombie() || p.RealUID != uint32(os.Getuid()) {
		t.Errorf("a zombie reads as %+v, %v", p, err)
	}
	command.Wait()
	if _, err := h.Read(); !errors.Is(err, ErrGone) {
		t.Errorf("read after the end: %v, want ErrGone", err)
	}
	if _, err := fs.Process(uint32(command.Process.Pid)); !errors.Is(err, ErrGone) {
		t.Errorf("open after the end: %v, want ErrGone", err)
	}
}

func TestStrangerIsReadWithoutItsSecrets(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	fs := real(t)
	command := exec.Command("sleep", "1000")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer command.Wait()
	defer command.Process.Kill()
	h, err := fs.Process(uint32(command.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	p, err := h.Read()
	if err != nil || p.RealUID != 4711 || p.EffectiveUID != 4711 || p.ExecutableUID != 0 {
		t.Errorf("read %+v, %v", p, err)
	}
}

func TestParseStat(t *testing.T) {
	const tail = " S 1 2 3 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 127619 0 0"
	for _, command := range []string{"bash", "a) R 7 (b", "x\n y", "((sd-pam))", "", ")"} {
		s, err := ParseStat([]byte("4713 (" + command + ")" + tail))
		if err != nil || s.StartTicks != 127619 || s.State != 'S' || s.ParentPID != 1 {
			t.Errorf("command %q: %+v, %v", command, s, err)
		}
		if strings.ContainsRune(s.Command, '\n') {
			t.Errorf("command %q was not cleaned: %q", command, s.Command)
		}
	}
	for _, bad := range []string{"", "1 bash", "1 (a) S 1", "1 )a( S" + tail, "1 (a) S 1 2 3 0 -1 x 0 0 0 0 0 0 0 0 20 0 1 0 y"} {
		if s, err := ParseStat([]byte(bad)); err == nil {
			t.Errorf("%q was read as %+v", bad, s)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte(kernel))
	f.Fuzz(func(t *testing.T, data []byte) {
		ParseStat(data)
		var p Process
		p.parseStatus(data)
	})
}

func TestHiddenAndGoneAreKeptApart(t *testing.T) {
	for errno, want := range map[unix.Errno]error{
		unix.ENOENT: ErrGone, unix.ESRCH: ErrGone, unix.EPERM: ErrHidden, unix.EACCES: ErrHidden,
	} {
		if err := classify("x", errno); !errors.Is(err, want) {
			t.Errorf("%v is classified as %v", errno, err)
		}
	}
	if err := classify("x", unix.EMFILE); errors.Is(err, ErrGone) || errors.Is(err, ErrHidden) || !errors.Is(err, unix.EMFILE) {
		t.Errorf("EMFILE is classified as %v", err)
	}
}

func TestFixtureProcess(t *testing.T) {
	fs, err := Open(tree(t, map[string]string{
		"self/ns/pid@": initial, "self/ns/cgroup@": "cgroup:[4026531835]", "sys/kernel/random/boot_id": "b\n", "stat": "btime 1700000000\n",
		"4000000001/stat":   "4000000001 (a\nb) Z 1 0 0 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 150 0",
		"4000000001/status": "Name:\tx\nUid:\t1\t2\t3\t4\nNSpid:\t4000000001\t7\n", "4000000001/cgroup": "0::/\n", "4000000001/loginuid": "4294967295",
	}))
	if err != nil {
		t.Fatal(err)
	}
	h, err := fs.Process(4000000001)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	p, err := h.Read()
	if err != nil || !p.Zombie() || len(p.NSPID) != 2 || p.LoginUID != -1 || p.SavedUID != 3 || p.ExecutableUID != -1 {
		t.Errorf("read %+v, %v", p, err)
	}
	if got, want := fs.StartTime(p.StartTicks), time.Unix(1700000001, 5e8); fs.ClockTicks() == 100 && !got.Equal(want) {
		t.Errorf("started %v, want %v", got, want)
	}
	if !fs.InitialCgroupNamespace() || fs.Root() == "" {
		t.Error("the cgroup namespace is the initial one")
	}
	if _, err := fs.Process(4000000002); !errors.Is(err, ErrGone) {
		t.Errorf("unknown PID %s: %v", strconv.Itoa(2), err)
	}
}
