package server

import (
	"archive/tar"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// image is the name of the workers' container image.
const image = "gpu-lab-worker:latest"

// docker runs workers in containers of a Docker daemon, through its own client.
type docker struct {
	host string
}

func (d docker) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "docker", append([]string{"--host", d.host}, args...)...)
}

// load makes an image out of the worker program alone: no registry is asked.
func (d docker) load(ctx context.Context, program string) error {
	f, err := elf.Open(program)
	if err != nil {
		return fmt.Errorf("container image: %w", err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return fmt.Errorf("container image: %s is dynamically linked and would not start alone; build gpu-lab with CGO_ENABLED=0, or leave --docker-host out", program)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	cmd := d.command(ctx, "import", "-", image)
	reader, writer := io.Pipe()
	cmd.Stdin = reader
	go func() { writer.CloseWithError(writeRootfs(writer, program)) }()
	out, err := cmd.CombinedOutput()
	reader.CloseWithError(io.ErrClosedPipe)
	if err != nil {
		return fmt.Errorf("docker import on %s: %w: %s", d.host, err, strings.TrimSpace(string(out)))
	}
	return nil
}

func writeRootfs(w io.Writer, program string) error {
	f, err := os.Open(program)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	if err := t.WriteHeader(&tar.Header{Name: "gpu-lab", Mode: 0o755, Size: st.Size(), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	if _, err := io.Copy(t, f); err != nil {
		return err
	}
	return t.Close()
}

// run is the client process of a container that ends with its standard input.
func (d docker) run(container string, w Workload) *exec.Cmd {
	args := []string{"run", "--interactive", "--rm", "--network", "none", "--name", container, "--user", fmt.Sprintf("%d:%d", w.UID, w.UID)}
	if w.Owner != "" {
		args = append(args, "--label", "owner="+w.Owner)
	}
	return d.command(context.Background(), append(args, image, "/gpu-lab", "worker", "--name", w.Command)...)
}

// free says that no container has the name yet: one that has is not ours.
func (d docker) free(ctx context.Context, container string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := d.command(ctx, "container", "inspect", container).Run(); err == nil {
		return fmt.Errorf("container %s exists already on %s: remove it (docker rm --force %s) or stop the lab that runs it", container, d.host, container)
	}
	return nil
}

// pid waits for the container's first process and returns its PID on the host.
// It gives up when gone is closed, which is when the client has ended.
func (d docker) pid(ctx context.Context, container string, gone <-chan struct{}) (int, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		out, err := d.command(ctx, "inspect", "--format", "{{.State.Pid}}", container).Output()
		if pid, parseErr := strconv.Atoi(strings.TrimSpace(string(out))); err == nil && parseErr == nil && pid > 0 {
			return pid, nil
		}
		select {
		case <-gone:
			return 0, fmt.Errorf("container %s on %s did not start", container, d.host)
		case <-ctx.Done():
			return 0, fmt.Errorf("container %s on %s did not start: %w", container, d.host, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// remove ends a container that is still there.
func (d docker) remove(container string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := d.command(ctx, "rm", "--force", container).CombinedOutput()
	if err != nil && !strings.Contains(string(out), "No such container") && !strings.Contains(string(out), "already in progress") {
		return errors.Join(fmt.Errorf("docker rm %s: %s", container, strings.TrimSpace(string(out))), err)
	}
	return nil
}
