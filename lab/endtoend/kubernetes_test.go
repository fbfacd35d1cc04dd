package endtoend

import (
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/runtimes/cri/containerdtest"
	"gpuledger/exporter/runtimes/kubelet/kubelettest"
	"gpuledger/exporter/usage"
	"gpuledger/lab"
)

// podConfig is the configuration but for the sockets of an engine and a kubelet.
const podConfig = "runtimes: {docker: [], cri: [%q], kubelet: [%q]}\nowner: {namespace_users: [{namespace: vision, user: \"uid:4731\"}]}\n"

// holding are the holders of a card as gwho --json has them: user, kind and
// workload, in brackets those without a process.
func (n *node) holding(card int) string {
	n.t.Helper()
	answer, _ := n.gwho()
	var all []string
	for _, holder := range answer.Cards[card].Devices[0].Holders {
		one := holder.User + "=" + holder.Kind + ":" + holder.Workload
		if holder.Pending {
			one += "?"
		}
		if holder.Assigned {
			one = "[" + one + "]"
		}
		all = append(all, one)
	}
	return strings.Join(all, " ")
}

func (n *node) awaitHolding(card int, want string) {
	n.t.Helper()
	got := ""
	defer func() {
		if n.t.Failed() {
			n.t.Logf("card %d: %q, want %q", card, got, want)
		}
	}()
	await(n.t, "on a card: "+want, func() bool { got = n.holding(card); return got == want })
}

// metricNumber is the value of a card's series, 0 if it has none.
func (n *node) metricNumber(name string, card int) float64 {
	n.t.Helper()
	for line := range strings.Lines(n.get("/metrics")) {
		if strings.HasPrefix(line, fmt.Sprintf("%s{gpu=\"%d\",", name, card)) {
			number, _ := strconv.ParseFloat(strings.TrimSpace(line[strings.LastIndexByte(line, ' '):]), 64)
			return number
		}
	}
	return 0
}

// heldRows are the journal's rows of a card by workload: what it held, and what
// of that was reserved, in µs.
func heldRows(rows []usage.Row, card int) map[string][2]int64 {
	held := map[string][2]int64{}
	for _, row := range rows {
		if row.Index == card && row.State == usage.StateHeld {
			key := row.User + "=" + row.Kind + ":" + row.Workload
			sum := held[key]
			held[key] = [2]int64{sum[0] + row.HeldUS, sum[1] + row.ReservedUS}
		}
	}
	return held
}

