// Package dockertest starts a real Docker engine for a test, on a private
// socket and in private folders, without network or registry.
package dockertest

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Image is the image that every engine holds: a static busybox, without a
// user of its own.
const Image = "busybox:test"

// Engine is one running dockerd.
type Engine struct {
	// Socket is the path of its unix socket.
	Socket string
}

// Start runs a dockerd until the test ends. It needs root, dockerd, docker and
// busybox-static; without them the test is skipped, or fails if CI is true.
func Start(t testing.TB) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	for _, program := range []string{"dockerd", "docker", "containerd", "runc", "busybox"} {
		if _, err := exec.LookPath(program); err != nil {
			missing(t, program)
		}
	}
	// Not t.TempDir: its path may be too long for a unix socket, and it cannot
	// be removed before the engine has let go of its mounts.
	folder, err := os.MkdirTemp("", "dockertest")
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{Socket: filepath.Join(folder, "docker.sock")}
	var output bytes.Buffer
	daemon := exec.Command("dockerd",
		"--data-root", filepath.Join(folder, "data"), "--exec-root", filepath.Join(folder, "exec"),
		"--pidfile", filepath.Join(folder, "docker.pid"), "--host", "unix://"+e.Socket,
		"--bridge", "none", "--iptables=false", "--ip6tables=false", "--storage-driver", "vfs", "--log-level", "warn")
	daemon.Stdout, daemon.Stderr = &output, &output
	daemon.WaitDelay = 5 * time.Second
	if err := daemon.Start(); err != nil {
		t.Fatalf("start dockerd: %v", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	t.Cleanup(func() {
		if ids := strings.Fields(e.try("ps", "-aq")); len(ids) > 0 {
			e.try(append([]string{"rm", "-f"}, ids...)...)
		}
		daemon.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			daemon.Process.Kill()
			<-ended
		}
		if err := os.RemoveAll(folder); err != nil {
			t.Logf("remove %s: %v", folder, err)
		}
	})
	for deadline := time.Now().Add(60 * time.Second); e.try("version", "--format", "{{.Server.APIVersion}}") == ""; {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("dockerd ended: %v\n%s", err, output.String())
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("dockerd does not answer after 60 s")
		}
	}
	e.Import(t, Image)
	return e
}

// Import makes an image of the static busybox. changes are Dockerfile lines
// such as "USER 1000".
func (e *Engine) Import(t testing.TB, name string, changes ...string) {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		missing(t, "busybox")
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	add := func(header *tar.Header, data []byte) {
		if err := w.WriteHeader(header); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	add(&tar.Header{Name: "bin/", Typeflag: tar.TypeDir, Mode: 0o755}, nil)
	add(&tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))}, program)
	for _, applet := range []string{"sh", "sleep", "cat", "id", "true"} {
		add(&tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	arguments := []string{"import"}
	for _, change := range changes {
		arguments = append(arguments, "--change", change)
	}
	command := e.command(append(arguments, "-", name)...)
	command.Stdin = &archive
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("docker import %s: %v\n%s", name, err, output)
	}
}

// Container is one running container.
type Container struct {
	ID  string // 64 hex digits
	PID uint32 // of its first process, on the host
}

// Run starts a container: docker run --detach --network none ARGUMENTS….
func (e *Engine) Run(t testing.TB, arguments ...string) Container {
	t.Helper()
	id := strings.TrimSpace(e.Docker(t, append([]string{"run", "--detach", "--network", "none"}, arguments...)...))
	var inspected []struct{ State struct{ Pid uint32 } }
	if err := json.Unmarshal([]byte(e.Docker(t, "inspect", id)), &inspected); err != nil || len(inspected) != 1 {
		t.Fatalf("docker inspect %s: %v", id, err)
	}
	if inspected[0].State.Pid == 0 {
		t.Fatalf("container %s does not run: %s", id, e.try("logs", id))
	}
	return Container{ID: id, PID: inspected[0].State.Pid}
}

// Docker runs the docker command against the engine and returns its output.
func (e *Engine) Docker(t testing.TB, arguments ...string) string {
	t.Helper()
	output, err := e.command(arguments...).Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("docker %s: %v\n%s", strings.Join(arguments, " "), err, exit.Stderr)
		}
		t.Fatalf("docker %s: %v", strings.Join(arguments, " "), err)
	}
	return string(output)
}

// try is Docker for what may fail; it then returns "".
func (e *Engine) try(arguments ...string) string {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	command := exec.CommandContext(ctx, "docker", append([]string{"--host", "unix://" + e.Socket}, arguments...)...)
	output, err := command.Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(output))
}

func (e *Engine) command(arguments ...string) *exec.Cmd {
	return exec.Command("docker", append([]string{"--host", "unix://" + e.Socket}, arguments...)...)
}

func missing(t testing.TB, what string) {
	t.Helper()
	if strict, _ := strconv.ParseBool(os.Getenv("CI")); strict {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}
