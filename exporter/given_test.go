package exporter

import (
	"testing"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/usage"
)

// scheduler is a granter whose word the test changes.
type scheduler struct {
	grants     []runtimes.Grant
	generation uint64
}

func (s *scheduler) Grants() []runtimes.Grant { return s.grants }
func (s *scheduler) Generation() uint64       { return s.generation }

func (s *scheduler) say(grants ...runtimes.Grant) {
	s.grants = grants
	s.generation++
}

func grantOf(id string, exclusive bool, since time.Time) runtimes.Grant {
	return runtimes.Grant{
		Devices: []runtimes.Device{runtimes.ByUUID("GPU-1")}, Exclusive: exclusive, UID: -1, Since: since,
		Levels: []cgroup.Level{{Kind: cgroup.LevelJob, System: "slurm", ID: id}},
	}
}

// TestReservedHoldsAndAssignedDoesNot gives a card to a workload without a
// process, exclusively and not.
func TestReservedHoldsAndAssignedDoesNot(t *testing.T) {
	begin := time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)
	s := &scheduler{}
	n := newSteppedNode(t, begin, s)
	n.run(11)
	s.say(grantOf("17", true, begin))
	n.run(10)
	shown := n.sampler.store.Load().Cards[0].Holders
	if len(shown) != 1 || !shown[0].Holds || shown[0].PID != 0 || shown[0].Workload.Name != "17" {
		t.Errorf("shown while reserved: %+v", shown)
	}
	s.say(grantOf("18", false, begin))
	n.run(10)
	shown = n.sampler.store.Load().Cards[0].Holders
	if len(shown) != 1 || shown[0].Holds || shown[0].Workload.Name != "18" {
		t.Errorf("shown while assigned: %+v", shown)
	}
	for _, w := range n.sampler.store.Load().Workloads {
		if want := w.Key.Name == "18"; w.Assigned != want || w.Present != want || w.Key.Name == "18" && (w.Totals.HeldUS != 0 || !w.HeldSince.Equal(begin)) {
			t.Errorf("workload %+v", w)
		}
	}
	s.say()
	n.run(2)
	if shown = n.sampler.store.Load().Cards[0].Holders; len(shown) != 0 {
		t.Errorf("shown after it was taken back: %+v", shown)
	}
	held := map[string]usage.Amounts{}
	for _, row := range n.end() {
		held[row.State+row.Workload] = row.Amounts
	}
	// A reading holds until the next one.
	reserved := held["held17"]
	if reserved.GPUUS != 10_000_000 || reserved.HeldUS != 10_000_000 || reserved.ReservedUS != 10_000_000 {
		t.Errorf("reserved: %+v", reserved)
	}
	if idle := held["idle"]; idle.GPUUS != 22_000_000 || len(held) != 2 {
		t.Errorf("rows %+v", held)
	}
}

// TestReservedOnInstances gives a whole card that is cut into instances.
func TestReservedOnInstances(t *testing.T) {
	s := &scheduler{}
	n := newSteppedNode(t, time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC), s)
	n.reading.SlicesTotal = 7
	n.reading.Instances = []gpu.Instance{{UUID: "MIG-1", Profile: "3g.40gb", Slices: 3}, {UUID: "MIG-2", Profile: "3g.40gb", Slices: 3}}
	s.say(grantOf("17", true, time.Time{}))
	n.run(8)
	shown := n.sampler.store.Load().Cards[0].Holders
	if len(shown) != 2 || shown[0].Device != "MIG-1" || shown[0].Profile != "3g.40gb" || shown[1].Device != "MIG-2" {
		t.Errorf("shown: %+v", shown)
	}
	var held, all int64
	for _, row := range n.end() {
		all += row.GPUUS
		if row.State == usage.StateHeld {
			held += row.GPUUS
		}
	}
	if held != 6_000_000 || all != 7_000_000 {
		t.Errorf("held %d of %d µs, six slices of seven are reserved", held, all)
	}
}
