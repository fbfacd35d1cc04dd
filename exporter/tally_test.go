package exporter

import (
	"strconv"
	"testing"
	"time"

	"gpuledger/exporter/meter"
)

// TestEndedWorkloadsAreBounded has more workloads come and go within an hour
// than are remembered.
func TestEndedWorkloadsAreBounded(t *testing.T) {
	begin := time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)
	tally := newTally()
	key := func(n int) workloadKey {
		return workloadKey{device: "GPU-1", workload: meter.Workload{User: "alice", Kind: "docker", Name: strconv.Itoa(n)}}
	}
	tally.workload(key(-1), begin).present = true
	for n := range 3 * maxEnded {
		at := begin.Add(time.Duration(n) * 100 * time.Millisecond)
		tally.workload(key(n), at).endedAt = at
		tally.forget(at)
		if len(tally.workloads) > maxEnded+1 {
			t.Fatalf("%d workloads are kept", len(tally.workloads))
		}
	}
	for n, want := range map[int]bool{-1: true, 0: false, 2*maxEnded - 1: false, 3*maxEnded - keptEnded: true, 3*maxEnded - 1: true} {
		if _, kept := tally.workloads[key(n)]; kept != want {
			t.Errorf("workload %d is kept: %t", n, kept)
		}
	}
	tally.forget(begin.Add(2 * time.Hour))
	if _, kept := tally.workloads[key(-1)]; !kept || len(tally.workloads) != 1 {
		t.Errorf("%d workloads are kept after an hour", len(tally.workloads))
	}
}
