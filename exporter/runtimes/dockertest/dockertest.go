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
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Image is the image that every engine holds: a static busybox, without a
// user of its own.
const Image = "busybox:test"

// Engine is one dockerd.
type Engine struct {
	// Socket is the path of its unix socket.
	Socket string
	// DataRoot is where it keeps its containers.
	DataRoot string

	folder string
	flags  []string
	daemon *exec.Cmd
	ended  chan error
}

// Start runs a dockerd, with further flags of its own, until the test ends. It
// needs root, dockerd, docker and busybox-static; without them the test is
// skipped, or fails if CI is true.
func Start(t testing.TB, flags ...string) *Engine {
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
	e := &Engine{Socket: filepath.Join(folder, "docker.sock"), DataRoot: filepath.Join(folder, "data"), folder: folder, flags: flags}
	t.Cleanup(func() {
		if e.try("version") == "" {
			e.StartAgain(t) // to take the containers away
		}
		if ids := strings.Fields(e.try("ps", "-aq")); len(ids) > 0 {
			e.try(append([]string{"rm", "-f"}, ids...)...)
		}
		e.Stop(t)
		e.unmount(t)
		if err := os.RemoveAll(folder); err != nil {
			t.Logf("remove %s: %v", folder, err)
		}
	})
	e.StartAgain(t)
	e.Import(t, Image)
	return e
}

// StartAgain runs dockerd, which must not run, and waits until it answers.
func (e *Engine) StartAgain(t testing.TB) {
	t.Helper()
	// Not a pipe: what outlives a killed dockerd would keep that open.
	output, err := os.Create(filepath.Join(e.folder, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	e.daemon = exec.Command("dockerd", append([]string{
		"--data-root", e.DataRoot, "--exec-root", filepath.Join(e.folder, "exec"),
		"--pidfile", filepath.Join(e.folder, "docker.pid"), "--host", "unix://" + e.Socket,
		"--bridge", "none", "--iptables=false", "--ip6tables=false", "--storage-driver", "vfs", "--log-level", "warn"}, e.flags...)...)
	e.daemon.Stdout, e.daemon.Stderr = output, output
	if err := e.daemon.Start(); err != nil {
		t.Fatalf("start dockerd: %v", err)
	}
	daemon, ended := e.daemon, make(chan error, 1)
	e.ended = ended
	go func() { ended <- daemon.Wait() }()
	for deadline := time.Now().Add(60 * time.Second); e.try("version", "--format", "{{.Server.APIVersion}}") == ""; {
		select {
		case err := <-ended:
			ended <- err
			said, _ := os.ReadFile(output.Name())
			t.Fatalf("dockerd ended: %v\n%s", err, said)
		case <-time.After(100 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatal("dockerd does not answer after 60 s")
		}
	}
}

// unmount lets go of what a killed dockerd had mounted.
func (e *Engine) unmount(t testing.TB) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range slices.Backward(strings.Split(string(mounts), "\n")) {
		if fields := strings.Fields(line); len(fields) > 1 && strings.HasPrefix(fields[1], e.folder+"/") {
			if err := syscall.Unmount(fields[1], syscall.MNT_DETACH); err != nil {
				t.Logf("unmount %s: %v", fields[1], err)
			}
		}
	}
}

// Stop ends dockerd as a service manager does.
func (e *Engine) Stop(t testing.TB) {
	t.Helper()
	// It may have ended already; then there is nobody to signal.
	_ = e.daemon.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-e.ended:
		e.ended <- err
	case <-time.After(30 * time.Second):
		e.Kill(t)
	}
}

// Kill ends dockerd with SIGKILL. Its containers live on.
func (e *Engine) Kill(t testing.TB) {
	t.Helper()
	_ = e.daemon.Process.Kill() // it may have ended already
	e.ended <- <-e.ended
	// The next dockerd would take a containerd that is still dying for its own.
	pid, err := os.ReadFile(filepath.Join(e.folder, "exec", "containerd", "containerd.pid"))
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		stat, err := os.ReadFile("/proc/" + string(pid) + "/stat")
		if err != nil || !bytes.Contains(stat, []byte("(containerd)")) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("dockerd's containerd is still there: %s", stat)
		}
	}
}

// Import makes an image of the static busybox. changes are Dockerfile lines
// such as "USER 1000".
func (e *Engine) Import(t testing.TB, name string, changes ...string) {
	t.Helper()
	arguments := []string{"import"}
	for _, change := range changes {
		arguments = append(arguments, "--change", change)
	}
	command := e.command(append(arguments, "-", name)...)
	command.Stdin = RootFS(t)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("docker import %s: %v\n%s", name, err, output)
	}
}

// RootFS is a tar archive of a static busybox.
func RootFS(t testing.TB) *bytes.Buffer {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		missing(t, "busybox")
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	archive := &bytes.Buffer{}
	w := tar.NewWriter(archive)
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
	return archive
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
