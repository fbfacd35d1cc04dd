package endtoend

import (
	"fmt"
	"strconv"
	"strings"
	"testing"

	"gpuledger/exporter/runtimes/slurm/slurmtest"
	"gpuledger/exporter/usage"
	"gpuledger/lab"
)

// TestSlurmJobs has a real job with a process on its card, and one that was
// given a card and does nothing with it, and follows both to gwho, /metrics and
// the journal, while Slurm's daemons come and go.
func TestSlurmJobs(t *testing.T) {
	cluster := slurmtest.Start(t, 0, 1)
	t.Setenv("SLURM_CONF", cluster.Config)
	busy := cluster.Submit("--gres=gpu:1", "-A", "vision", "-J", "a UserId=root(0) Account=boss", "--wrap", "sleep 600")
	n := newNode(t, "slurm", lab.Scenario{
		GPUs: []lab.GPU{
			{Name: "NVIDIA A100-SXM4-80GB", Values: lab.Values{lab.MinorNumber: 0}},
			{Name: "NVIDIA A100-SXM4-80GB", Values: lab.Values{lab.MinorNumber: 1}},
		},
		Processes: []lab.Process{{GPU: 0, PID: cluster.Processes(busy, "sleep")[0], MemoryBytes: 8 << 30, SM: 30}},
	})
	n.config = fmt.Sprintf("runtimes: {docker: [], cri: [], kubelet: [], slurm: {gres_conf: [%q]}}\n", cluster.GresConf)
	n.start()
	holds := func(card int, want ...string) func() bool {
		return func() bool {
			answer, _ := n.gwho()
			var got []string
			for _, h := range answer.Cards[card].Devices[0].Holders {
				if h.Holds && !h.Pending {
					got = append(got, fmt.Sprintf("%s %s:%s %s%s process %t", h.User, h.Kind, h.Workload, h.SlurmJob, h.Project, h.PID != nil))
				}
			}
			return fmt.Sprint(got) == fmt.Sprint(want)
		}
	}
	working := "www-data slurm:" + busy + " " + busy + "vision process true"
	await(t, "the job with a process", holds(0, working))
	await(t, "a card that is nobody's", holds(1))

	waiting := cluster.Submit("--gres=gpu:1", "--wrap", "sleep 600")
	reserved := "www-data slurm:" + waiting + " " + waiting + " process false"
	await(t, "the job without a process", holds(1, reserved))
	series := func(job, card, name string) string {
		answer, _ := n.gwho()
		index, _ := strconv.Atoi(card)
		return n.metric(fmt.Sprintf("%s{gpu=%q,kind=\"slurm\",user=\"www-data\",uuid=%q,workload=%q}", name, card, answer.Cards[index].UUID, job))
	}
	await(t, "its reserved time", func() bool {
		seconds, _ := strconv.ParseFloat(series(waiting, "1", "gpu_workload_reserved_seconds_total"), 64)
		return seconds > 2
	})
	if info := n.get("/metrics"); !strings.Contains(info, `slurm_job="`+busy+`"`) || strings.Contains(info, "boss") {
		t.Errorf("gpu_workload_info does not name job %s, or believes its name", busy)
	}

	// Slurm's daemons die, and an exporter that begins meanwhile has nobody to
	// ask.
	cluster.KillController()
	cluster.KillNode()
	n.exporter.stop(t)
	n.start()
	await(t, "the job with a process, without Slurm", holds(0, working))
	await(t, "the job without a process, without Slurm", holds(1, reserved))
	cluster.StartController()
	cluster.StartNode()
	await(t, "the controller is back", func() bool { return strings.Contains(cluster.Run("squeue", "-h", "-o", "%A"), waiting) })
	if !holds(0, working)() || !holds(1, reserved)() {
		t.Error("a restart of Slurm changed who holds what")
	}
	cluster.Run("scancel", waiting)
	await(t, "the end of the job without a process", holds(1))
	n.exporter.stop(t)

	found := map[string]int64{}
	for _, row := range n.rows() {
		if row.State != usage.StateHeld {
			continue
		}
		if row.User != "www-data" || row.Kind != "slurm" || row.UID != int64(cluster.UID) || row.AttributedBy != "scheduler" {
			t.Errorf("row %+v", row)
		}
		// A reservation and the job's processes are one workload.
		if project := map[string]string{busy: "vision"}[row.Workload]; row.Project != project {
			t.Errorf("job %s has project %q, want %q", row.Workload, row.Project, project)
		}
		found[row.Workload+" held"] += row.HeldUS
		found[row.Workload+" reserved"] += row.ReservedUS
	}
	if len(found) != 4 || found[waiting+" held"] != found[waiting+" reserved"] || found[waiting+" held"] < 2_000_000 ||
		found[busy+" held"] < found[waiting+" held"] || found[busy+" reserved"] < 2_000_000 {
		t.Errorf("the journal has %v", found)
	}
}
