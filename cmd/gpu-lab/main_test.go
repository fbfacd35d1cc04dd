package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/lab/labtest"
)

// build makes the program as it is shipped: static, so that it can be a
// container's only file.
func build(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "gpu-lab")
	cmd := exec.Command("go", "build", "-o", program, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return program
}

// until polls a condition.
func until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within 30 s", what)
		}
	}
}

// up starts the server and waits until it says that it is ready.
func up(t *testing.T, program string, args ...string) (*exec.Cmd, string) {
	t.Helper()
	state := t.TempDir()
	// Folders above must let other users in.
	for dir := state; strings.HasPrefix(dir, os.TempDir()+"/"); dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(program, append([]string{"up", "--state", state, "--users", "alice:41001,bob:41002,carol:41003"}, args...)...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil || !strings.HasPrefix(line, "export GPULAB_SCENARIO=") {
		t.Fatalf("up said %q, %v", line, err)
	}
	return cmd, filepath.Join(state, "scenario")
}

var procLine = regexp.MustCompile(`(?m)^proc \d+ pid=(\d+).*$`)

// listed are the PIDs that a scenario has and that have not ended.
func listed(t *testing.T, scenario string) []int {
	t.Helper()
	text, err := os.ReadFile(scenario)
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, m := range procLine.FindAllStringSubmatch(string(text), -1) {
		if !strings.Contains(m[0], " to=") {
			pid, _ := strconv.Atoi(m[1])
			pids = append(pids, pid)
		}
	}
	return pids
}

func read(pid int, file string) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, file))
	return string(text)
}

func alive(pid int) bool { return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

func TestUp(t *testing.T) {
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root")
	}
	cmd, scenario := up(t, build(t))
	pids := listed(t, scenario)
	if len(pids) < 5 {
		t.Fatalf("%d processes listed", len(pids))
	}
	until(t, "train.py takes its name", func() bool { return read(pids[0], "comm") == "train.py\n" })
	if status := read(pids[0], "status"); !strings.Contains(status, "Uid:\t41001\t41001\t41001\t41001") {
		t.Errorf("train.py's status:\n%s", status)
	}
	if text := read(pids[0], "cgroup"); !strings.Contains(text, ":/user.slice/user-41001.slice/session-1.scope") {
		t.Errorf("train.py's cgroups:\n%s", text)
	}
	if text := read(pids[2], "cgroup"); !strings.Contains(text, ":/system.slice/ollama.service") {
		t.Errorf("ollama's cgroups:\n%s", text)
	}
	// A process that someone ends leaves the lists, the others stay.
	if err := syscall.Kill(pids[1], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	until(t, "the killed process is off the list", func() bool {
		now := listed(t, scenario)
		return len(now) > 0 && now[0] == pids[0] && (len(now) < 2 || now[1] != pids[1])
	})
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
	if left := listed(t, scenario); len(left) != 0 {
		t.Errorf("%v are still listed", left)
	}
	for _, pid := range pids {
		if alive(pid) {
			t.Errorf("process %d lives on", pid)
		}
	}
	noCgroups(t)
}

// Workers end with whoever started them, even if that gets no chance to tell.
func TestWorkersDieWithTheirParent(t *testing.T) {
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root")
	}
	program := build(t)
	cmd, scenario := up(t, program, "--mig", "--gpus", "3")
	pids := listed(t, scenario)
	if len(pids) < 7 {
		t.Errorf("%d processes listed", len(pids))
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	until(t, "all workers have ended", func() bool {
		for _, pid := range pids {
			// Nobody may be there to reap them: a zombie has ended.
			if alive(pid) && !strings.Contains(read(pid, "status"), "State:\tZ") {
				return false
			}
		}
		return true
	})
	// The next lab takes away the cgroups that the killed one left.
	cmd, _ = up(t, program, "--mig", "--gpus", "3", "--duration", "1ms")
	if err := cmd.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
	noCgroups(t)
}

func noCgroups(t *testing.T) {
	t.Helper()
	if found, _ := filepath.Glob("/sys/fs/cgroup/*/user.slice/user-4100*.slice"); len(found) > 0 {
		t.Errorf("left behind: %v", found)
	}
}

func TestUpWithDocker(t *testing.T) {
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root")
	}
	for _, tool := range []string{"docker", "dockerd"} {
		if _, err := exec.LookPath(tool); err != nil {
			labtest.Missing(t, tool)
		}
	}
	host := dockerd(t)
	cmd, scenario := up(t, build(t), "--docker-host", host)
	out, err := exec.Command("docker", "-H", host, "inspect", "-f", "{{.Id}} {{.State.Pid}} {{.Config.Labels.owner}}", "gpu-lab-finetune").Output()
	if err != nil {
		t.Fatal(err)
	}
	var id, owner string
	var pid int
	if _, err := fmt.Sscan(string(out), &id, &pid, &owner); err != nil || owner != "bob" {
		t.Fatalf("inspect: %s", out)
	}
	if pids := listed(t, scenario); pids[1] != pid {
		t.Errorf("listed %v, the container is %d", pids, pid)
	}
	if text := read(pid, "cgroup"); !strings.Contains(text, id) {
		t.Errorf("cgroups without the container's id:\n%s", text)
	}
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("up ended with %v", err)
	}
	noCgroups(t)
	if out, _ := exec.Command("docker", "-H", host, "ps", "-aq").Output(); len(bytes.TrimSpace(out)) > 0 {
		t.Errorf("containers left: %s", out)
	}
}

