// Package podmantest runs a real Podman for a test, in private folders, without
// network or registry.
package podmantest

import (
	"bytes"
	"encoding/json"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/runtimes/dockertest"
)

// Image is the image that every engine holds: a static busybox, without a user
// of its own.
const Image = "localhost/busybox:test"

// Engine is one Podman, which has no daemon: its service runs only while
// StartService has been called.
type Engine struct {
	// Socket is where its service listens.
	Socket string
	// RunRoot and GraphRoot are where it keeps its containers.
	RunRoot, GraphRoot string

	folder      string
	flags       []string
	environment []string            // nil for our own
	credential  *syscall.Credential // nil for our own
	service     *exec.Cmd
	output      *bytes.Buffer
}

// New prepares a Podman; what it runs ends with the test. It needs root, podman,
// conmon, runc and busybox-static; without them the test is skipped, or fails
// if CI is true.
func New(t testing.TB) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	for _, program := range []string{"podman", "conmon", "runc", "busybox"} {
		if _, err := exec.LookPath(program); err != nil {
			missing(t, program)
		}
	}
	// Not t.TempDir: its path may be too long for a unix socket.
	folder, err := os.MkdirTemp("", "podmantest")
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{
		Socket: filepath.Join(folder, "podman.sock"), RunRoot: filepath.Join(folder, "run"), GraphRoot: filepath.Join(folder, "graph"), folder: folder,
	}
	e.flags = []string{"--root", e.GraphRoot, "--runroot", e.RunRoot, "--tmpdir", filepath.Join(folder, "tmp")}
	t.Cleanup(func() {
		e.stop(t)
		if err := os.RemoveAll(folder); err != nil {
			t.Logf("remove %s: %v", folder, err)
		}
	})
	e.Import(t, Image)
	return e
}

func (e *Engine) stop(t testing.TB) {
	e.KillService(t)
	e.try("rm", "--force", "--all", "--time", "0")
}

// StartService runs `podman system service` and waits until it listens.
func (e *Engine) StartService(t testing.TB) {
	t.Helper()
	e.output = &bytes.Buffer{}
	e.service = e.command("system", "service", "--time", "0", "unix://"+e.Socket)
	e.service.Stdout, e.service.Stderr = e.output, e.output
	e.service.WaitDelay = 5 * time.Second
	if err := e.service.Start(); err != nil {
		t.Fatalf("start podman's service: %v", err)
	}
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		connection, err := net.Dial("unix", e.Socket)
		if err == nil {
			connection.Close()
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("podman's service does not listen after 60 s: %v\n%s", err, e.output)
		}
	}
}

// KillService ends the service with SIGKILL, if it runs. Containers live on.
func (e *Engine) KillService(t testing.TB) {
	t.Helper()
	if e.service == nil {
		return
	}
	_ = e.service.Process.Kill() // it may have ended already
	_ = e.service.Wait()         // it was killed
	e.service = nil
}

// Import makes an image of the static busybox. changes are Dockerfile lines
// such as "USER 1000".
func (e *Engine) Import(t testing.TB, name string, changes ...string) {
	t.Helper()
	archive := filepath.Join(e.folder, "rootfs.tar")
	if err := os.WriteFile(archive, dockertest.RootFS(t).Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	arguments := []string{"import"}
	for _, change := range changes {
		arguments = append(arguments, "--change", change)
	}
	e.Podman(t, append(arguments, archive, name)...)
}

// Run starts a container: podman run --detach --network none ARGUMENTS….
func (e *Engine) Run(t testing.TB, arguments ...string) dockertest.Container {
	t.Helper()
	id := strings.TrimSpace(e.Podman(t, append([]string{
		// Limits above our own may be refused.
		"run", "--detach", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000"}, arguments...)...))
	var inspected []struct{ State struct{ Pid uint32 } }
	if err := json.Unmarshal([]byte(e.Podman(t, "inspect", id)), &inspected); err != nil || len(inspected) != 1 {
		t.Fatalf("podman inspect %s: %v", id, err)
	}
	if inspected[0].State.Pid == 0 {
		t.Fatalf("container %s does not run", id)
	}
	return dockertest.Container{ID: id, PID: inspected[0].State.Pid}
}

// Podman runs the podman command and returns its output.
func (e *Engine) Podman(t testing.TB, arguments ...string) string {
	t.Helper()
	output, err := e.command(arguments...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("podman %s: %v\n%s", strings.Join(arguments, " "), err, exit.Stderr)
		}
		t.Fatalf("podman %s: %v", strings.Join(arguments, " "), err)
	}
	return string(output)
}

// try is Podman for what may fail.
func (e *Engine) try(arguments ...string) { _ = e.command(arguments...).Run() }

// command gives podman everything of its own. crun refuses hosts with both
// versions of cgroups; runc takes either.
func (e *Engine) command(arguments ...string) *exec.Cmd {
	flags := append([]string{"--storage-driver", "vfs", "--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file"}, e.flags...)
	command := exec.Command("podman", append(flags, arguments...)...)
	command.Env = e.environment
	if e.credential != nil {
		command.Dir = e.folder
		command.SysProcAttr = &syscall.SysProcAttr{Credential: e.credential}
	}
	return command
}

func missing(t testing.TB, what string) {
	t.Helper()
	if strict, _ := strconv.ParseBool(os.Getenv("CI")); strict {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}
