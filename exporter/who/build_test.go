package who

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

var update = flag.Bool("update", false, "write golden files")

var at = time.Date(2026, 11, 3, 8, 15, 0, 0, time.UTC)

// server is a node with a shared card, a free one, one that hangs, one that is
// lost, and one under MIG.
func server() *snapshot.Snapshot {
	alice := meter.Workload{User: "alice", UID: 1001, Kind: meter.KindDocker, Name: "train", Project: "vision", AttributedBy: "label"}
	bob := meter.Workload{User: "bob", UID: 1002, Kind: meter.KindHost, AttributedBy: "user_slice"}
	display := meter.Workload{User: "root", UID: 0, Kind: meter.KindSystem, Name: "Xorg", AttributedBy: "system"}
	stranger := meter.Workload{User: meter.UserUnattributed, UID: -1, Kind: meter.KindDocker, Name: "c0ffee"}
	good := func(index int, memory uint64) *gpu.Reading {
		return &gpu.Reading{
			MemoryTotalBytes: gpu.Some(uint64(143771 << 20)), MemoryUsedBytes: gpu.Some(memory), MemoryReservedBytes: gpu.Some(uint64(640 << 20)),
			UtilizationPercent: gpu.Some(uint32(87)), TemperatureC: gpu.Some(int64(61)), PowerMW: gpu.Some(int64(312345)), PowerLimitMW: gpu.Some(int64(700000)),
		}
	}
	mig := good(4, 9<<30)
	mig.SlicesTotal = 7
	mig.Instances = []gpu.Instance{
		{UUID: "MIG-2", GPUInstance: 2, Profile: "3g.71gb", Slices: 3, MemoryUsedBytes: gpu.Some(uint64(0))},
		{UUID: "MIG-1", GPUInstance: 1, Profile: "2g.35gb", Slices: 2, MemoryUsedBytes: gpu.Some(uint64(700 << 20))},
	}
	card := func(index int) gpu.Card {
		return gpu.Card{Index: index, UUID: fmt.Sprintf("GPU-%08d-card", index), Name: "NVIDIA H200", PCIBusID: fmt.Sprintf("00000000:%02d:00.0", index)}
	}
	process := func(pid uint32, w meter.Workload, command string) snapshot.Holder {
		return snapshot.Holder{
			PID: pid, Process: gpu.Process{PID: pid, Compute: true, MemoryBytes: gpu.Some(uint64(4 << 30))}, Workload: w,
			Command: command, CommandLine: command + " --secret-of-" + w.User, StartedAt: at.Add(-2 * time.Hour), Holds: true,
			ActivityPercent: gpu.Some(uint32(60)), LastActive: at,
		}
	}
	on := func(device string, h snapshot.Holder) snapshot.Holder { h.Device = device; return h }
	quiet := process(1002, bob, "python3")
	quiet.ActivityPercent, quiet.LastActive = gpu.Some(uint32(0)), at.Add(-45*time.Minute)
	screen := process(900, display, "Xorg")
	screen.Process.Compute, screen.Process.Graphics, screen.System, screen.Holds = false, true, true, false
	screen.ActivityPercent = gpu.Optional[uint32]{}
	assigned := snapshot.Holder{Workload: alice}
	return &snapshot.Snapshot{
		Seq: 1, Node: "gpu01", At: at, Started: at.Add(-24 * time.Hour), NVMLUp: true, Expected: 5,
		Driver: gpu.Driver{DriverVersion: "550.54.15", CUDAVersion: "12.4", NVMLVersion: "12.550.54.15"},
		Cards: []snapshot.Card{
			{Identity: card(4), Up: true, Reading: mig, Holders: []snapshot.Holder{on("MIG-1", process(1004, stranger, "train"))}},
			{Identity: card(0), Up: true, Reading: good(0, 9<<30), UnattributedMemoryBytes: gpu.Some(uint64(1 << 30)),
				Search: snapshot.Search{Verdict: snapshot.SearchFound, At: at, Hidden: 3}, Suspects: suspects(alice, display), Holders: []snapshot.Holder{
					on("GPU-00000000-card", screen), on("GPU-00000000-card", quiet), on("GPU-00000000-card", process(1001, alice, "python3")),
				}},
			{Identity: card(1), Up: true, Reading: good(1, 0), Holders: []snapshot.Holder{on("GPU-00000001-card", assigned)}},
			{Identity: card(2), Reason: "hung"},
			{Identity: card(3), Reason: gpu.DownLost, Reading: &gpu.Reading{State: gpu.StateDown, Reason: gpu.DownLost}},
		},
		Workloads: []snapshot.Workload{
			{Device: "GPU-00000000-card", Key: alice, Present: true, HeldSince: at.Add(-time.Hour)},
			{Device: "GPU-00000000-card", Key: bob, Present: false, HeldSince: at.Add(-3 * time.Hour)},
		},
		Resources: []snapshot.Resources{
			{
				Key:        meter.Workload{User: "alice", UID: 1001, Kind: meter.KindDocker, Name: "train", Project: "vision"},
				CPUPercent: gpu.Some(int64(340)), ResidentBytes: gpu.Some(uint64(12 << 30)),
				ReadBytesPerSecond: gpu.Some(int64(5_000_000)), WrittenBytesPerSecond: gpu.Some(int64(0)),
			},
			{Key: stranger, ResidentBytes: gpu.Some(uint64(1 << 30))},
			{Key: meter.Workload{User: "bob", UID: 1002, Kind: meter.KindHost}, CPUUS: gpu.Some(int64(77))}, // counters alone say nothing of now
		},
		Exporter: snapshot.Exporter{Collectors: map[string]snapshot.CollectorState{
			"docker": {Error: "permission denied"}, "procfs": {Up: true}, "journal": {Error: "disk full"},
		}},
	}
}

