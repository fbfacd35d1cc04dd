package nvml_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/gpu/child"
	"gpuledger/exporter/gpu/nvml"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// A process can load one NVML only, and some of these are meant to kill it. So
// each test reads in a child, as the exporter does: this binary, run again.
const (
	childVariable    = "NVML_TEST_CHILD"
	libraryVariable  = "NVML_TEST_LIBRARY"
	intervalVariable = "NVML_TEST_INTERVAL"
	testInterval     = 50 * time.Millisecond
	patience         = 30 * time.Second
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	interval, err := time.ParseDuration(os.Getenv(intervalVariable))
	if err == nil {
		var reader *nvml.Reader
		reader, err = nvml.Open(nvml.Options{LibraryPath: os.Getenv(libraryVariable), Interval: interval, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
		if err == nil {
			err = child.Main(ctx, reader)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// node is a node being read.
type node struct {
	t          *testing.T
	scenario   string
	passes     chan gpu.Pass
	supervisor *child.Supervisor
}

// readLibrary reads a scenario through a library until the test ends.
func readLibrary(t *testing.T, library string, s lab.Scenario) *node {
	t.Helper()
	n := &node{t: t, scenario: labtest.Write(t, s), passes: make(chan gpu.Pass, 10000)}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(childVariable, "1")
	t.Setenv(libraryVariable, library)
	t.Setenv(intervalVariable, testInterval.String())
	t.Setenv("GPULAB_SCENARIO", n.scenario)
	n.supervisor, err = child.NewSupervisor(child.Options{
		Command: []string{self}, Interval: testInterval,
		Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- n.supervisor.Run(ctx, func(pass gpu.Pass) {
			select {
			case n.passes <- pass:
			default: // a test that has seen enough
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if !errors.Is(err, context.Canceled) {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			t.Error("Run does not end")
		}
	})
	return n
}

func readNode(t *testing.T, s lab.Scenario) *node {
	t.Helper()
	return readLibrary(t, labtest.BuildLibrary(t), s)
}

// wait returns the first pass that is as wanted.
func (n *node) wait(what string, wanted func(gpu.Pass) bool) gpu.Pass {
	n.t.Helper()
	deadline := time.After(patience)
	var last gpu.Pass
	for {
		select {
		case last = <-n.passes:
			if wanted(last) {
				return last
			}
		case <-deadline:
			n.t.Fatalf("no pass with %s; the last was %+v", what, last)
		}
	}
}

// write changes the world.
func (n *node) write(s lab.Scenario) {
	n.t.Helper()
	if err := s.WriteFile(n.scenario); err != nil {
		n.t.Fatal(err)
	}
}

// latest drops what was read before now.
func (n *node) latest() {
	for {
		select {
		case <-n.passes:
		default:
			return
		}
	}
}

func good(count int) func(gpu.Pass) bool {
	return func(pass gpu.Pass) bool {
		states := 0
		for _, r := range pass.Readings {
			if r.State == gpu.StateGood {
				states++
			}
		}
		return pass.Error == "" && states == count
	}
}

func reading(pass gpu.Pass, index int) *gpu.Reading {
	for i := range pass.Readings {
		if pass.Readings[i].Card.Index == index {
			return &pass.Readings[i]
		}
	}
	return nil
}

func state(index int, state gpu.State, reason string) func(gpu.Pass) bool {
	return func(pass gpu.Pass) bool {
		r := reading(pass, index)
		return r != nil && r.State == state && strings.Contains(r.Reason, reason)
	}
}

func epoch() time.Time { return time.Now().Add(-100 * time.Second).Truncate(time.Second) }

func TestReadsEverything(t *testing.T) {
	before := nvml.Now()
	pass := readNode(t, lab.Scenario{
		Epoch: epoch(), DriverVersion: "550.54.15", CUDAVersion: 12040,
		GPUs: []lab.GPU{{
			UUID: "GPU-11111111-2222-3333-4444-555555555555", Name: "NVIDIA \xffH200\n", Serial: "123", VBIOS: "96.00", PCIBusID: "00000000:18:00.0",
			Values: lab.Values{
				lab.MemoryTotalMiB: 1000, lab.MemoryUsedMiB: 300, lab.TemperatureC: 61, lab.PowerMW: 312345, lab.EnergyMJ: 1000,
				lab.UtilizationPercent: 87, lab.ThrottleReasons: 0x40, lab.MinorNumber: 3,
			},
		}, {}},
		Processes: []lab.Process{
			{PID: 30, MemoryBytes: 3 << 20}, {PID: 30, Type: lab.Graphics, MemoryBytes: 3 << 20}, {PID: 30, Type: lab.MPSClient, MemoryBytes: 3 << 20},
			{PID: 10, MemoryUnknown: true}, {PID: 20, Type: lab.Graphics, MemoryBytes: 1 << 20},
		},
	}).wait("both cards", good(2))
	if pass.Expected != 2 || pass.Driver.DriverVersion != "550.54.15" || pass.Driver.CUDAVersion != "12.4" || len(pass.Hung) != 0 {
		t.Errorf("pass %+v", pass)
	}
	r := reading(pass, 0)
	if r.Card.UUID != "GPU-11111111-2222-3333-4444-555555555555" || r.Card.Name != "NVIDIA \uFFFDH200" || r.Card.Serial != "123" ||
		r.Card.VBIOS != "96.00" || r.Card.PCIBusID != "00000000:18:00.0" || r.Card.MIGMode != gpu.Some(false) || r.Card.Minor != gpu.Some[int64](3) {
		t.Errorf("card %+v", r.Card)
	}
	want := []gpu.Process{
		{PID: 10, Compute: true},
		{PID: 20, Graphics: true, MemoryBytes: gpu.Some[uint64](1 << 20)},
		{PID: 30, Compute: true, Graphics: true, MPS: true, MemoryBytes: gpu.Some[uint64](3 << 20)},
	}
	if !slices.Equal(r.Processes, want) {
		t.Errorf("processes %+v, want %+v", r.Processes, want)
	}
	if r.TemperatureC != gpu.Some[int64](61) || r.PowerMW != gpu.Some[int64](312345) || !r.EnergyMJ.Known || r.UtilizationPercent != gpu.Some[uint32](87) ||
		r.MemoryTotalBytes != gpu.Some[uint64](1000<<20) || r.MemoryUsedBytes != gpu.Some[uint64](300<<20) || r.ThrottleReasons != gpu.Some[uint64](0x40) {
		t.Errorf("reading %+v", r)
	}
	if after := nvml.Now(); r.At.MonotonicUS < before.MonotonicUS || r.At.MonotonicUS > after.MonotonicUS || r.At.WallUS < before.WallUS || r.TookUS < 0 {
		t.Errorf("read at %+v, between %+v and %+v", r.At, before, after)
	}
	// What a card does not say is not zero.
	if other := reading(pass, 1); other.Card.Serial != "" || len(other.Processes) != 0 {
		t.Errorf("second card %+v", other)
	}
}

func TestLossMakesCardsDown(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 4)}
	n := readNode(t, s)
	n.wait("four cards", good(4))
	s.GPUs[0].Values = lab.Values{lab.Fail: 16}
	s.GPUs[1].Values = lab.Values{lab.Fail: 4}
	s.GPUs[2].Values = lab.Values{lab.Lost: 1}
	n.write(s)
	n.wait("a card lost", state(2, gpu.StateDown, gpu.DownLost))
	n.wait("a card to reset", state(0, gpu.StateDown, gpu.DownResetRequired))
	pass := n.wait("a card refused", state(1, gpu.StateDown, gpu.DownRefused))
	if r := reading(pass, 3); r == nil || r.State != gpu.StateGood {
		t.Errorf("healthy card %+v", r)
	}
	if r := reading(pass, 2); r.Card.UUID == "" || len(r.Processes) != 0 || pass.Expected != 4 {
		t.Errorf("lost card %+v in %+v", r, pass)
	}
	for i := range s.GPUs {
		s.GPUs[i].Values = nil
	}
	n.write(s)
	n.wait("all four back", good(4))
	if n.supervisor.Restarts() != 0 {
		t.Error("the child was replaced for a card that was lost")
	}
}

// A card that goes makes the others move up. What is read through handles of
// before must never be taken for the card that they were given for.
func TestHandlesThatMove(t *testing.T) {
	first := lab.GPU{UUID: "GPU-aaaaaaaa-0000-4000-8000-000000000000", Values: lab.Values{lab.TemperatureC: 41}}
	second := lab.GPU{UUID: "GPU-bbbbbbbb-0000-4000-8000-000000000000", Values: lab.Values{lab.TemperatureC: 52}}
	s := lab.Scenario{Epoch: epoch(), GPUs: []lab.GPU{first, second}}
	n := readNode(t, s)
	n.wait("two cards", good(2))
	truthful := func(pass gpu.Pass) {
		for _, r := range pass.Readings {
			celsius, known := r.TemperatureC.Get()
			if want := map[string]int64{first.UUID: 41, second.UUID: 52}[r.Card.UUID]; known && celsius != want {
				t.Fatalf("%s has the %d °C of the other", r.Card.UUID, celsius)
			}
		}
	}
	s.GPUs = []lab.GPU{second}
	n.write(s)
	n.wait("the second card at the first place, and no other", func(pass gpu.Pass) bool {
		truthful(pass)
		return len(pass.Readings) == 1 && pass.Readings[0].Card.UUID == second.UUID && pass.Readings[0].State == gpu.StateGood
	})
	s.GPUs = []lab.GPU{first, second}
	n.write(s)
	n.wait("the first place told from the second", func(pass gpu.Pass) bool {
		truthful(pass)
		return good(2)(pass)
	})
}

func TestFailures(t *testing.T) {
	for _, test := range []struct {
		function string
		ret      int
		state    gpu.State
		reason   string
	}{
		{"nvmlDeviceGetComputeRunningProcesses", 999, gpu.StateFailed, "GetComputeRunningProcesses: UNKNOWN (999)"},
		{"nvmlDeviceGetComputeRunningProcesses", 3, gpu.StateFailed, "NOT_SUPPORTED"},
		{"nvmlDeviceGetGraphicsRunningProcesses", 20, gpu.StateFailed, "MEMORY"},
		{"nvmlDeviceGetMPSComputeRunningProcesses", 4, gpu.StateDown, gpu.DownRefused},
		{"nvmlDeviceGetComputeRunningProcesses", 17, gpu.StateDown, gpu.DownRefused},
		{"nvmlDeviceGetComputeRunningProcesses", 2, gpu.StateFailed, "INVALID_ARGUMENT"},
		{"nvmlDeviceGetPowerUsage", 15, gpu.StateDown, gpu.DownLost},
		{"nvmlDeviceGetTemperature", 16, gpu.StateDown, gpu.DownResetRequired},
	} {
		t.Run(fmt.Sprint(test.function, test.ret), func(t *testing.T) {
			pass := readNode(t, lab.Scenario{
				Epoch: epoch(), GPUs: make([]lab.GPU, 2), Processes: []lab.Process{{PID: 7}},
				Faults: []lab.Fault{{Function: test.function, Return: test.ret}},
			}).wait("the failure", state(0, test.state, test.reason))
			if r := reading(pass, 0); len(r.Processes) != 0 || r.SamplesKnown {
				t.Errorf("a reading that failed says %+v", r)
			}
			if r := reading(pass, 1); r == nil || r.State != gpu.StateGood {
				t.Errorf("the other card %+v", r)
			}
		})
	}
}

func TestMetricsMayBeMissing(t *testing.T) {
	s := lab.Scenario{
		Epoch: epoch(), GPUs: []lab.GPU{{Values: lab.Values{lab.TemperatureC: 4000, lab.PowerMW: 90_000_000, lab.UtilizationPercent: 50}}},
		Faults: []lab.Fault{
			{Function: "nvmlDeviceGetUtilizationRates", Return: 3, Count: 1}, // remembered, though asked again it would answer
			{Function: "nvmlDeviceGetTotalEnergyConsumption", Return: 999, Count: 1},
			{Function: "nvmlDeviceGetSerial", Return: 4},
			{Function: "nvmlDeviceGetMemoryInfo_v2", Return: 25},
		},
	}
	n := readNode(t, s)
	first := reading(n.wait("a card", good(1)), 0)
	if first.EnergyMJ.Known || first.UtilizationPercent.Known || first.TemperatureC.Known || first.PowerMW.Known {
		t.Errorf("first reading %+v", first)
	}
	if first.DroppedValues["temperature"] != 1 || first.DroppedValues["power"] != 1 {
		t.Errorf("dropped %v", first.DroppedValues)
	}
	if !first.MemoryUsedBytes.Known || first.MemoryReservedBytes.Known {
		t.Errorf("memory by the older call: %+v", first)
	}
	second := reading(n.wait("a card", good(1)), 0)
	if !second.EnergyMJ.Known || second.UtilizationPercent.Known {
		t.Errorf("second reading %+v", second)
	}
}

func TestHangHoldsUpItsOwnCardOnly(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 3)}
	n := readNode(t, s)
	uuid := reading(n.wait("three cards", good(3)), 1).Card.UUID
	s.Hangs = []lab.Hang{{GPU: 1, Function: "nvmlDeviceGetPowerUsage"}}
	n.write(s)
	hung := func(pass gpu.Pass) bool { return slices.Equal(pass.Hung, []string{uuid}) && good(2)(pass) }
	n.wait("one card hung", hung)
	for range 3 {
		n.wait("the others going on", hung)
	}
	s.Hangs = nil
	n.write(s)
	pass := n.wait("it back", good(3))
	// The reading that hung came in at last. It was not delivered: what came
	// is a reading of this pass.
	for _, r := range pass.Readings {
		if r.At.MonotonicUS < pass.At.MonotonicUS || len(pass.Hung) != 0 {
			t.Errorf("reading of %d is older than its pass, of %d", r.At.MonotonicUS, pass.At.MonotonicUS)
		}
	}
	if n.supervisor.Restarts() != 0 {
		t.Error("the child was replaced for a card that hung")
	}
}

// Every second reading takes longer than its deadline. None of those may be
// delivered, and the samples of the time they were for are in the next.
func TestLateReadingsAreThrownAway(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 2), Delays: []lab.Delay{{GPU: 0, Function: "nvmlDeviceGetPowerUsage", By: 700 * time.Millisecond}}}
	n := readNode(t, s)
	for range 4 {
		pass := n.wait("the healthy card", good(1))
		if r := reading(pass, 0); r != nil {
			t.Fatalf("a reading past its deadline was delivered: %+v", r)
		}
	}
}

func TestHangWhileStarting(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 2), Hangs: []lab.Hang{{GPU: 0, Function: "nvmlDeviceGetUUID"}}}
	n := readNode(t, s)
	if pass := n.wait("the other card", good(1)); pass.Expected != 2 || pass.Readings[0].Card.Index != 1 {
		t.Errorf("pass %+v", pass)
	}
}

