package metrics

import (
	"fmt"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/usage"
)

var (
	started = time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)
	now     = started.Add(2 * time.Hour)
)

const gib = 1 << 30

// machines are the simulated nodes of the golden files.
var machines = map[string]func() *snapshot.Snapshot{
	"shared-a100":    sharedA100,
	"mig-h100":       migH100,
	"laptop":         laptop,
	"lost-card":      lostCard,
	"nvml-down":      nvmlDown,
	"odd-names":      oddNames,
	"folded":         folded,
	"same-label-set": sameLabelSet,
}

func node(cards ...snapshot.Card) *snapshot.Snapshot {
	return &snapshot.Snapshot{
		Seq: 7, Node: "gpu01", Run: "01K3", At: now, Started: started, NVMLUp: true,
		Driver:   gpu.Driver{DriverVersion: "550.54.15", CUDAVersion: "12.4", NVMLVersion: "12.550.54.15"},
		Expected: len(cards), Cards: cards,
		Exporter: snapshot.Exporter{
			SampleDuration: 12500 * time.Microsecond, ChildRestarts: 1, GonePIDs: 3, HiddenPIDs: 2, ClockWaits: 1,
			DroppedValues: map[string]int64{"gpu_power_watts": 4},
			JournalBytes:  1 << 20, JournalOldestUnpulled: 90 * time.Second, JournalWaitingRows: 5,
			Collectors: map[string]snapshot.CollectorState{
				"nvml":   {Up: true, Duration: 12 * time.Millisecond},
				"procfs": {Up: true, Duration: time.Millisecond},
				"docker": {Duration: 2 * time.Second, Error: "no answer from the socket"},
			},
		},
	}
}

func a100(index int) snapshot.Card {
	identity := gpu.Card{
		UUID: cardUUID(index), Index: index, Name: "NVIDIA A100-SXM4-80GB", PCIBusID: fmt.Sprintf("00000000:%02X:00.0", 7+index),
		Serial: fmt.Sprintf("15620210%04d", index), VBIOS: "92.00.45.00.03",
		MIGMode: gpu.Some(false), PersistenceMode: gpu.Some(true),
	}
	reading := &gpu.Reading{
		Card:               identity,
		UtilizationPercent: gpu.Some(uint32(87)), MemoryUtilizationPercent: gpu.Some(uint32(41)),
		EncoderUtilizationPercent: gpu.Some(uint32(0)), DecoderUtilizationPercent: gpu.Some(uint32(0)),
		MemoryTotalBytes: gpu.Some(uint64(80 * gib)), MemoryUsedBytes: gpu.Some(uint64(41 * gib)),
		MemoryReservedBytes: gpu.Some(uint64(gib / 2)), MemoryFreeBytes: gpu.Some(uint64(77 * gib / 2)),
		TemperatureC: gpu.Some(int64(61)), MemoryTemperatureC: gpu.Some(int64(70)),
		ThresholdsC: map[string]int64{gpu.ThresholdSlowdown: 89, gpu.ThresholdShutdown: 92, gpu.ThresholdMemoryMax: 95},
		PowerMW:     gpu.Some(int64(312345)), PowerLimitMW: gpu.Some(int64(400000)),
		ClocksMHz:       map[string]int64{"sm": 1410, "memory": 1593, "graphics": 1410, "video": 1275},
		ThrottleReasons: gpu.Some(uint64(0x5)),
		PCIeGeneration:  gpu.Some(int64(4)), PCIeGenerationMax: gpu.Some(int64(4)),
		PCIeWidth: gpu.Some(int64(8)), PCIeWidthMax: gpu.Some(int64(16)),
	}
	return snapshot.Card{
		Identity: identity, Reading: reading, Up: true,
		IdleUS: 1_234_567_891, DownUS: 0, MeteredUS: 7_199_999_999, EnergyMJ: gpu.Some(int64(2_248_884_123)),
		ThrottleUS: map[string]int64{"sw_power_cap": 61_500_999},
		XIDs:       map[uint64]snapshot.XID{31: {Count: 2, Last: now.Add(-time.Minute)}},
		ECCErrors:  map[string]int64{"corrected": 12, "uncorrected": 0}, UnattributedMemoryBytes: gpu.Some(uint64(gib)),
		Search: snapshot.Search{Verdict: snapshot.SearchFound}, Suspects: []snapshot.Suspect{{PID: 7}, {PID: 8}, {PID: 9, Monitor: true}},
	}
}