func suspects(person, system meter.Workload) []snapshot.Suspect {
	return []snapshot.Suspect{
		{
			PID: 1100, Reason: "device_open", Strength: "strong", Why: "has /dev/nvidia0 open, and NVML does not list it", Workload: person,
			Detail: snapshot.Detail{ContainerID: "c0ffee00", Image: "pytorch"}, Command: "python3", CommandLine: "python3 --secret-of-alice", StartedAt: at.Add(-time.Hour),
		},
		{PID: 901, Reason: "monitor", Strength: "none", Monitor: true, Why: "has /dev/nvidia0 open to watch it, or to keep it ready", Workload: system, Command: "nvidia-persiste"},
	}
}

func TestAnswerGolden(t *testing.T) {
	for name, viewer := range map[string]Viewer{"unknown": {}, "alice": Peer(1001), "root": Peer(0)} {
		t.Run(name, func(t *testing.T) {
			got, err := json.MarshalIndent(Build(server(), viewer, SourceExporter, at.Add(time.Second)), "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, '\n')
			path := filepath.Join("testdata", name+".json")
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
		})
	}
}

// What root was told can be passed on to everybody once it is published.
func TestPublishedIsWhatAnUnknownViewerGets(t *testing.T) {
	for _, viewer := range []Viewer{Peer(0), Peer(1001), {}} {
		a := Build(server(), viewer, SourceExporter, at)
		a.Publish()
		if diff := cmp.Diff(Build(server(), Viewer{}, SourceExporter, at), a); diff != "" {
			t.Error(diff)
		}
	}
}

// Whatever a node looks like, nobody gets another's command line.
func TestCommandLinesAreForTheirOwnerAndRoot(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		uids := rapid.SampledFrom([]int64{-1, 0, 1000, 1001, 1<<32 - 1})
		s := &snapshot.Snapshot{At: at, NVMLUp: true, Cards: []snapshot.Card{{Up: true, Identity: gpu.Card{UUID: "GPU-0"}}}}
		owners := rapid.SliceOf(uids).Draw(t, "owners")
		for i, uid := range owners {
			s.Cards[0].Holders = append(s.Cards[0].Holders, snapshot.Holder{
				Device: rapid.SampledFrom([]string{"", "GPU-0", "MIG-gone"}).Draw(t, "device"), PID: uint32(i + 1),
				Workload: meter.Workload{UID: uid, User: "u"}, Command: "python3", CommandLine: fmt.Sprintf("line-of-%d.", uid),
			})
		}
		viewer, sees := Viewer{}, func(int64) bool { return false }
		if rapid.Bool().Draw(t, "known") {
			uid := uint32(rapid.SampledFrom([]int64{0, 1000, 1001, 1<<32 - 1}).Draw(t, "viewer"))
			viewer, sees = Peer(uid), func(owner int64) bool { return uid == 0 || owner == int64(uid) }
		}
		text, err := json.Marshal(Build(s, viewer, SourceExporter, at))
		if err != nil {
			t.Fatal(err)
		}
		for _, uid := range owners {
			if got := bytes.Contains(text, fmt.Appendf(nil, "line-of-%d.", uid)); got != sees(uid) {
				t.Fatalf("viewer %+v sees the command line of uid %d: %t", viewer, uid, got)
			}
		}
	})
}