func TestSamples(t *testing.T) {
	s := lab.Scenario{
		Epoch: epoch(), GPUs: make([]lab.GPU, 2),
		Processes: []lab.Process{{PID: 5, SM: 60, Memory: 20}},
	}
	n := readNode(t, s)
	first := n.wait("both cards", good(2))
	for _, r := range first.Readings {
		if r.SamplesKnown || len(r.Samples) != 0 {
			t.Errorf("first reading knows samples, which reach back before it: %+v", r.Samples)
		}
	}
	newest := uint64(0)
	for range 3 {
		pass := n.wait("new samples", func(pass gpu.Pass) bool {
			r := reading(pass, 0)
			return r != nil && r.SamplesKnown && len(r.Samples) > 0
		})
		sample := reading(pass, 0).Samples[0]
		if sample.PID != 5 || sample.SM == 0 || sample.SM > 100 || sample.TimestampUS <= newest {
			t.Errorf("sample %+v after %d", sample, newest)
		}
		newest = sample.TimestampUS
	}
	second := n.wait("an idle card", func(pass gpu.Pass) bool { r := reading(pass, 1); return r != nil && r.SamplesKnown })
	if r := reading(second, 1); len(r.Samples) != 0 {
		t.Errorf("idle card has samples %+v", r.Samples)
	}
	s.Processes = append(s.Processes, lab.Process{GPU: 1, PID: 6, SM: 90, From: time.Since(s.Epoch)})
	n.write(s)
	n.wait("the first process of a card", func(pass gpu.Pass) bool {
		r := reading(pass, 1)
		return r != nil && r.SamplesKnown && len(r.Samples) == 1 && r.Samples[0].PID == 6
	})
}

