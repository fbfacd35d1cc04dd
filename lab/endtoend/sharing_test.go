package endtoend

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/runtimes/dockertest"
	"gpuledger/exporter/usage"
	"gpuledger/lab"
)

// TestThreeOwnersShareOneGPU has two containers of different owners and a host
// process of a third user on one card, and follows them from the card to
// gwho, /metrics and the journal.
func TestThreeOwnersShareOneGPU(t *testing.T) {
	engine := dockertest.Start(t)
	first := engine.Run(t, "--name", "train", "--user", "4711", dockertest.Image, "sleep", "3600")
	second := engine.Run(t, "--name", "infer", "--user", "4712", dockertest.Image, "sleep", "3600")
	host := work(t, 4713)

	n := newNode(t, "shared", lab.Scenario{GPUs: one(t), Processes: []lab.Process{
		{PID: first.PID, MemoryBytes: 8 << 30, SM: 30},
		{PID: second.PID, MemoryBytes: 4 << 30, SM: 20},
	}})
	n.config = fmt.Sprintf("runtimes: {docker: [%q]}\n", engine.Socket)
	n.start()
	holds := func(want ...string) func() bool {
		return func() bool {
			answer, _ := n.gwho()
			var got []string
			for _, holder := range answer.Cards[0].Devices[0].Holders {
				if !holder.Pending {
					got = append(got, holder.User+"="+holder.Kind+":"+holder.Workload)
				}
			}
			return fmt.Sprint(got) == fmt.Sprint(want)
		}
	}
	await(t, "both containers in gwho", holds("uid:4711=docker:train", "uid:4712=docker:infer"))

	// The third joins and leaves at instants that the scenario knows.
	joined := time.Now()
	n.scenario.Processes = append(n.scenario.Processes, lab.Process{PID: host.pid, MemoryBytes: 1 << 30, SM: 10})
	n.write()
	await(t, "the host process in gwho", holds("uid:4711=docker:train", "uid:4712=docker:infer", "uid:4713=host:"))
	if _, code := n.gwho(); code != 0 {
		t.Errorf("gwho ended with %d", code)
	}
	series := `gpu_workload_share_seconds_total{gpu="0",kind="host",user="uid:4713",uuid="` + uuidOf(n) + `",workload=""}`
	await(t, "five seconds of the third's time", func() bool {
		seconds, _ := strconv.ParseFloat(n.metric(series), 64)
		return seconds > 5
	})
	left := time.Now()
	n.scenario.Processes = n.scenario.Processes[:2]
	n.write()
	await(t, "the host process gone", holds("uid:4711=docker:train", "uid:4712=docker:infer"))
	if text := n.metric(`gpu_conservation_error_seconds{gpu="0",uuid="` + uuidOf(n) + `"}`); text != "0" {
		t.Errorf("conservation error %q", text)
	}
	await(t, "the container's own CPU time and memory", func() bool {
		labels := `{kind="docker",user="uid:4711",workload="train"}`
		return n.metric("gpu_workload_cpu_seconds_total"+labels) != "" && n.metric("gpu_workload_resident_memory_bytes"+labels) != ""
	})
	ended := time.Now()
	n.exporter.stop(t)

	held, total := map[string]int64{}, int64(0)
	for _, row := range n.rows() {
		held[row.User] += row.HeldUS
		total += row.GPUUS
		if row.State == usage.StateHeld && row.User == "uid:4711" && (row.Workload != "train" || row.Kind != "docker") {
			t.Errorf("the journal says %s %s for uid:4711", row.Kind, row.Workload)
		}
	}
	// Each of its two ends may be off by one interval.
	if truth, got := left.Sub(joined), time.Duration(held["uid:4713"])*time.Microsecond; math.Abs((truth - got).Seconds()) > 2 {
		t.Errorf("the third held for %v, the journal says %v", truth, got)
	}
	// The two containers held all of the time, so they have the same.
	if held["uid:4711"] != held["uid:4712"] {
		t.Errorf("the containers have %d and %d µs", held["uid:4711"], held["uid:4712"])
	}
	if total != held["uid:4711"] {
		t.Errorf("Σ gpu_us %d, but somebody held throughout: %d", total, held["uid:4711"])
	}
	if wall := ended.Sub(joined); time.Duration(total)*time.Microsecond < wall-2*time.Second {
		t.Errorf("metered %v of at least %v", time.Duration(total)*time.Microsecond, wall)
	}
}

func uuidOf(n *node) string {
	answer, _ := n.gwho()
	return answer.Cards[0].UUID
}

// TestNothingUnobservedInSteadyState compares metered time with the clock.
func TestNothingUnobservedInSteadyState(t *testing.T) {
	holder := work(t, 4713)
	n := newNode(t, "steady", lab.Scenario{GPUs: one(t), Processes: []lab.Process{{PID: holder.pid, SM: 50}}})
	n.start()
	card := `{gpu="0",uuid="` + uuidOf(n) + `"}`
	at := func() (metered, clock float64) {
		text := n.get("/metrics")
		for line := range strings.Lines(text) {
			if value, ok := strings.CutPrefix(line, "gpu_metered_seconds_total"+card+" "); ok {
				metered, _ = strconv.ParseFloat(strings.TrimSpace(value), 64)
			}
		}
		return metered, float64(time.Now().UnixNano()) / 1e9
	}
	var firstMetered, firstClock float64
	await(t, "the first interval", func() bool { firstMetered, firstClock = at(); return firstMetered > 0 })
	await(t, "twenty seconds", func() bool {
		metered, clock := at()
		if clock-firstClock < 20 {
			return false
		}
		// A look may come just before or just after an interval is committed.
		if missing := (clock - firstClock) - (metered - firstMetered); missing > 1.5 {
			t.Errorf("%.3f s of %.3f were not metered", missing, clock-firstClock)
		}
		return true
	})
	if gaps := n.metric("gpu_exporter_unobserved_gaps_total"); gaps != "" && gaps != "0" {
		t.Errorf("%s intervals lost to gaps", gaps)
	}
}
