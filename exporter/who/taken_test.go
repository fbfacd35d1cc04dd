package who

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

// takenServer is a node whose cards have memory that nobody explains, each in
// another way.
func takenServer() *snapshot.Snapshot {
	s := server()
	alice := meter.Workload{User: "alice", UID: 1001, Kind: meter.KindDocker, Name: "train", AttributedBy: "label"}
	listed := s.Cards[1].Holders[2:]
	s.Cards, s.Workloads, s.Exporter.Collectors = nil, nil, nil
	for i, card := range []snapshot.Card{
		{Search: snapshot.Search{Verdict: snapshot.SearchNobody}},
		{Search: snapshot.Search{Verdict: snapshot.SearchNobody}, Suspects: suspects(alice, meter.Workload{User: "root", Kind: meter.KindSystem, Name: "nvidia-persistenced"})[1:]},
		{Search: snapshot.Search{Verdict: snapshot.SearchNobody}, Holders: listed},
		{Search: snapshot.Search{Verdict: snapshot.SearchHidden, Hidden: 1}},
		{Search: snapshot.Search{Verdict: snapshot.SearchHidden, HidePID: true}},
		{Search: snapshot.Search{Verdict: snapshot.SearchLooking}},
		{Search: snapshot.Search{Verdict: snapshot.SearchFailed, Error: "list processes: no such file or directory"}},
		{Search: snapshot.Search{Verdict: snapshot.SearchFound}, Suspects: []snapshot.Suspect{
			{PID: 77, Reason: "driver_open", Strength: "weak", Why: "has the driver (nvidia-uvm) open, but no GPU", Workload: alice, Command: "python3"},
		}},
		{Search: snapshot.Search{Verdict: snapshot.SearchFound}, Suspects: []snapshot.Suspect{
			{PID: 78, Reason: "device_open", Strength: "strong", Why: "has /dev/nvidia8 open, and NVML does not list it", Pending: true,
				Workload: meter.Workload{User: meter.UserUnattributed, UID: -1, Kind: meter.KindHost}},
		}},
	} {
		card.Identity = gpu.Card{UUID: "GPU-0000000" + string(rune('0'+i)), Index: i, Name: "NVIDIA H200"}
		card.Up, card.Reading = true, &gpu.Reading{MemoryTotalBytes: gpu.Some(uint64(143771 << 20)), MemoryUsedBytes: gpu.Some(uint64(40 << 30))}
		card.UnattributedMemoryBytes = gpu.Some(uint64(uint64(40)<<30 - uint64(i)*700<<20))
		s.Cards = append(s.Cards, card)
	}
	// One that is given to virtual machines, and none has it.
	s.Cards = append(s.Cards, snapshot.Card{
		Identity: gpu.Card{UUID: "PCI-0000:81:00.0", Index: len(s.Cards), Name: "NVIDIA A100 SXM4 40GB", PCIBusID: "0000:81:00.0", PassedThrough: true},
		Up:       true, Reading: &gpu.Reading{},
	})
	s.Expected = len(s.Cards)
	return s
}

func TestTakenGolden(t *testing.T) {
	got, err := json.MarshalIndent(Build(takenServer(), Viewer{}, SourceDirect, at), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", "taken.json")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Error(diff)
	}
}

func TestTakenCommandLinesAreTheOwners(t *testing.T) {
	for uid, want := range map[uint32]bool{0: true, 1001: true, 1002: false} {
		text, err := json.Marshal(Build(server(), Peer(uid), SourceExporter, at).Cards[0].Suspects)
		if err != nil || strings.Contains(string(text), "secret-of-alice") != want {
			t.Errorf("uid %d: %s, %v", uid, text, err)
		}
	}
}

func TestFilterKeepsWhoIsSuspected(t *testing.T) {
	a, _ := Filter{Users: []string{"alice"}}.Apply(Build(takenServer(), Viewer{}, SourceExporter, at))
	if len(a.Cards) != 2 || a.Cards[0].Index != 2 || a.Cards[1].Index != 7 || len(a.Cards[1].Suspects) != 1 {
		t.Errorf("%+v", a.Cards)
	}
	if a, _ := (Filter{Users: []string{"bob"}}).Apply(Build(takenServer(), Viewer{}, SourceExporter, at)); len(a.Cards) != 0 {
		t.Errorf("%+v", a.Cards)
	}
}