func TestQuirksOfDrivers(t *testing.T) {
	base := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 2), Processes: []lab.Process{{PID: 5, SM: 60, MemoryBytes: 1}, {GPU: 1, PID: 6, MemoryBytes: 1}}}
	with := func(quirk string, count int) lab.Scenario {
		s := base
		s.Quirks = []lab.Quirk{{GPU: 0, Name: quirk, N: count}}
		return s
	}
	// check waits for a later pass, so that the child has survived some.
	check := func(t *testing.T, s lab.Scenario, wanted func(gpu.Pass) bool) {
		t.Helper()
		n := readNode(t, s)
		for range 3 {
			n.wait("what is wanted", wanted)
		}
		if n.supervisor.Restarts() != 0 {
			t.Error("the child died of it")
		}
	}
	t.Run("probe says none", func(t *testing.T) {
		check(t, with(lab.SamplesProbeZero, 0), func(pass gpu.Pass) bool {
			r := reading(pass, 0)
			return good(2)(pass) && r.SamplesKnown && len(r.Samples) == 0
		})
	})
	t.Run("samples grow for ever", func(t *testing.T) {
		check(t, with(lab.SamplesGrow, 150), func(pass gpu.Pass) bool { return good(2)(pass) && !reading(pass, 0).SamplesKnown })
	})
	t.Run("garbage samples", func(t *testing.T) {
		check(t, with(lab.SamplesGarbage, 10), func(pass gpu.Pass) bool {
			r := reading(pass, 0)
			for _, sample := range r.Samples {
				if sample.SM > 100 || sample.PID != 5 {
					t.Errorf("garbage got through: %+v", sample)
				}
			}
			return good(2)(pass) && r.DroppedValues["process_utilization"] > 0
		})
	})
	t.Run("list of none that is too long", func(t *testing.T) {
		check(t, with(lab.ListZero, 0), func(pass gpu.Pass) bool {
			return state(0, gpu.StateFailed, "PANIC")(pass) && state(1, gpu.StateGood, "")(pass)
		})
	})
}