// dockerd runs a daemon on a socket of its own, without any network.
func dockerd(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "lab-dockerd")
	if err != nil {
		t.Fatal(err)
	}
	host := "unix://" + dir + "/s"
	var log bytes.Buffer
	cmd := exec.Command("dockerd", "--data-root", dir+"/d", "--exec-root", dir+"/e", "-H", host, "-p", dir+"/pid", "--bridge", "none", "--iptables=false", "--storage-driver", "vfs")
	cmd.Stdout, cmd.Stderr = &log, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			<-ended
		}
		_ = os.RemoveAll(dir)
	})
	until(t, "dockerd answers", func() bool {
		select {
		case err := <-ended:
			ended <- err
			t.Fatalf("dockerd: %v\n%s", err, log.String())
		default:
		}
		return exec.Command("docker", "-H", host, "info").Run() == nil
	})
	return host
}

func TestCommandLine(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		want string
	}{
		{[]string{"scenario"}, 0, "gpu 0 uuid="},
		{[]string{"--version"}, 0, "gpu-lab, version"},
		{[]string{"up", "--users", "alice"}, 1, "want NAME:UID"},
		{[]string{"up", "--users", "root:0"}, 1, "not a person"},
		{[]string{"up", "--gpus", "0"}, 1, "at least one"},
		{[]string{"up", "--nonsense"}, 1, "unknown flag"},
		{[]string{"nonsense"}, 1, "unknown command"},
	} {
		var out bytes.Buffer
		if code := run(context.Background(), c.args, &out, io.MultiWriter(&out)); code != c.code || !strings.Contains(out.String(), c.want) {
			t.Errorf("%v: exit %d\n%s", c.args, code, out.String())
		}
	}
}

// What the program prints as an example, the library takes.
func TestExampleLoads(t *testing.T) {
	program := build(t)
	text, err := exec.Command(program, "scenario").Output()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "scenario")
	if err := os.WriteFile(path, text, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath("gpustat"); err != nil {
		labtest.Missing(t, "gpustat (lab/setup-peers.sh installs it)")
	}
	cmd := exec.Command("gpustat", "--no-color")
	cmd.Env = labtest.Environ(labtest.BuildLibrary(t), path)
	out, err := cmd.CombinedOutput()
	if err != nil || strings.Count(string(out), "NVIDIA H200") != 3 {
		t.Errorf("%v\n%s", err, out)
	}
}