func cardUUID(index int) string { return fmt.Sprintf("GPU-1f2e3d4c-0000-4000-8000-%012d", index) }

func container(card snapshot.Card, user, name string) snapshot.Workload {
	return snapshot.Workload{
		Card: card.Identity.UUID, Device: card.Identity.UUID, Index: card.Identity.Index,
		Key:    meter.Workload{User: user, UID: 1001, Kind: meter.KindDocker, Name: name, Project: "vision", AttributedBy: "label"},
		Detail: snapshot.Detail{ContainerID: "4f5a6b7c8d9e", ContainerName: name, Image: "pytorch:2.9"},
		Totals: meter.Totals{Amounts: usage.Amounts{
			GPUUS: 3_000_000_000, ShareUS: 3_000_000_000, HeldUS: 6_000_000_999, ActiveUS: 4_100_000_001,
			ActiveKnownUS: 6_000_000_999, IdleUS: 12_000_000, MemoryKiBSeconds: 35_156_250_000, MemoryKnownUS: 6_000_000_999, EnergyMJ: 1_124_000_001,
		}},
		Present: true, Processes: 2, MemoryUsedBytes: gpu.Some(uint64(20 * gib)), ActivityPercent: gpu.Some(uint32(43)),
		PowerMW: gpu.Some(int64(150001)), TemperatureC: gpu.Some(int64(61)),
		HeldSince: started.Add(10 * time.Minute), LastActive: now.Add(-1500 * time.Millisecond), FirstSeen: started.Add(10 * time.Minute),
	}
}

func sharedA100() *snapshot.Snapshot {
	var cards []snapshot.Card
	var workloads []snapshot.Workload
	for index := range 8 {
		card := a100(index)
		cards = append(cards, card)
		train := container(card, "alice", "train")
		notebook := container(card, "bob", "")
		notebook.Key.Kind, notebook.Key.UID, notebook.Detail = meter.KindHost, 1002, snapshot.Detail{}
		notebook.ZombieProcesses = 1
		workloads = append(workloads, train, notebook)
	}
	ended := container(cards[0], "carol", "eval")
	ended.Present, ended.Processes, ended.EndedAt = false, 0, now.Add(-30*time.Minute)
	ended.MemoryUsedBytes, ended.ActivityPercent = gpu.Optional[uint64]{}, gpu.Optional[uint32]{}
	ended.PowerMW, ended.TemperatureC = gpu.Optional[int64]{}, gpu.Optional[int64]{}
	assigned := container(cards[1], "dave", "jupyter")
	assigned.Assigned, assigned.Processes, assigned.Totals, assigned.HeldSince, assigned.LastActive =
		true, 0, meter.Totals{}, time.Time{}, time.Time{}
	assigned.MemoryUsedBytes, assigned.ActivityPercent = gpu.Some(uint64(0)), gpu.Optional[uint32]{}
	assigned.PowerMW = gpu.Optional[int64]{}
	s := withWorkloads(node(cards...), append(workloads, ended, assigned)...)
	// Each once, although they are on eight cards; of another user's processes
	// only root may see what they read.
	s.Resources = []snapshot.Resources{
		onNode(workloads[0], 51_234_567_891, 12*gib, gpu.Some(int64(3_500_000_000))),
		onNode(workloads[1], 1_999, gib/2, gpu.Optional[int64]{}),
		{Key: ended.Key, FirstSeen: ended.FirstSeen, CPUUS: gpu.Some(int64(77_000_000))},
	}
	return s
}