// go-nvml can't be stopped from asking for ever more room; the kernel can stop
// the child from having it.
func TestListWithoutEnd(t *testing.T) {
	n := readNode(t, lab.Scenario{
		Epoch: epoch(), GPUs: make([]lab.GPU, 2), Processes: []lab.Process{{PID: 5}}, Quirks: []lab.Quirk{{GPU: 0, Name: lab.ListEndless}},
	})
	n.wait("the child's end", func(pass gpu.Pass) bool { return pass.Error != "" && n.supervisor.Restarts() > 0 })
	n.write(lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 2)})
	n.wait("both cards, once the driver is mended", good(2))
}

func TestDriverThatOverrunsMemory(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 1), Processes: []lab.Process{{PID: 5}, {PID: 6}, {PID: 7}}}
	n := readLibrary(t, labtest.BuildProfile(t, "535.54"), s)
	for range 3 {
		n.wait("the refusal", state(0, gpu.StateFailed, "install 535.104 or newer"))
	}
	if n.supervisor.Restarts() != 0 {
		t.Error("the child died")
	}
}

func TestDriverGenerations(t *testing.T) {
	for _, profile := range []string{"470", "535", "550", "580"} {
		t.Run(profile, func(t *testing.T) {
			n := readLibrary(t, labtest.BuildProfile(t, profile), lab.Scenario{
				Epoch: epoch(), GPUs: []lab.GPU{{Values: lab.Values{lab.TemperatureC: 55, lab.ThrottleReasons: 4}}}, Processes: []lab.Process{{PID: 5, SM: 30, MemoryBytes: 1 << 20}},
			})
			for range 3 {
				pass := n.wait("a card", good(1))
				r := reading(pass, 0)
				if len(r.Processes) != 1 || r.TemperatureC != gpu.Some[int64](55) || r.ThrottleReasons != gpu.Some[uint64](4) || !r.MemoryUsedBytes.Known {
					t.Fatalf("reading %+v", r)
				}
			}
			if n.supervisor.Restarts() != 0 {
				t.Error("the child died of a symbol it does not have")
			}
		})
	}
}

