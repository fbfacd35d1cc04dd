// Package containerdtest starts a real containerd with its CRI for a test, on a
// private socket and in private folders, without network, CNI or registry, and
// runs pods on it as a kubelet would.
package containerdtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/runtimes/cri"
	"gpuledger/lab/labtest"
)

// Image is the image that every engine holds: a static busybox, whose user is
// 1000 and whose command sleeps.
const Image = "docker.io/library/busybox:test"

// Engine is one containerd.
type Engine struct {
	// Socket is the path of its unix socket; its state is beside it.
	Socket string

	folder  string
	runtime criapi.RuntimeServiceClient
	images  criapi.ImageServiceClient
	daemon  *exec.Cmd
	ended   chan struct{}
	output  bytes.Buffer
}

// Start runs a containerd until the test ends. It needs root, containerd, ctr,
// runc and busybox-static; without them the test is skipped, or fails if CI is
// true.
func Start(t testing.TB) *Engine {
	t.Helper()
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root")
	}
	for _, program := range []string{"containerd", "containerd-shim-runc-v2", "ctr", "runc", "busybox"} {
		if _, err := exec.LookPath(program); err != nil {
			labtest.Missing(t, program)
		}
	}
	// Not t.TempDir: its path may be too long for a unix socket, and it cannot
	// be removed before the shims have let go of their mounts.
	folder, err := os.MkdirTemp("", "containerdtest")
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{folder: folder, Socket: filepath.Join(folder, "state", "containerd.sock")}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
[grpc]
address = %q
[plugins."io.containerd.internal.v1.opt"]
path = %q
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = %q
restrict_oom_score_adj = true
disable_tcp_service = true
stream_server_port = "0"
[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "native"
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = %q
conf_dir = %q
`, filepath.Join(folder, "root"), filepath.Join(folder, "state"), e.Socket, filepath.Join(folder, "opt"), Image,
		filepath.Join(folder, "cni"), filepath.Join(folder, "cni"))
	if err := os.WriteFile(filepath.Join(folder, "config.toml"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	connection, err := cri.Dial(e.Socket)
	if err != nil {
		t.Fatal(err)
	}
	e.runtime, e.images = criapi.NewRuntimeServiceClient(connection), criapi.NewImageServiceClient(connection)
	t.Cleanup(func() {
		e.clean(t)
		connection.Close()
	})
	e.Up(t)
	archive := filepath.Join(folder, "image.tar")
	if err := os.WriteFile(archive, imageArchive(t), 0o600); err != nil {
		t.Fatal(err)
	}
	command := exec.Command("ctr", "--address", e.Socket, "--namespace", "k8s.io", "images", "import", "--snapshotter", "native", archive)
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("ctr images import: %v\n%s", err, output)
	}
	e.await(t, "the image", func(ctx context.Context) bool {
		answer, err := e.images.ImageStatus(ctx, &criapi.ImageStatusRequest{Image: &criapi.ImageSpec{Image: Image}})
		return err == nil && answer.GetImage() != nil
	})
	return e
}

// Up starts containerd, again after Stop or Kill, and waits until its CRI
// answers.
func (e *Engine) Up(t testing.TB) {
	t.Helper()
	e.daemon = exec.Command("containerd", "--config", filepath.Join(e.folder, "config.toml"), "--log-level", "warn")
	e.daemon.Stdout, e.daemon.Stderr = &e.output, &e.output
	e.daemon.WaitDelay = time.Second // shims keep its output open
	e.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := e.daemon.Start(); err != nil {
		t.Fatalf("start containerd: %v", err)
	}
	ended := make(chan struct{})
	go func(daemon *exec.Cmd) { _ = daemon.Wait(); close(ended) }(e.daemon)
	e.ended = ended
	e.await(t, "containerd's CRI", func(ctx context.Context) bool {
		select {
		case <-ended:
			t.Fatalf("containerd ended:\n%s", e.output.String())
		default:
		}
		_, err := e.runtime.ListPodSandbox(ctx, &criapi.ListPodSandboxRequest{})
		return err == nil
	})
}

// Stop ends containerd as a restart does: its containers go on.
func (e *Engine) Stop(t testing.TB) { e.end(t, syscall.SIGTERM) }

// Kill ends containerd without warning: its containers go on.
func (e *Engine) Kill(t testing.TB) { e.end(t, syscall.SIGKILL) }

func (e *Engine) end(t testing.TB, signal syscall.Signal) {
	t.Helper()
	_ = e.daemon.Process.Signal(signal) // it may have ended
	select {
	case <-e.ended:
	case <-time.After(20 * time.Second):
		_ = e.daemon.Process.Kill()
		<-e.ended
		t.Error("containerd did not end within 20 s")
	}
}

// Freeze stops containerd where it is: its socket takes connections and nobody
// answers. Thaw lets it go on.
func (e *Engine) Freeze(t testing.TB) { e.signal(t, syscall.SIGSTOP) }

// Thaw ends Freeze.
func (e *Engine) Thaw(t testing.TB) { e.signal(t, syscall.SIGCONT) }

func (e *Engine) signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	if err := e.daemon.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
}

func (e *Engine) await(t testing.TB, what string, done func(context.Context) bool) {
	t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		ok := done(ctx)
		cancel()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within a minute\n%s", what, e.output.String())
		}
	}
}

// clean removes all pods, ends containerd and whatever shims are left.
func (e *Engine) clean(t testing.TB) {
	if e.daemon == nil || e.daemon.Process == nil {
		return
	}
	_ = e.daemon.Process.Signal(syscall.SIGCONT)
	select {
	case <-e.ended:
		e.Up(t) // only it can end its containers in good order
	default:
	}
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	if pods, err := e.runtime.ListPodSandbox(ctx, &criapi.ListPodSandboxRequest{}); err == nil {
		for _, pod := range pods.GetItems() {
			_, err := e.runtime.StopPodSandbox(ctx, &criapi.StopPodSandboxRequest{PodSandboxId: pod.GetId()})
			_, removeErr := e.runtime.RemovePodSandbox(ctx, &criapi.RemovePodSandboxRequest{PodSandboxId: pod.GetId()})
			if err := errors.Join(err, removeErr); err != nil {
				t.Logf("remove pod %s: %v", pod.GetId(), err)
			}
			removeCgroups("pod" + pod.GetMetadata().GetUid())
		}
	}
	e.end(t, syscall.SIGTERM)
	for _, pid := range shims(e.Socket) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	if err := os.RemoveAll(e.folder); err != nil {
		t.Logf("remove %s: %v", e.folder, err)
	}
}

// removeCgroups removes what a kubelet would: a pod's own cgroups, and those
// around them if nobody else has any there.
func removeCgroups(pod string) {
	for _, name := range []string{"kubepods/burstable/" + pod, "kubepods/burstable", "kubepods"} {
		for _, place := range []string{"/sys/fs/cgroup/", "/sys/fs/cgroup/*/"} {
			found, _ := filepath.Glob(place + name)
			for _, directory := range found {
				_ = syscall.Rmdir(directory) // one in use refuses
			}
		}
	}
}

// shims are the processes that serve a containerd's containers and outlive it.
func shims(socket string) []int {
	var pids []int
	entries, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, entry := range entries {
		line, err := os.ReadFile(entry)
		if err != nil {
			continue
		}
		arguments := strings.Split(string(line), "\x00")
		if !strings.HasSuffix(arguments[0], "containerd-shim-runc-v2") {
			continue
		}
		for i, argument := range arguments[:len(arguments)-1] {
			var pid int
			if _, err := fmt.Sscanf(entry, "/proc/%d/", &pid); err == nil && argument == "-address" && arguments[i+1] == socket {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