func onNode(w snapshot.Workload, us int64, resident uint64, bytes gpu.Optional[int64]) snapshot.Resources {
	w.Key.AttributedBy = ""
	return snapshot.Resources{
		Key: w.Key, FirstSeen: w.FirstSeen, CPUUS: gpu.Some(us), ReadBytes: bytes, WrittenBytes: bytes, ResidentBytes: gpu.Some(resident),
		CPUPercent: gpu.Some(int64(340)), ReadBytesPerSecond: bytes, WrittenBytesPerSecond: bytes,
	}
}

func withWorkloads(s *snapshot.Snapshot, workloads ...snapshot.Workload) *snapshot.Snapshot {
	s.Workloads = workloads
	return s
}

func migH100() *snapshot.Snapshot {
	card := a100(0)
	card.Identity.Name, card.Identity.MIGMode = "NVIDIA H100 80GB HBM3", gpu.Some(true)
	reading := card.Reading
	reading.Card, reading.SlicesTotal = card.Identity, 7
	// NVML has no utilization of a card in MIG mode.
	reading.UtilizationPercent, reading.MemoryUtilizationPercent = gpu.Optional[uint32]{}, gpu.Optional[uint32]{}
	reading.EncoderUtilizationPercent, reading.DecoderUtilizationPercent = gpu.Optional[uint32]{}, gpu.Optional[uint32]{}
	var workloads []snapshot.Workload
	for i, profile := range []string{"3g.40gb", "2g.20gb"} {
		instance := gpu.Instance{
			UUID: fmt.Sprintf("MIG-9a8b7c6d-0000-4000-8000-%012d", i), GPUInstance: i + 1, Profile: profile, Slices: int64(3 - i),
			MemoryTotalBytes: gpu.Some(uint64(20 * (2 - i) * gib)), MemoryUsedBytes: gpu.Some(uint64(3 * gib)),
		}
		reading.Instances = append(reading.Instances, instance)
		w := container(card, "alice", fmt.Sprintf("infer-%d", i))
		w.Device, w.Profile = instance.UUID, profile
		if i == 0 { // the activity of one instance is known, that of the other is not
			w.ActivityPercent, w.LastActive = gpu.Optional[uint32]{}, time.Time{}
			w.Totals.ActiveUS, w.Totals.ActiveKnownUS, w.Totals.IdleUS = 0, 0, 0
		}
		workloads = append(workloads, w)
	}
	return withWorkloads(node(card), workloads...)
}

// laptop is a card that gives a name and its processes, and nothing else.
func laptop() *snapshot.Snapshot {
	identity := gpu.Card{UUID: cardUUID(0), Name: "NVIDIA GeForce MX150", PCIBusID: "00000000:01:00.0"}
	card := snapshot.Card{Identity: identity, Reading: &gpu.Reading{Card: identity}, Up: true, IdleUS: 3_600_000_000, MeteredUS: 7_200_000_000}
	game := container(card, "erin", "")
	game.Key.Kind, game.Detail, game.Processes = meter.KindHost, snapshot.Detail{}, 1
	game.Totals = meter.Totals{Amounts: usage.Amounts{GPUUS: 3_600_000_000, ShareUS: 3_600_000_000, HeldUS: 3_600_000_000}}
	game.MemoryUsedBytes, game.ActivityPercent = gpu.Optional[uint64]{}, gpu.Optional[uint32]{}
	game.PowerMW, game.TemperatureC, game.LastActive = gpu.Optional[int64]{}, gpu.Optional[int64]{}, time.Time{}
	return withWorkloads(node(card), game)
}