func TestMIG(t *testing.T) {
	s := lab.Scenario{
		Epoch: epoch(), GPUs: []lab.GPU{{Name: "NVIDIA H200"}, {}},
		Instances: []lab.Instance{
			{GPUInstance: 1, UUID: "MIG-one", Profile: "2g.35gb", MemoryUsedMiB: 64},
			{GPUInstance: 2, Profile: "1c.3g.71gb", MemoryUsedMiB: 700},
		},
		Processes: []lab.Process{
			{PID: 5, MemoryBytes: 64 << 20, MIG: true, GPUInstance: 1, SM: 50},
			{PID: 5, Type: lab.Graphics, MemoryBytes: 64 << 20, MIG: true, GPUInstance: 1},
			{PID: 6, MIG: true, GPUInstance: 2},
		},
	}
	n := readNode(t, s)
	n.wait("both cards", good(2))
	pass := n.wait("both cards", good(2))
	r := reading(pass, 0)
	if r.SlicesTotal != 7 || len(r.Instances) != 2 || len(r.Processes) != 0 || r.SamplesKnown || r.Card.MIGMode != gpu.Some(true) {
		t.Fatalf("MIG card %+v", r)
	}
	one, two := r.Instances[0], r.Instances[1]
	if one.UUID != "MIG-one" || one.Profile != "2g.35gb" || one.Slices != 2 || one.GPUInstance != 1 || one.MemoryUsedBytes != gpu.Some[uint64](64<<20) ||
		!slices.Equal(one.Processes, []gpu.Process{{PID: 5, Compute: true, Graphics: true, MemoryBytes: gpu.Some[uint64](64 << 20)}}) {
		t.Errorf("first instance %+v", one)
	}
	if two.Profile != "1c.3g.71gb" || two.Slices != 1 || len(two.Processes) != 1 || two.Processes[0].PID != 6 {
		t.Errorf("second instance %+v", two)
	}
	if other := reading(pass, 1); other.SlicesTotal != 0 || other.Card.MIGMode != gpu.Some(false) {
		t.Errorf("card without MIG %+v", other)
	}
	// The instances are cut anew while we read.
	s.Instances = []lab.Instance{{GPUInstance: 0, UUID: "MIG-all", Profile: "7g.141gb"}}
	s.Processes = nil
	n.write(s)
	n.wait("the new cut", func(pass gpu.Pass) bool {
		r := reading(pass, 0)
		return r != nil && len(r.Instances) == 1 && r.Instances[0].UUID == "MIG-all" && r.Instances[0].Slices == 7
	})
	s.Instances = nil
	n.write(s)
	n.wait("MIG off", func(pass gpu.Pass) bool {
		r := reading(pass, 0)
		return r != nil && r.State == gpu.StateGood && r.SlicesTotal == 0 && r.SamplesKnown
	})
}

