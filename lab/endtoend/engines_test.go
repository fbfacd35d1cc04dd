package endtoend

import (
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/runtimes/dockertest"
	"gpuledger/exporter/runtimes/podmantest"
	"gpuledger/exporter/usage"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// enginesConfig is the configuration but for Docker's socket and data root, and
// Podman's socket and storage.
const enginesConfig = "runtimes: {docker: [%s], docker_data: [%s], podman: [%s], podman_run_root: %q, podman_graph_root: %q, cri: [], kubelet: []}\n"

func dockerConfig(socket, data string) string {
	return fmt.Sprintf(enginesConfig, socket, data, "", "", "")
}

func podmanConfig(socket, runRoot, graphRoot string) string {
	return fmt.Sprintf(enginesConfig, "", "", socket, runRoot, graphRoot)
}

// hasMetric reports whether a line of /metrics begins with name and has all parts.
func (n *node) hasMetric(name string, parts ...string) bool {
	n.t.Helper()
	for line := range strings.Lines(n.get("/metrics")) {
		found := strings.HasPrefix(line, name+"{")
		for _, part := range parts {
			found = found && strings.Contains(line, part)
		}
		if found {
			return true
		}
	}
	return false
}

// more waits for so many further seconds of a card to be metered.
func (n *node) more(card int, seconds float64) {
	n.t.Helper()
	before := n.metricNumber("gpu_metered_seconds_total", card)
	await(n.t, "further seconds are metered", func() bool { return n.metricNumber("gpu_metered_seconds_total", card) > before+seconds })
}

// TestContainersOfDocker has containers of a real dockerd on cards, and follows
// their names to gwho, /metrics and the journal while dockerd is stopped and
// killed, and while the exporter starts without it.
func TestContainersOfDocker(t *testing.T) {
	engine := dockertest.Start(t, "--live-restore", "--add-runtime", "nvidia=runc")
	engine.Import(t, "cuda:test", "ENV NVIDIA_VISIBLE_DEVICES=all")
	hostile := "\x1b]0;owned\a\u202e" + strings.Repeat("x", 10_000)
	train := engine.Run(t, "--name", "train", "--user", "4712", "--label", "gpuledger.project="+hostile, dockertest.Image, "sleep", "3600")
	engine.Run(t, "--name", "given", "--user", "4713", "--runtime", "nvidia", "--env", "NVIDIA_VISIBLE_DEVICES=1", "cuda:test", "sleep", "3600")
	engine.Run(t, "--name", "inherits", "--runtime", "nvidia", "cuda:test", "sleep", "3600")
	n := newNode(t, "docker", lab.Scenario{GPUs: one(t, lab.GPU{}, lab.GPU{}), Processes: []lab.Process{{PID: train.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = dockerConfig(engine.Socket, engine.DataRoot)
	n.start()
	const want, given = "uid:4712=docker:train", "[uid:4713=docker:given]"
	n.awaitHolding(0, want)
	n.awaitHolding(1, given)
	for _, parts := range [][]string{
		{"gpu_workload_info", `user="uid:4712"`, `kind="docker"`, `workload="train"`, `container_name="train"`, `container_id="` + train.ID + `"`, `image="` + dockertest.Image + `"`},
		{"gpu_workload_assigned", `workload="given"`, `user="uid:4713"`, "} 1"},
	} {
		await(t, strings.Join(parts, " "), func() bool { return n.hasMetric(parts[0], parts[1:]...) })
	}

	answer, _ := n.gwho()
	if one := answer.Cards[1].Devices[0].Holders[0]; one.PID != nil || one.Holds || one.StartedAt == nil || time.Since(*one.StartedAt) > time.Hour {
		t.Errorf("what is assigned: %+v", one)
	}
	if project := answer.Cards[0].Devices[0].Holders[0].Project; strings.ContainsAny(project, "\x1b\a\u202e") || !strings.Contains(project, "owned") || len(project) > 1100 {
		t.Errorf("a hostile label became the project %.80q of %d bytes", project, len(project))
	}
	if strings.ContainsAny(n.get("/metrics"), "\x1b\a\u202e") {
		t.Error("a hostile label is on /metrics as it is")
	}

	engine.Stop(t)
	n.more(0, 3)
	if got := n.holding(0) + n.holding(1); got != want+given {
		t.Errorf("while dockerd is stopped: %s", got)
	}
	engine.StartAgain(t)
	side := engine.Run(t, "--name", "side", "--user", "4712", dockertest.Image, "sleep", "3600")
	n.scenario.Processes = append(n.scenario.Processes, lab.Process{PID: side.PID, MemoryBytes: 1 << 30})
	n.write()
	n.awaitHolding(0, "uid:4712=docker:side "+want)
	n.scenario.Processes = n.scenario.Processes[:1]
	n.write()
	n.awaitHolding(0, want)

	engine.Kill(t)
	n.more(0, 5)
	if got := n.holding(0) + n.holding(1); got != want+given {
		t.Errorf("after dockerd was killed: %s", got)
	}
	n.exporter.stop(t)
	n.start()
	n.awaitHolding(0, want) // from the disk
	n.awaitHolding(1, given)
	engine.StartAgain(t)
	n.awaitHolding(0, want)
	n.awaitHolding(1, given)
	n.more(0, 2)
	n.exporter.stop(t)
	rows := n.rows()
	held := heldRows(rows, 0)
	if len(held) != 2 || held[want][0] == 0 || held["uid:4712=docker:side"][0] == 0 {
		t.Errorf("the journal has %v", held)
	}
	if held := heldRows(rows, 1); len(held) != 0 {
		t.Errorf("what is assigned holds %v", held)
	}
}

// nvidiaCard is a device file with the numbers of /dev/nvidiaN.
func nvidiaCard(t *testing.T, minor uint32) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "card")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(195, minor))); err != nil {
		labtest.Missing(t, "to make device files: "+err.Error())
	}
	return path
}

// TestContainersOfPodman does the same with Podman, whose containers need no
// service: without one the disk tells.
func TestContainersOfPodman(t *testing.T) {
	engine := podmantest.New(t)
	train := engine.Run(t, "--name", "train", "--label", "owner=nobody-here", "--user", "4712", podmantest.Image, "sleep", "3600")
	engine.Run(t, "--name", "given", "--device", nvidiaCard(t, 1)+":/dev/nvidia0", podmantest.Image, "sleep", "3600")
	n := newNode(t, "podman", lab.Scenario{GPUs: one(t, lab.GPU{}, lab.GPU{}), Processes: []lab.Process{{PID: train.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = podmanConfig(engine.Socket, engine.RunRoot, engine.GraphRoot)
	engine.StartService(t)
	n.start()
	const want, given = "uid:4712=podman:train", "[unattributed=podman:given]"
	n.awaitHolding(0, want)
	n.awaitHolding(1, given)
	info := []string{`user="uid:4712"`, `kind="podman"`, `workload="train"`, `container_name="train"`, `image="` + podmantest.Image + `"`}
	await(t, "the container's names are on /metrics", func() bool { return n.hasMetric("gpu_workload_info", info...) })
	if !n.hasMetric("gpu_workload_assigned", `workload="given"`, "} 1") {
		t.Error("what is assigned is not on /metrics")
	}

	engine.KillService(t)
	side := engine.Run(t, "--name", "side", podmantest.Image, "sleep", "3600")
	n.scenario.Processes = append(n.scenario.Processes, lab.Process{PID: side.PID, MemoryBytes: 1 << 30})
	n.write()
	n.awaitHolding(0, want+" unattributed=podman:side")
	n.scenario.Processes = n.scenario.Processes[:1]
	n.write()
	n.awaitHolding(0, want)
	engine.StartService(t)
	n.more(0, 3)
	if got := n.holding(0) + n.holding(1); got != want+given {
		t.Errorf("after the service came back: %s", got)
	}
	n.exporter.stop(t)
	rows := n.rows()
	held := heldRows(rows, 0)
	if len(held) != 2 || held[want][0] == 0 || held["unattributed=podman:side"][0] == 0 {
		t.Errorf("the journal has %v", held)
	}
	if held := heldRows(rows, 1); len(held) != 0 {
		t.Errorf("what is assigned holds %v", held)
	}
}

// TestNamesThatComeLate starts the exporter while Docker's socket is not there:
// what is committed under the id stays there, and later time goes to the name.
func TestNamesThatComeLate(t *testing.T) {
	engine := dockertest.Start(t)
	train := engine.Run(t, "--name", "train", "--user", "4712", dockertest.Image, "sleep", "3600")
	n := newNode(t, "late", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: train.PID, MemoryBytes: 8 << 30, SM: 30}}})
	socket := filepath.Join(n.dir, "docker.sock")
	n.config = dockerConfig(socket, "")
	n.start()
	byID := "unattributed=docker:" + train.ID[:12]
	n.awaitHolding(0, byID)
	series := `gpu_workload_held_seconds_total{gpu="0",kind="docker",user="unattributed",uuid="` + uuidOf(n) + `",workload="` + train.ID[:12] + `"}`
	await(t, "time under the id", func() bool { return n.metric(series) != "" && n.metric(series) != "0" })
	if err := os.Symlink(engine.Socket, socket); err != nil {
		t.Fatal(err)
	}
	const want = "uid:4712=docker:train"
	n.awaitHolding(0, want)
	then := n.metric(series)
	n.more(0, 3)
	if now := n.metric(series); now != then {
		// The interval at hand when the name came may have been whole already.
		then = now
		n.more(0, 3)
		if now := n.metric(series); now != then {
			t.Errorf("time under the id went from %s to %s after the name had come", then, now)
		}
	}
	n.exporter.stop(t)
	held := heldRows(n.rows(), 0)
	if len(held) != 2 || held[byID][0] == 0 || held[want][0] == 0 {
		t.Fatalf("the journal has %v", held)
	}
	seconds, _ := strconv.ParseFloat(then, 64)
	if journal := float64(held[byID][0]) / 1e6; math.Abs(journal-seconds) > 0.001 { // /metrics has milliseconds
		t.Errorf("the id held %v s in the journal, %v s on /metrics before the end", journal, seconds)
	}
}

// TestHungDockerSocket runs two exporters on the same cards and processes, one
// with a Docker that takes connections and never answers, one without Docker.
func TestHungDockerSocket(t *testing.T) {
	engine := dockertest.Start(t)
	train := engine.Run(t, "--name", "train", dockertest.Image, "sleep", "3600")
	host := work(t, 4713)
	scenario := lab.Scenario{Epoch: time.Now(), GPUs: one(t, lab.GPU{}, lab.GPU{}), Processes: []lab.Process{
		{PID: train.PID, MemoryBytes: 8 << 30, SM: 40}, {GPU: 1, PID: host.pid, MemoryBytes: 1 << 30},
	}}
	hung, without := newNode(t, "hung", scenario), newNode(t, "without", scenario)
	socket := filepath.Join(hung.dir, "docker.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	hung.config, without.config = dockerConfig(socket, ""), dockerConfig("", "")
	byID := "unattributed=docker:" + train.ID[:12]
	nodes := []*node{hung, without}
	var first [2]float64
	for _, n := range nodes {
		n.start()
		n.awaitHolding(1, "uid:4713=host:")
		n.awaitHolding(0, byID)
	}
	for i, n := range nodes {
		first[i] = n.metricNumber("gpu_metered_seconds_total", 0)
	}
	begun := time.Now()
	await(t, "twelve seconds", func() bool { return time.Since(begun) > 12*time.Second })
	for i, n := range nodes {
		if metered, clock := n.metricNumber("gpu_metered_seconds_total", 0)-first[i], time.Since(begun).Seconds(); metered < clock-2 {
			t.Errorf("%s: %.1f s of %.1f were metered", n.name, metered, clock)
		}
		for card := range 2 {
			if up := n.metricNumber("gpu_up", card); up != 1 {
				t.Errorf("%s: card %d is up: %v", n.name, card, up)
			}
		}
	}
	if up := hung.metric(`gpu_exporter_collector_success{collector="docker"}`); up != "0" {
		t.Errorf("collector docker is up: %q", up)
	}
	readings := func(n *node) string {
		var all []string
		for line := range strings.Lines(n.get("/metrics")) {
			for _, family := range []string{"gpu_memory_used_bytes{", "gpu_utilization_ratio{", "gpu_temperature_celsius{", "gpu_clock_hertz{"} {
				if strings.HasPrefix(line, family) {
					all = append(all, line)
				}
			}
		}
		return strings.Join(all, "")
	}
	if a, b := readings(hung), readings(without); a != b || !strings.Contains(a, "gpu_memory_used_bytes") {
		t.Errorf("readings with the hung socket:\n%s\nand without:\n%s", a, b)
	}
	for _, n := range nodes {
		n.exporter.stop(t)
		for card := range 2 {
			var all, unattributed int64
			for _, row := range n.rows() {
				if row.Index == card {
					all += row.GPUUS
					if row.State == usage.StateHeld && row.Workload == train.ID[:12] {
						unattributed += row.GPUUS
					}
				}
			}
			if all == 0 || card == 0 && unattributed != all {
				t.Errorf("%s: card %d: %d µs of %d are the container's", n.name, card, unattributed, all)
			}
		}
	}
}

// TestContainersOfAPersonsPodman has a container of a real rootless Podman on a
// card: its name comes from that person's own service, found below /run/user,
// and without one from the container's conmon.
func TestContainersOfAPersonsPodman(t *testing.T) {
	engine := podmantest.NewRootless(t)
	train := engine.Run(t, "--name", "train", podmantest.Image, "sleep", "3600")
	// Podman would ask the person's systemd for this place.
	intoCgroup(t, train.PID, fmt.Sprintf("user.slice/user-%d.slice/user@%d.service/user.slice/libpod-%s.scope/container",
		podmantest.PersonUID, podmantest.PersonUID, train.ID))
	n := newNode(t, "personal", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: train.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = podmanConfig("", "", "")
	engine.StartService(t)
	n.start()
	const want = podmantest.Person + "=podman:train"
	n.awaitHolding(0, want)
	image := []string{`workload="train"`, `image="` + podmantest.Image + `"`}
	await(t, "the service tells the image", func() bool { return n.hasMetric("gpu_workload_info", image...) })
	n.exporter.stop(t)

	engine.KillService(t)
	n.start()
	n.awaitHolding(0, want)
	if n.hasMetric("gpu_workload_info", image...) {
		t.Error("the image is known, and nothing can have told it")
	}
	n.exporter.stop(t)
	if held := heldRows(n.rows(), 0); len(held) != 1 || held[want][0] == 0 {
		t.Errorf("the journal has %v", held)
	}
}

// intoCgroup moves a process to a place in the unified hierarchy, which goes
// with the test.
func intoCgroup(t *testing.T, pid uint32, path string) {
	t.Helper()
	root := ""
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[2] == "cgroup2" {
			root = fields[1]
		}
	}
	if root == "" {
		labtest.Missing(t, "a cgroup2 file system")
	}
	write := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(int(pid))), 0o644)
	}
	dir := root
	for part := range strings.SplitSeq(path, "/") {
		dir = filepath.Join(dir, part)
		switch err := os.Mkdir(dir, 0o755); {
		case err == nil:
			made := dir
			t.Cleanup(func() {
				_ = write(root) // the process may still be there
				if err := os.Remove(made); err != nil {
					t.Error(err)
				}
			})
		case !errors.Is(err, os.ErrExist):
			t.Fatal(err)
		}
	}
	if err := write(dir); err != nil {
		labtest.Missing(t, "to move processes between cgroups: "+err.Error())
	}
}