// TestPodsOfContainerd has a real process in a pod of a real containerd on a
// card, and follows its name to gwho, /metrics and the journal while containerd
// is restarted and killed.
func TestPodsOfContainerd(t *testing.T) {
	engine := containerdtest.Start(t)
	pod := engine.RunPod(t, "vision", "train-0", nil)
	main := pod.Run(t, "main", 4712)
	n := newNode(t, "pods", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: main.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = fmt.Sprintf(podConfig, engine.Socket, filepath.Join(n.dir, "no-kubelet.sock"))
	n.start()
	const want = "uid:4731=kubernetes:vision/train-0/main"
	n.awaitHolding(0, want)
	check := func(when string) {
		t.Helper()
		info := ""
		for line := range strings.Lines(n.get("/metrics")) {
			if strings.HasPrefix(line, "gpu_workload_info{") {
				info += line
			}
		}
		for _, label := range []string{
			`pod_namespace="vision"`, `pod_name="train-0"`, `kind="kubernetes"`, `workload="vision/train-0/main"`, `user="uid:4731"`,
			`container_name="main"`, `image="` + containerdtest.Image + `"`,
		} {
			if !strings.Contains(info, label) {
				t.Errorf("%s: gpu_workload_info lacks %s: %s", when, label, info)
			}
		}
		if strings.Count(info, "\n") != 1 {
			t.Errorf("%s: one workload is several: %s", when, info)
		}
	}
	check("at first")
	engine.Stop(t)
	engine.Up(t)
	side := pod.Run(t, "side", 4712)
	n.scenario.Processes = append(n.scenario.Processes, lab.Process{PID: side.PID, MemoryBytes: 1 << 30})
	n.write()
	n.awaitHolding(0, want+" uid:4731=kubernetes:vision/train-0/side")
	n.scenario.Processes = n.scenario.Processes[:1]
	n.write()
	n.awaitHolding(0, want)
	engine.Kill(t)
	before := n.metricNumber("gpu_metered_seconds_total", 0)
	await(t, "five seconds more", func() bool { return n.metricNumber("gpu_metered_seconds_total", 0) > before+5 })
	if got := n.holding(0); got != want {
		t.Errorf("after containerd was killed: %s", got)
	}
	engine.Up(t)
	n.awaitHolding(0, want)
	n.exporter.stop(t)
	held := heldRows(n.rows(), 0)
	if len(held) != 2 || held[want][0] == 0 || held["uid:4731=kubernetes:vision/train-0/side"][0] == 0 {
		t.Errorf("the journal has %v", held)
	}
}

// TestPodNamesThatComeLate starts the exporter while containerd hangs, and with
// nothing on disk that tells: what is committed under the id stays there, and
// later time goes to the name.
func TestPodNamesThatComeLate(t *testing.T) {
	engine := containerdtest.Start(t)
	main := engine.RunPod(t, "vision", "late-0", nil).Run(t, "main", 4712)
	// Another socket in front of the engine's: the state beside it is empty.
	folder, err := os.MkdirTemp("", "late")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	front := filepath.Join(folder, "s")
	if err := os.Symlink(engine.Socket, front); err != nil {
		t.Fatal(err)
	}
	engine.Freeze(t)
	n := newNode(t, "late", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: main.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = fmt.Sprintf(podConfig, front, filepath.Join(n.dir, "no-kubelet.sock"))
	n.start()
	byID := "unattributed=kubernetes:" + main.ID[:12]
	n.awaitHolding(0, byID)
	series := `gpu_workload_held_seconds_total{gpu="0",kind="kubernetes",user="unattributed",uuid="` + uuidOf(n) + `",workload="` + main.ID[:12] + `"}`
	await(t, "time under the id", func() bool { return n.metric(series) != "" && n.metric(series) != "0" })
	engine.Thaw(t)
	const want = "uid:4731=kubernetes:vision/late-0/main"
	n.awaitHolding(0, want)
	var then string
	await(t, "the id's last second", func() bool {
		before := n.metric(series)
		time.Sleep(1500 * time.Millisecond) // more than an interval: had it gone on, it had grown
		then = n.metric(series)
		return then == before
	})
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

// TestHungCRISocket: a socket that takes connections and never answers costs
// names only, and those not even where the disk tells.
func TestHungCRISocket(t *testing.T) {
	engine := containerdtest.Start(t)
	main := engine.RunPod(t, "vision", "hung-0", nil).Run(t, "main", 4712)
	engine.Freeze(t)
	defer engine.Thaw(t)
	host := work(t, 4713)
	n := newNode(t, "hung", lab.Scenario{GPUs: one(t, lab.GPU{}, lab.GPU{}), Processes: []lab.Process{
		{PID: main.PID, MemoryBytes: 8 << 30}, {GPU: 1, PID: host.pid, MemoryBytes: 1 << 30},
	}})
	hungKubelet := filepath.Join(n.dir, "kubelet.sock")
	listener, err := net.Listen("unix", hungKubelet)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	n.config = fmt.Sprintf(podConfig, engine.Socket, hungKubelet)
	n.start()
	n.awaitHolding(1, "uid:4713=host:")
	n.awaitHolding(0, "uid:4731=kubernetes:vision/hung-0/main")
	first := n.metricNumber("gpu_metered_seconds_total", 1)
	begun := time.Now()
	await(t, "ten seconds", func() bool { return time.Since(begun) > 10*time.Second })
	if metered, clock := n.metricNumber("gpu_metered_seconds_total", 1)-first, time.Since(begun).Seconds(); metered < clock-2 {
		t.Errorf("%.1f s of %.1f were metered", metered, clock)
	}
	for _, collector := range []string{"cri", "kubelet"} {
		if up := n.metric(`gpu_exporter_collector_success{collector="` + collector + `"}`); up != "0" {
			t.Errorf("collector %s is up: %q", collector, up)
		}
	}
	n.exporter.stop(t)
}

// TestPodsHoldWithoutProcess gives cards to pods as a kubelet does.
func TestPodsHoldWithoutProcess(t *testing.T) {
	engine := containerdtest.Start(t)
	kubelet := kubelettest.Start(t)
	n := newNode(t, "given", lab.Scenario{GPUs: []lab.GPU{{}, {}, {}}})
	n.config = fmt.Sprintf(podConfig, engine.Socket, kubelet.Socket)
	n.start()
	answer, _ := n.gwho()
	uuid := func(card int) string { return answer.Cards[card].UUID }
	pod := engine.RunPod(t, "vision", "train-0", nil)
	main := pod.Run(t, "main", 4712)
	kubelet.Give(
		kubelettest.Pod("vision", "train-0", "main", "nvidia.com/gpu", uuid(0)),
		kubelettest.Pod("batch", "wait-0", "main", "nvidia.com/gpu", uuid(1)), // no container yet
		kubelettest.Pod("web", "a", "infer", "nvidia.com/gpu.shared", uuid(2)+"::0"),
		kubelettest.Pod("web", "b", "infer", "nvidia.com/gpu.shared", uuid(2)+"::1"),
	)
	const train = "uid:4731=kubernetes:vision/train-0/main"
	const waits = "[unattributed=kubernetes:batch/wait-0/main]"
	n.awaitHolding(0, "["+train+"]")
	n.awaitHolding(1, waits)
	n.awaitHolding(2, "[unattributed=kubernetes:web/a/infer] [unattributed=kubernetes:web/b/infer]")
	// A process comes: the same workload.
	n.scenario.Processes = []lab.Process{{PID: main.PID, MemoryBytes: 8 << 30, SM: 30}}
	n.write()
	n.awaitHolding(0, train)
	kubelet.Kill()
	begun := time.Now()
	await(t, "the kubelet has been asked and was dead", func() bool {
		if now := n.holding(0) + n.holding(1); now != train+waits {
			t.Fatalf("it flipped: %s", now)
		}
		return time.Since(begun) > 12*time.Second && n.metric(`gpu_exporter_collector_success{collector="kubelet"}`) == "0"
	})
	engine.Stop(t)
	n.scenario.Processes = nil
	n.write()
	n.awaitHolding(0, "["+train+"]")
	engine.Up(t)
	kubelet.Up(t)
	await(t, "the kubelet is asked again", func() bool { return n.metric(`gpu_exporter_collector_success{collector="kubelet"}`) == "1" })
	// The pod ends, and the kubelet goes on listing it.
	pod.Stop(t)
	n.awaitHolding(0, "")
	n.awaitHolding(1, waits)
	n.exporter.stop(t)
	rows := n.rows()
	if held := heldRows(rows, 0); len(held) != 1 || held[train][0] == 0 || held[train][0] != held[train][1] {
		t.Errorf("card 0: %v, want one workload that held all of it as reserved", held)
	}
	shared := heldRows(rows, 2)
	a, b := shared["unattributed=kubernetes:web/a/infer"], shared["unattributed=kubernetes:web/b/infer"]
	if len(shared) != 2 || a[0] == 0 || a != b {
		t.Errorf("card 2: %v, want the same for both", shared)
	}
}

// TestContainerdWithoutPods has a container of nerdctl's kind on a card, which
// CRI knows nothing of: the bundle on disk has its name.
func TestContainerdWithoutPods(t *testing.T) {
	engine := containerdtest.Start(t)
	bare := engine.RunBare(t, "notebook")
	n := newNode(t, "bare", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: bare.PID, MemoryBytes: 8 << 30, SM: 30}}})
	n.config = fmt.Sprintf(podConfig, engine.Socket, filepath.Join(n.dir, "no-kubelet.sock"))
	n.start()
	n.awaitHolding(0, "unattributed=containerd:notebook")
	n.exporter.stop(t)
	if held := heldRows(n.rows(), 0); len(held) != 1 || held["unattributed=containerd:notebook"][0] == 0 {
		t.Errorf("the journal has %v", held)
	}
}
