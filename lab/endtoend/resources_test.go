package endtoend

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// TestResourcesBesideTheCards has somebody's process hold two cards while its
// child, which holds none, keeps a core busy, and wants both counted once.
func TestResourcesBesideTheCards(t *testing.T) {
	const uid = 4721
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root, to run processes of other users")
	}
	command := exec.Command("sh", "-c", "(while :; do :; done) & wait")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-command.Process.Pid, syscall.SIGKILL) // the child too
		_ = command.Wait()
	})
	pid := uint32(command.Process.Pid)
	n := newNode(t, "loader", lab.Scenario{
		GPUs:      []lab.GPU{{}, {}},
		Processes: []lab.Process{{GPU: 0, PID: pid, MemoryBytes: 1 << 30}, {GPU: 1, PID: pid, MemoryBytes: 1 << 30}},
	})
	n.start()
	labels := `{kind="host",user="uid:4721",workload=""}`
	value := func(name string) float64 {
		number, err := strconv.ParseFloat(n.metric(name+labels), 64)
		if err != nil {
			return -1
		}
		return number
	}
	await(t, "CPU time of the child", func() bool { return value("gpu_workload_cpu_seconds_total") > 0.5 })
	if bytes := value("gpu_workload_resident_memory_bytes"); bytes < 4096 || bytes > 1<<30 {
		t.Errorf("two shells are said to be %v bytes", bytes)
	}
	for _, name := range []string{"gpu_workload_read_bytes_total", "gpu_workload_written_bytes_total"} {
		if value(name) < 0 {
			t.Errorf("%s is absent", name)
		}
	}
	count := 0
	for line := range strings.Lines(n.get("/metrics")) {
		if strings.HasPrefix(line, "gpu_workload_cpu_seconds_total{") {
			count++
		}
	}
	if count != 1 {
		t.Errorf("%d series of CPU time, want one for the workload on two cards", count)
	}
	answer, code := n.gwho()
	if code != 0 {
		t.Errorf("gwho ended with %d: %+v", code, answer.Missing)
	}
	for _, card := range answer.Cards {
		for _, device := range card.Devices {
			if len(device.Holders) != 1 || device.Holders[0].Resources == nil {
				t.Fatalf("card %d: %+v", card.Index, device.Holders)
			}
			// One busy core, however many others want it at the moment.
			if percent := device.Holders[0].Resources.CPUPercent; percent == nil || *percent < 5 || *percent > 110 {
				t.Errorf("card %d: CPU %v percent, want about one core", card.Index, percent)
			}
		}
	}
	n.exporter.stop(t)
}