func TestDriverComesLater(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), InitReturn: 9, GPUs: make([]lab.GPU, 1)}
	n := readNode(t, s)
	if pass := n.wait("an error", func(pass gpu.Pass) bool { return pass.Error != "" }); !strings.Contains(pass.Error, "modprobe nvidia") || len(pass.Readings) != 0 {
		t.Errorf("pass %+v", pass)
	}
	s.InitReturn = 0
	n.write(s)
	n.wait("the card", good(1))
	if n.supervisor.Restarts() != 0 {
		t.Error("the child was replaced, which nothing called for")
	}
	// And goes away again while it is read.
	s.Faults = []lab.Fault{{GPU: lab.Any, Function: "nvmlDeviceGetComputeRunningProcesses", Return: 1, Count: 3}}
	n.write(s)
	n.wait("NVML uninitialised", func(pass gpu.Pass) bool { return strings.Contains(pass.Error, "UNINITIALIZED (1)") })
	n.wait("the card back", good(1))
}

func TestLibraryMismatchNeedsNewProcess(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), InitReturn: 18, GPUs: make([]lab.GPU, 1)}
	n := readNode(t, s)
	n.wait("the remedy", func(pass gpu.Pass) bool {
		return strings.Contains(pass.Error, "reboot, or stop every GPU program and reload")
	})
	n.wait("a new child failing too", func(pass gpu.Pass) bool { return n.supervisor.Restarts() > 1 })
	s.InitReturn = 0
	n.write(s)
	n.wait("the card", good(1))
}

