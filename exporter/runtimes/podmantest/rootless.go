package podmantest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// Person is whose account NewRootless makes.
const (
	Person    = "gpuledger-podman"
	PersonUID = 4796
)

// NewRootless prepares a Podman that a person runs: an account is made, with
// /run/user/UID, and both go with the test. Beside what New needs, it needs
// useradd and newuidmap.
func NewRootless(t testing.TB) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	for _, program := range []string{"podman", "conmon", "runc", "busybox", "useradd", "userdel", "newuidmap"} {
		if _, err := exec.LookPath(program); err != nil {
			missing(t, program)
		}
	}
	uid := strconv.Itoa(PersonUID)
	runtime := filepath.Join("/run/user", uid)
	if _, err := os.Stat(runtime); err == nil {
		t.Fatalf("%s is there already: a person has uid %s, or a test was killed", runtime, uid)
	}
	folder, err := os.MkdirTemp("", "podmantest")
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{
		Socket: filepath.Join(runtime, "podman", "podman.sock"), RunRoot: filepath.Join(runtime, "containers"), folder: folder,
		environment: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + folder, "XDG_RUNTIME_DIR=" + runtime},
		credential:  &syscall.Credential{Uid: PersonUID, Gid: PersonUID},
	}
	if output, err := exec.Command("useradd", "--uid", uid, "--home-dir", folder, "--no-create-home", "--user-group", Person).CombinedOutput(); err != nil {
		t.Fatalf("useradd: %v\n%s", err, output)
	}
	t.Cleanup(func() {
		e.stop(t)
		// The process that keeps the user namespace; it is gone where podman is.
		if text, err := os.ReadFile(filepath.Join(runtime, "libpod", "tmp", "pause.pid")); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && pid > 1 {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
		for _, dir := range []string{runtime, folder} {
			if err := os.RemoveAll(dir); err != nil {
				t.Logf("remove %s: %v", dir, err)
			}
		}
		_ = os.Remove(filepath.Dir(runtime)) // unless it has others' in it
		// By force: a zombie that nobody has collected counts as logged in.
		if output, err := exec.Command("userdel", "--force", Person).CombinedOutput(); err != nil {
			t.Logf("userdel: %v: %s", err, output)
		}
	})
	if err := os.MkdirAll(filepath.Dir(runtime), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{runtime, filepath.Dir(e.Socket)} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, PersonUID, PersonUID); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(folder, PersonUID, PersonUID); err != nil {
		t.Fatal(err)
	}
	e.Import(t, Image)
	return e
}