func TestMissing(t *testing.T) {
	whats := func(s *snapshot.Snapshot, now time.Time) string {
		var out []string
		for _, m := range Build(s, Viewer{}, SourceExporter, now).Missing {
			out = append(out, m.What)
		}
		return strings.Join(out, " ")
	}
	up := gpu.Card{UUID: "GPU-0"}
	for name, c := range map[string]struct {
		s    snapshot.Snapshot
		late time.Duration
		want string
	}{
		"nothing":         {s: snapshot.Snapshot{NVMLUp: true}},
		"no driver":       {s: snapshot.Snapshot{NVMLError: "no driver"}, want: "nvml"},
		"driver went":     {s: snapshot.Snapshot{NVMLError: "no driver", Cards: []snapshot.Card{{Reason: "missing"}, {Reason: "failed"}}}, want: "nvml"},
		"hung, NVML gone": {s: snapshot.Snapshot{NVMLError: "no driver", Cards: []snapshot.Card{{Reason: "hung"}}}, want: "nvml card"},
		"stale":           {s: snapshot.Snapshot{NVMLUp: true}, late: time.Minute, want: "stale"},
		"clock went back": {s: snapshot.Snapshot{NVMLUp: true}, late: -time.Hour},
		"unlisted card":   {s: snapshot.Snapshot{NVMLUp: true, Expected: 1}, want: "card"},
		"failed card":     {s: snapshot.Snapshot{NVMLUp: true, Cards: []snapshot.Card{{Reason: "failed"}}}, want: "card"},
		"refused card":    {s: snapshot.Snapshot{NVMLUp: true, Cards: []snapshot.Card{{Reason: gpu.DownRefused}}}, want: "card"},
		"lost card":       {s: snapshot.Snapshot{NVMLUp: true, Cards: []snapshot.Card{{Reason: gpu.DownLost}}}},
		"hidden process":  {s: snapshot.Snapshot{NVMLUp: true, Cards: []snapshot.Card{{Up: true, Identity: up, Holders: []snapshot.Holder{{PID: 7}}}}}, want: "process"},
		"pending process": {s: snapshot.Snapshot{NVMLUp: true, Cards: []snapshot.Card{{Up: true, Identity: up, Holders: []snapshot.Holder{{PID: 7, Pending: true}}}}}},
		"no docker": {s: snapshot.Snapshot{NVMLUp: true, Exporter: snapshot.Exporter{Collectors: map[string]snapshot.CollectorState{
			"docker": {}, "journal": {}, "nvml": {}}}}, want: "runtime"},
	} {
		t.Run(name, func(t *testing.T) {
			c.s.At = at
			if got := whats(&c.s, at.Add(c.late)); got != c.want {
				t.Errorf("missing %q, want %q", got, c.want)
			}
		})
	}
}

func TestFilter(t *testing.T) {
	whole := Build(server(), Viewer{}, SourceExporter, at)
	for _, c := range []struct {
		filter  Filter
		cards   string // index:holders of each device
		missing int
		unknown string
	}{
		{Filter{}, "0:3 1:1 2:0 3:0 4:1,0", 2, ""},
		{Filter{Cards: []string{"0", "GPU-00000002"}}, "0:3 2:0", 2, ""},
		{Filter{Cards: []string{"4"}}, "4:1,0", 1, ""},
		{Filter{Cards: []string{"GPU-00000001-card"}}, "1:1", 1, ""},
		{Filter{Cards: []string{"9", "GPU"}}, "", 1, "9 GPU"},
		{Filter{Users: []string{"alice"}}, "0:1 1:1", 2, ""},
		{Filter{Users: []string{"1002"}}, "0:1", 2, ""},
		{Filter{Users: []string{"alice"}, Cards: []string{"2"}}, "", 2, ""},
		{Filter{Users: []string{"nobody"}}, "", 2, ""},
	} {
		got, unknown := c.filter.Apply(whole)
		var cards []string
		for _, card := range got.Cards {
			var holders []string
			for _, d := range card.Devices {
				holders = append(holders, fmt.Sprint(len(d.Holders)))
			}
			cards = append(cards, fmt.Sprintf("%d:%s", card.Index, strings.Join(holders, ",")))
		}
		if g := strings.Join(cards, " "); g != c.cards || len(got.Missing) != c.missing || strings.Join(unknown, " ") != c.unknown {
			t.Errorf("%+v: cards %q, %d missing, unknown %q; want %q, %d, %q", c.filter, g, len(got.Missing), unknown, c.cards, c.missing, c.unknown)
		}
	}
	one, _ := Filter{Cards: []string{"MIG-1"}}.Apply(whole)
	if len(one.Cards) != 1 || len(one.Cards[0].Devices) != 1 || one.Cards[0].Devices[0].UUID != "MIG-1" {
		t.Errorf("one instance asked for, got %+v", one.Cards)
	}
	if diff := cmp.Diff(Build(server(), Viewer{}, SourceExporter, at), whole); diff != "" {
		t.Error("filters changed the answer they were given:", diff)
	}
}

func TestHandler(t *testing.T) {
	var store snapshot.Store
	handler := Handler(&store, func() time.Time { return at })
	get := func(target string, viewer Viewer) *httptest.ResponseRecorder {
		r := httptest.NewRequest("GET", target, nil)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r.WithContext(WithViewer(r.Context(), viewer)))
		return w
	}
	if w := get(Path, Viewer{}); w.Code != 503 || w.Header().Get("Retry-After") == "" {
		t.Errorf("before the first snapshot: %d %v", w.Code, w.Header())
	}
	store.Publish(server())
	if w := get(Path+"?card=77", Viewer{}); w.Code != 404 || !strings.Contains(w.Body.String(), "77") {
		t.Errorf("unknown card: %d %s", w.Code, w.Body)
	}
	w := get(Path+"?card=0&user=alice", Peer(1001))
	var a Answer
	if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	if len(a.Cards) != 1 || len(a.Cards[0].Devices[0].Holders) != 1 || a.Cards[0].Devices[0].Holders[0].CommandLine == nil {
		t.Errorf("alice asks for her own on card 0: %s", w.Body)
	}
	if got := w.Header().Get("Cache-Control"); got != "no-store" {
		t.Errorf("Cache-Control %q: an answer for one viewer may reach another", got)
	}
}