func lostCard() *snapshot.Snapshot {
	good, lost, hung, odd := a100(0), a100(1), a100(2), a100(3)
	good.Reading.FanPercent = []int64{33, 41}
	lost.Up, lost.Reason, lost.DownUS = false, gpu.DownLost, 90_000_000
	lost.Reading = &gpu.Reading{Card: lost.Identity, State: gpu.StateDown, Reason: gpu.DownLost}
	lost.XIDs = map[uint64]snapshot.XID{79: {Count: 1, Last: now.Add(-90 * time.Second)}}
	hung.Up, hung.Reason, hung.Reading = false, "hung", nil
	odd.Up, odd.Reason, odd.Reading = false, "nvmlDeviceGetMemoryInfo: Unknown Error (999)", nil
	s := withWorkloads(node(good, lost, hung, odd), container(lost, "alice", "train"))
	s.Expected = 5
	return s
}

func nvmlDown() *snapshot.Snapshot {
	s := node()
	s.NVMLUp, s.NVMLError, s.Expected = false, "driver/library version mismatch: reboot or reload the driver", 8
	s.Exporter.Collectors["nvml"] = snapshot.CollectorState{Error: s.NVMLError}
	s.Exporter.JournalError = "disk full"
	return s
}

func oddNames() *snapshot.Snapshot {
	card := a100(0)
	card.Identity.Name = "NVIDIA \"A100\" \\ \xff\xfe\x00end"
	names := []string{
		"say \"hi\"", "two\nlines", "back\\slash", "bad\xff\xfeutf8", "nul\x00byte", "esc\x1b[31m", "cr\rlf\r\n", "模型训练", "tab\there",
		"# HELP x", "{}=,", "\u2028line separator", "", string(make([]byte, 2000)),
	}
	var workloads []snapshot.Workload
	for i, name := range names {
		w := container(card, "user\xc3", name)
		w.Key.User += name
		w.FirstSeen = w.FirstSeen.Add(time.Duration(i) * time.Second)
		workloads = append(workloads, w)
	}
	s := withWorkloads(node(card, card), workloads...)
	s.Driver.DriverVersion = "550\n\"54\xff"
	return s
}

// folded is a node on which only two workloads may be shown; see goldenLimit.
func folded() *snapshot.Snapshot {
	card := a100(0)
	var workloads []snapshot.Workload
	for i := range 5 {
		for _, user := range []string{"alice", "bob"} {
			w := container(card, user, fmt.Sprintf("job-%d", i))
			w.FirstSeen = w.FirstSeen.Add(time.Duration(i) * time.Minute)
			w.TemperatureC = gpu.Some(int64(60 + i))
			workloads = append(workloads, w)
		}
	}
	workloads[9].MemoryUsedBytes = gpu.Optional[uint64]{}
	s := withWorkloads(node(card), workloads...)
	for i := range workloads {
		s.Resources = append(s.Resources, onNode(workloads[i], int64(i+1)*1_000_000, gib, gpu.Some(int64(1<<i))))
	}
	return s
}

// goldenLimit is the limit on workloads a golden file is made with.
func goldenLimit(machine string) int {
	if machine == "folded" {
		return 2
	}
	return DefaultMaxWorkloads
}

// sameLabelSet has one name in two projects, which labels don't tell apart.
func sameLabelSet() *snapshot.Snapshot {
	card := a100(0)
	old, young := container(card, "alice", "train"), container(card, "alice", "train")
	old.Key.Project, old.Detail.Image, old.Present, old.Processes = "speech", "old:1", false, 0
	young.FirstSeen = young.FirstSeen.Add(time.Hour)
	return withWorkloads(node(card), young, old)
}

// crowded is a node with cards cards and perCard workloads on each.
func crowded(cards, perCard int) *snapshot.Snapshot {
	s := node()
	for index := range cards {
		card := a100(index)
		s.Cards = append(s.Cards, card)
		for i := range perCard {
			w := container(card, fmt.Sprintf("user%02d", i%20), fmt.Sprintf("job-%d-%d", index, i))
			w.Totals.ShareUS += int64(i) * 1_234_567
			w.Totals.EnergyMJ += int64(i) * 7_654_321
			s.Workloads = append(s.Workloads, w)
		}
	}
	s.Expected = cards
	return s
}
