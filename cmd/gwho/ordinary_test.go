package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpuledger/lab/labtest"
)

// ordinaryUID is a user without rights and without a name.
const ordinaryUID = 61234

// TestOrdinaryUser runs gwho as somebody who may do nothing, with an exporter
// and without.
func TestOrdinaryUser(t *testing.T) {
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root, to become somebody else")
	}
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	// Where tests keep their things others may not go.
	program, library := filepath.Join(dir, "gwho"), filepath.Join(dir, "libnvidia-ml.so.1")
	built, err := exec.LookPath("gwho")
	if err != nil {
		t.Fatal(err)
	}
	for to, from := range map[string]string{program: built, library: labtest.BuildLibrary(t)} {
		content, err := os.ReadFile(from)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, content, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	as := &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: ordinaryUID, Gid: ordinaryUID}, Pdeathsig: syscall.SIGKILL}
	own := exec.Command("sleep", "1000")
	own.SysProcAttr = as
	roots := exec.Command("sleep", "1000")
	for _, p := range []*exec.Cmd{own, roots} {
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Process.Kill(); _ = p.Wait() })
	}
	scenario := filepath.Join(dir, "scenario")
	if err := os.WriteFile(scenario, fmt.Appendf(nil, `driver 550.54.15
gpu 0 uuid=GPU-11111111-1111-1111-1111-111111111111 name="NVIDIA H200" mem_total_mib=143771 mem_used_mib=9000
proc 0 pid=%d type=C mem_mib=4096 sm=60
proc 0 pid=%d type=C mem_mib=2048 sm=10
`, own.Process.Pid, roots.Process.Pid), 0o644); err != nil {
		t.Fatal(err)
	}
	gwho := func(arguments ...string) (string, int) {
		command := exec.Command(program, arguments...)
		command.Dir, command.SysProcAttr = dir, as
		command.Env = append(os.Environ(), "GPULAB_SCENARIO="+scenario, "HOME=/nonexistent")
		output, err := command.CombinedOutput()
		var ended *exec.ExitError
		if err != nil && !errors.As(err, &ended) {
			t.Fatalf("%v\n%s", err, output)
		}
		return string(output), command.ProcessState.ExitCode()
	}
	socket := filepath.Join(dir, "s")
	exporterAt(t, socket, "good")
	for _, arguments := range [][]string{{"-v"}, {"--json"}, {"--free"}, {"--idle"}, {"alice"}} {
		output, code := gwho(append(arguments, "--socket", socket)...)
		if code != exitOK || strings.Contains(output, "of-") {
			t.Errorf("%q ends with %d:\n%s", arguments, code, output)
		}
	}
	if output, _ := gwho("--json", "--socket", socket); !strings.Contains(output, fmt.Sprintf(`"viewer_uid": %d`, ordinaryUID)) {
		t.Errorf("the kernel does not say who asks:\n%s", output)
	}

	output, code := gwho("-v", "--socket", "", "--nvml.library-path", library)
	for _, want := range []string{fmt.Sprintf("uid:%d ", ordinaryUID), "$ sleep 1000", " sleep ", "  4.0 GiB  "} {
		if !strings.Contains(output, want) {
			t.Errorf("without an exporter there is no %q:\n%s", want, output)
		}
	}
	if strings.Count(output, "$ sleep 1000") != 1 {
		t.Errorf("somebody else's command line is shown:\n%s", output)
	}
	if missing := strings.Contains(output, "\n! "); missing != (code == exitMissing) || !missing && code != exitOK {
		t.Errorf("code %d:\n%s", code, output)
	}
	t.Logf("without an exporter, code %d:\n%s", code, output)
}
