package meter_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/usage"
)

// world draws a random node: cards that are cut, lost, silent and found again,
// processes that come and go, clocks that step.
type world struct {
	t          *rapid.T
	leaps      bool // the clock often skips about a quarter hour
	mono, wall int64
	history    *history
	energy     map[string]int64
	keys       []meter.ProcessKey
}

var start = int64(1_762_156_800_000_000) // a quarter hour's edge, 2025-11-03

func newWorld(t *rapid.T) *world {
	w := &world{t: t, mono: 5_000_000, energy: map[string]int64{}}
	w.leaps = rapid.IntRange(0, 3).Draw(t, "leaps") == 0
	w.wall = start + rapid.Int64Range(0, quarterUS).Draw(t, "wall")
	return w
}

func (w *world) begin(run string, notBeforeUS int64) {
	w.history = &history{
		run: run, notBeforeUS: notBeforeUS,
		knownFrom:   map[meter.ProcessKey]int64{},
		settled:     map[meter.ProcessKey]meter.Workload{},
		provisional: map[meter.ProcessKey]meter.Workload{},
	}
	w.keys = nil
	for pid := range uint32(rapid.IntRange(1, 9).Draw(w.t, "processes")) {
		key := meter.ProcessKey{PID: pid + 100, StartTicks: uint64(pid) * 7}
		w.keys = append(w.keys, key)
		w.history.settled[key] = drawWorkload(w.t)
		if rapid.IntRange(0, 4).Draw(w.t, "pending") == 0 {
			w.history.knownFrom[key] = w.mono + rapid.Int64Range(0, 60_000_000).Draw(w.t, "known from")
			w.history.provisional[key] = meter.Workload{User: meter.UserUnattributed, UID: -1, Kind: meter.KindDocker, Name: fmt.Sprintf("%012x", pid)}
		}
	}
}

func drawWorkload(t *rapid.T) meter.Workload {
	w := meter.Workload{
		User: rapid.SampledFrom([]string{"alice", "bob", "carol", "dave", meter.UserUnattributed}).Draw(t, "user"),
		Kind: rapid.SampledFrom([]string{meter.KindHost, meter.KindDocker, meter.KindService, meter.KindSystem}).Draw(t, "kind"),
		Name: rapid.SampledFrom([]string{"", "a", "b", "c"}).Draw(t, "name"),
	}
	w.UID = int64(len(w.User)) + 1000
	if w.Unattributed() {
		w.UID = -1
	}
	w.Project = rapid.SampledFrom([]string{"", "vision"}).Draw(t, "project")
	return w
}

func (w *world) pass() {
	w.mono += rapid.OneOf(rapid.Int64Range(990_000, 1_010_000), rapid.Int64Range(1, 40_000_000), rapid.Just(int64(1_000_000))).Draw(w.t, "elapsed")
}

func (w *world) stepClock(elapsed int64) {
	w.wall += elapsed
	if w.leaps && rapid.IntRange(0, 2).Draw(w.t, "skip") == 0 {
		w.wall += rapid.Int64Range(quarterUS-60_000_000, quarterUS+60_000_000).Draw(w.t, "skipped")
		return
	}
	switch rapid.IntRange(0, 24).Draw(w.t, "clock") {
	case 0:
		w.wall += rapid.Int64Range(-3_000_000, 3_000_000).Draw(w.t, "step")
	case 1:
		w.wall += rapid.Int64Range(-2*quarterUS, 2*quarterUS).Draw(w.t, "leap")
	}
}

func (w *world) reading(card string) meter.Observation {
	r := gpu.Reading{Card: gpu.Card{UUID: card, Name: "card"}, At: gpu.Instant{MonotonicUS: w.mono, WallUS: w.wall}}
	if rapid.IntRange(0, 3).Draw(w.t, "temperature") > 0 {
		r.TemperatureC = gpu.Some(rapid.Int64Range(20, 95).Draw(w.t, "celsius"))
	}
	switch rapid.IntRange(0, 20).Draw(w.t, "state") {
	case 0:
		r.State = gpu.StateFailed
		return meter.Observation{Reading: r}
	case 1, 2:
		r.State, r.Reason = gpu.StateDown, gpu.DownLost
		return meter.Observation{Reading: r}
	}
	o := meter.Observation{Keys: map[uint32]meter.ProcessKey{}}
	processes := func() []gpu.Process {
		var list []gpu.Process
		for _, key := range w.keys {
			if rapid.Bool().Draw(w.t, "present") {
				p := gpu.Process{PID: key.PID, Compute: rapid.IntRange(0, 5).Draw(w.t, "compute") > 0}
				p.MPS = rapid.IntRange(0, 5).Draw(w.t, "mps") == 0
				p.Graphics = !p.Compute
				if rapid.IntRange(0, 5).Draw(w.t, "memory known") > 0 {
					p.MemoryBytes = gpu.Some(rapid.Uint64Range(0, 1<<37).Draw(w.t, "memory"))
				}
				o.Keys[key.PID] = key
				list = append(list, p)
			}
		}
		return list
	}
	if rapid.IntRange(0, 3).Draw(w.t, "mig") == 0 {
		r.SlicesTotal = rapid.SampledFrom([]int64{7, 4}).Draw(w.t, "slices")
		left := r.SlicesTotal
		for i := 0; left > 0 && i < rapid.IntRange(0, 4).Draw(w.t, "instances"); i++ {
			n := rapid.Int64Range(1, left).Draw(w.t, "cut")
			left -= n
			r.Instances = append(r.Instances, gpu.Instance{UUID: fmt.Sprintf("MIG-%s-%d", card, i), Profile: fmt.Sprintf("%dg", n), Slices: n, Processes: processes()})
		}
	} else {
		r.Processes = processes()
		r.SamplesKnown = rapid.IntRange(0, 3).Draw(w.t, "samples known") > 0
		if r.SamplesKnown {
			for _, key := range w.keys {
				if rapid.Bool().Draw(w.t, "sampled") {
					r.Samples = append(r.Samples, gpu.Sample{PID: key.PID, SM: rapid.SampledFrom([]uint32{0, 3, 50, 99, 100, 371}).Draw(w.t, "sm")})
				}
			}
		}
		if rapid.Bool().Draw(w.t, "utilization known") {
			r.UtilizationPercent = gpu.Some(rapid.Uint32Range(0, 101).Draw(w.t, "utilization"))
		}
	}
	if rapid.IntRange(0, 6).Draw(w.t, "reserve") == 0 {
		device := card
		if len(r.Instances) > 0 {
			device = r.Instances[0].UUID
		}
		o.Reservations = []meter.Reservation{{Device: device, Workload: meter.Workload{User: "eve", UID: 1005, Kind: "slurm", Name: "17"}}}
	}
	w.energy[card] += rapid.OneOf(rapid.Int64Range(0, 400_000), rapid.Int64Range(0, 20_000_000), rapid.Int64Range(-1_000_000, 0)).Draw(w.t, "energy")
	w.energy[card] = max(w.energy[card], 0)
	if card != "GPU-b" && rapid.IntRange(0, 9).Draw(w.t, "energy known") > 0 {
		r.EnergyMJ = gpu.Some(w.energy[card])
	}
	if rapid.IntRange(0, 4).Draw(w.t, "power known") > 0 {
		r.PowerMW, r.PowerLimitMW = gpu.Some(rapid.Int64Range(0, 700_001).Draw(w.t, "power")), gpu.Some(int64(700_000))
	}
	o.Reading = r
	return o
}