func TestLibraryMissingOrBroken(t *testing.T) {
	n := readLibrary(t, "/nonexistent/libnvidia-ml.so.1", lab.Scenario{})
	n.wait("the path and the remedy", func(pass gpu.Pass) bool {
		return strings.Contains(pass.Error, "/nonexistent/libnvidia-ml.so.1") && strings.Contains(pass.Error, "install the NVIDIA driver") && strings.Contains(pass.Error, "--nvml.library-path")
	})
}

func TestLibraryThatIsNotNVML(t *testing.T) {
	n := readLibrary(t, "libc.so.6", lab.Scenario{})
	n.wait("the reason", func(pass gpu.Pass) bool { return strings.Contains(pass.Error, "libc.so.6: it has no nvmlInit") })
}

func TestXIDs(t *testing.T) {
	s := lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 2)}
	n := readNode(t, s)
	n.wait("both cards", good(2))
	// Events that come before the watcher has registered are not ours to see,
	// so throw them until one arrives.
	deadline := time.Now().Add(patience)
	for {
		s.XIDs = append(s.XIDs, lab.XID{At: time.Since(s.Epoch), GPU: 1, Code: 79})
		n.write(s)
		n.latest()
		var got *gpu.Reading
		for range 10 {
			pass := n.wait("both cards", good(2))
			if r := reading(pass, 1); len(r.Events) > 0 {
				got = r
				break
			}
			if r := reading(pass, 0); len(r.Events) > 0 {
				t.Fatalf("event on the wrong card: %+v", r.Events)
			}
		}
		if got != nil {
			if got.Events[0].XID != 79 || got.Events[0].At.WallUS == 0 {
				t.Errorf("events %+v", got.Events)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("no event arrived")
		}
	}
}

func TestKilledChildIsReplaced(t *testing.T) {
	n := readNode(t, lab.Scenario{Epoch: epoch(), GPUs: make([]lab.GPU, 1)})
	n.wait("the card", good(1))
	pids := childrenOf(t, os.Getpid())
	if len(pids) != 1 {
		t.Fatalf("children %v, want one", pids)
	}
	if err := syscall.Kill(pids[0], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	n.wait("a new child's first reading", func(pass gpu.Pass) bool {
		return good(1)(pass) && n.supervisor.Restarts() == 1 && !reading(pass, 0).SamplesKnown
	})
}

func childrenOf(t testing.TB, pid int) []int {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, task := range tasks {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		if err != nil {
			continue
		}
		for _, field := range strings.Fields(string(text)) {
			var child int
			if _, err := fmt.Sscan(field, &child); err != nil {
				t.Fatal(err)
			}
			pids = append(pids, child)
		}
	}
	return pids
}
