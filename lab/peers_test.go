package lab_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// peerScenario shows this test's own PID, which the peers look up in /proc.
func peerScenario(t *testing.T) string {
	t.Helper()
	return labtest.Write(t, lab.Scenario{
		Epoch: began(),
		GPUs: []lab.GPU{
			{Name: "NVIDIA H200", Values: lab.Values{lab.TemperatureC: 61, lab.MemoryTotalMiB: 143771}},
			{Name: "NVIDIA A30", Values: lab.Values{lab.UtilizationPercent: 90, lab.TemperatureC: 52}},
		},
		Processes: []lab.Process{
			{GPU: 0, PID: uint32(os.Getpid()), MemoryBytes: 4096 << 20, SM: 60},
			{GPU: 1, PID: uint32(os.Getppid()), MemoryBytes: 100 << 20, SM: 40, Type: lab.Graphics},
		},
	})
}

func need(t *testing.T, tools ...string) {
	t.Helper()
	for _, tool := range tools {
		if _, err := exec.LookPath(tool); err != nil {
			labtest.Missing(t, tool+" (lab/setup-peers.sh installs it)")
		}
	}
}

func contains(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("%q is not in\n%s", w, text)
		}
	}
}

func peerWants() []string {
	return []string{"NVIDIA H200", "NVIDIA A30", fmt.Sprint(os.Getpid()), fmt.Sprint(os.Getppid()), "61", "52"}
}

// gpustat and nvtop know nothing of this library: that they run on it, as
// distributed, says that its binary interface is NVML's.
func TestGpustat(t *testing.T) {
	need(t, "gpustat")
	cmd := exec.Command("gpustat", "-cpu", "--no-color")
	cmd.Env = labtest.Environ(labtest.BuildLibrary(t), peerScenario(t))
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	contains(t, string(out), append(peerWants(), "4096M", "143771 MB")...)
}

func TestNvtop(t *testing.T) {
	need(t, "nvtop", "tmux")
	// nvtop 3.0 has no snapshot mode: it is given a terminal.
	socket := filepath.Join(t.TempDir(), "tmux")
	env := append(labtest.Environ(labtest.BuildLibrary(t), peerScenario(t)), "TERM=xterm", "HOME="+t.TempDir())
	tmux := func(args ...string) (string, error) {
		cmd := exec.Command("tmux", append([]string{"-f", "/dev/null", "-S", socket}, args...)...)
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := tmux("new-session", "-d", "-x", "200", "-y", "40", "nvtop"); err != nil {
		t.Fatalf("tmux: %v\n%s", err, out)
	}
	defer func() { _, _ = tmux("kill-server") }()
	var screen string
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(200 * time.Millisecond) {
		screen, _ = tmux("capture-pane", "-p")
		if strings.Contains(screen, "4096MiB") && strings.Contains(screen, "100MiB") {
			break
		}
	}
	contains(t, screen, append(peerWants(), "4096MiB", "100MiB")...)
}