// TestMeterEqualsBruteForce replays random timelines, with restarts, through
// the meter and through the independent count, and wants them equal.
func TestMeterEqualsBruteForce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		notBefore := int64(0)
		for run := range rapid.IntRange(1, 3).Draw(t, "runs") {
			notBefore = w.oneRun(fmt.Sprint("run", run), notBefore)
			down := rapid.Int64Range(0, 60_000_000).Draw(t, "downtime")
			w.mono += down
			w.stepClock(down)
		}
	})
}

func (w *world) oneRun(name string, notBeforeUS int64) int64 {
	t := w.t
	w.begin(name, notBeforeUS)
	m := meter.New(meter.Options{Run: name, Node: "n", NotBeforeUS: notBeforeUS})
	book := meter.NewBook()
	lengths := map[string]int64{}
	perCard := map[string]int64{}
	final := map[usage.Key]usage.Row{}
	edge := map[string]int64{}
	take := func(c meter.Committed) {
		for _, row := range c.Rows {
			perCard[row.Card] += row.GPUUS
			if _, gone := final[row.Key]; gone {
				t.Fatalf("a row that was final changed: %+v", row)
			}
		}
		for _, interval := range c.Intervals {
			if interval.FromUS < edge[interval.Card] || interval.ToUS < interval.FromUS {
				t.Fatalf("interval %+v overlaps what was committed up to %d", interval, edge[interval.Card])
			}
			edge[interval.Card] = interval.ToUS
			lengths[interval.Card] += interval.ToUS - interval.FromUS
		}
		book.Add(c.Rows)
	}
	for range rapid.IntRange(2, 40).Draw(t, "passes") {
		before := w.mono
		w.pass()
		w.stepClock(w.mono - before)
		ended := false
		for _, card := range []string{"GPU-a", "GPU-b"} {
			if rapid.IntRange(0, 9).Draw(t, "silent") == 0 {
				continue
			}
			o := w.reading(card)
			err := m.Observe(o)
			if errors.Is(err, meter.ErrNewRun) {
				ended = true
				break
			}
			w.history.observed = append(w.history.observed, o)
		}
		if ended {
			break
		}
		now := gpu.Instant{MonotonicUS: w.mono, WallUS: w.wall}
		w.history.commitsAfter = append(w.history.commitsAfter, now)
		take(m.Commit(now, w.history.attributeAt(w.mono)))
		for _, row := range book.Finish(m.SettledUS) {
			final[row.Key] = row
		}
	}
	w.history.commitsAfter = append(w.history.commitsAfter, gpu.Instant{MonotonicUS: w.mono})
	take(m.Drain(w.history.attributeAt(w.mono)))
	for _, row := range book.FinishAll() {
		final[row.Key] = row
	}
	want, committed := w.history.count()
	if diff := cmp.Diff(committed, nonZero(lengths, committed)); diff != "" {
		t.Fatalf("committed lengths differ (-brute +meter):\n%s", diff)
	}
	for card, length := range lengths {
		if perCard[card] != length {
			t.Fatalf("L1: card %s: Σ gpu_us %d, committed %d", card, perCard[card], length)
		}
	}
	got := map[usage.Key]*tally{}
	for key, row := range final {
		got[key] = &tally{amounts: row.Amounts, peakMemory: row.PeakMemoryBytes, peakCelsius: row.PeakTemperatureC, estimated: row.Estimated}
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(tally{})); diff != "" {
		t.Fatalf("rows differ (-brute +meter):\n%s", diff)
	}
	return m.LatestUS()
}

// nonZero drops cards without any committed interval from the meter's side,
// which the count does not list.
func nonZero(lengths, like map[string]int64) map[string]int64 {
	kept := map[string]int64{}
	for card, length := range lengths {
		if _, ok := like[card]; ok || length != 0 {
			kept[card] = length
		}
	}
	return kept
}
