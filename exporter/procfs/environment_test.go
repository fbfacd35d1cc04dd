package procfs

import (
	"errors"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestVariables(t *testing.T) {
	long := strings.Repeat("x", 3*maxVariableBytes)
	for name, test := range map[string]struct {
		block string
		want  map[string]string
	}{
		"none":               {"", map[string]string{}},
		"one":                {"A=1\x00NB_USER=alice\x00B=2\x00", map[string]string{"NB_USER": "alice"}},
		"first of two":       {"NB_USER=alice\x00NB_USER=bob\x00", map[string]string{"NB_USER": "alice"}},
		"not ended":          {"A=1\x00NB_USER=alice", map[string]string{}},
		"empty":              {"NB_USER=\x00", map[string]string{"NB_USER": ""}},
		"equals in value":    {"NB_USER=a=b\x00", map[string]string{"NB_USER": "a=b"}},
		"no equals":          {"NB_USER\x00", map[string]string{}},
		"key only begins so": {"NB_USER2=x\x00XNB_USER=x\x00", map[string]string{}},
		"after a long one":   {"A=" + long + "\x00NB_USER=alice\x00", map[string]string{"NB_USER": "alice"}},
		"inside a long one":  {"A=" + strings.Repeat("x", maxVariableBytes-2) + "NB_USER=eve\x00SUDO_USER=bob\x00", map[string]string{"SUDO_USER": "bob"}},
		"too long":           {"NB_USER=" + long + "\x00", map[string]string{}},
		"longer than a name": {"NB_USER=" + strings.Repeat("x", maxVariableValue+1) + "\x00", map[string]string{}},
		"control characters": {"NB_USER=a\nb\x00SUDO_USER=\xff\x00", map[string]string{}},
	} {
		got, err := variables(strings.NewReader(test.block), []string{"NB_USER", "SUDO_USER"})
		if err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %v, %v, want %v", name, got, err, test.want)
		}
	}
}

func TestEnvironmentOfARealProcess(t *testing.T) {
	fs := real(t)
	command := exec.Command("sleep", "60")
	command.Env = []string{"SECRET=hunter2", "NB_USER=alice"}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = command.Process.Kill(); _ = command.Wait() }()
	// The environment is the new program's once execve has come that far.
	var got map[string]string
	for deadline := time.Now().Add(10 * time.Second); got["NB_USER"] == "" && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		h, err := fs.Process(uint32(command.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		got, err = h.Environment([]string{"NB_USER"})
		h.Close()
		if err != nil {
			t.Fatal(err)
		}
	}
	if want := map[string]string{"NB_USER": "alice"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	h, err := fs.Process(uint32(command.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	_ = command.Process.Kill()
	_ = command.Wait()
	if _, err := h.Environment([]string{"NB_USER"}); !errors.Is(err, ErrGone) {
		t.Errorf("of a process that is gone: %v", err)
	}
}

func TestUIDMaps(t *testing.T) {
	for name, test := range map[string]struct {
		text string
		want *UserNamespace
	}{
		"the host's":       {"         0          0 4294967295\n", nil},
		"unreadable":       {"0 x 1\n", nil},
		"not written":      {"", nil},
		"unshare -r":       {"         0       1001          1\n", &UserNamespace{1001}},
		"rootless":         {"0 1001 1\n1 165536 65536\n", &UserNamespace{1001}},
		"keep-id":          {"0 165536 1001\n1001 1001 1\n1002 166537 64535\n", &UserNamespace{165536}},
		"no uid 0":         {"1000 1001 1\n", &UserNamespace{-1}},
		"part of the host": {"0 0 65536\n", &UserNamespace{0}},
		"outside of ours":  {"0 4294967295 1\n", &UserNamespace{-1}},
	} {
		if got := parseUIDMap([]byte(test.text)); !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: %+v, want %+v", name, got, test.want)
		}
	}
}

func TestUserNamespaceOfARealProcess(t *testing.T) {
	fs := real(t)
	command := exec.Command("sleep", "60")
	command.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	if os.Getuid() == 0 {
		command.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 165536, Size: 65536}}
		command.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 165536, Size: 65536}}
		command.SysProcAttr.Credential = &syscall.Credential{}
	}
	if err := command.Start(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("needs user namespaces: %v", err)
		}
		t.Skipf("needs user namespaces: %v", err)
	}
	defer func() { _ = command.Process.Kill(); _ = command.Wait() }()
	read := func(pid int) Process {
		h, err := fs.Process(uint32(pid))
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		p, err := h.Read()
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	want := int64(os.Getuid())
	if want == 0 {
		want = 165536
	}
	if got := read(command.Process.Pid).UserNamespace; got == nil || got.RootUID != want {
		t.Errorf("uid 0 of the namespace is %+v, want %d", got, want)
	}
	if got := read(os.Getpid()).UserNamespace; got != nil {
		t.Errorf("our own process is in user namespace %+v, want ours", got)
	}
}
