package lab_test

import (
	"bufio"
	"debug/elf"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// began is an epoch long enough ago for the ring to be full.
func began() time.Time { return time.Now().Add(-time.Minute) }

func twoCards() lab.Scenario {
	return lab.Scenario{
		DriverVersion: "550.90.07",
		Epoch:         began(),
		GPUs: []lab.GPU{
			{UUID: "GPU-aaaa", Name: "odd \"name\"\n\xff#1", PCIBusID: "00000000:4B:00.0", Values: lab.Values{
				lab.MemoryTotalMiB: 1000, lab.MemoryReservedMiB: 100, lab.MemoryUsedMiB: 300,
				lab.UtilizationPercent: 87, lab.TemperatureC: 61, lab.PowerMW: 312345, lab.FanPercent: 40,
				lab.PowerLimitMW: 500000, lab.SlowdownTemperatureC: 90, lab.ECCUncorrected: 3,
			}},
			{Values: lab.Values{lab.EnergyMJ: lab.NotAvailable, lab.PowerMW: lab.NotAvailable, lab.MemoryTotalMiB: 2000}},
		},
		Processes: []lab.Process{{GPU: 1, PID: 11, MemoryBytes: 64 << 20, SM: 25}, {GPU: 1, PID: 12, MemoryUnknown: true, SM: 25}},
		Changes:   []lab.Change{{At: 10 * time.Second, GPU: 0, Values: lab.Values{lab.TemperatureC: 95, lab.ThrottleReasons: 0x40}}, {At: time.Hour, GPU: 0, Values: lab.Values{lab.TemperatureC: 20}}},
	}
}

func TestWorld(t *testing.T) {
	got := ask(t, "world", labtest.BuildLibrary(t), labtest.Write(t, twoCards()))
	expect(t, got, map[string]any{
		"init": 0, "count": 2, "driver": "550.90.07", "cuda": 12040,
		"0 uuid": "GPU-aaaa", "0 name": "odd \"name\"\n\ufffd#1", "0 bus": 0x4b, "0 temp": 95, "0 reasons": 0x40,
		"0 power": 312345, "0 fan": 40, "0 limit": 500000, "0 util": 87, "0 slowdown": 90, "0 ecc": 3,
		"0 v1 used": 400, "0 v2 used": 300, "0 v2 reserved": 100, "0 free": 600, "0 energy": true,
		"1 uuid": "GPU-00000000-0000-4000-8000-000000000001", "1 fan": "ret 3", "1 power": "ret 3", "1 energy": "ret 3",
		"1 util": 50, "1 v2 used": 64, "1 v2 reserved": 512,
	})
}

// Two processes, each with a library of its own, see one world.
func TestTwoClientsSeeTheSame(t *testing.T) {
	library, scenario := labtest.BuildLibrary(t), labtest.Write(t, twoCards())
	if diff := cmp.Diff(ask(t, "world", library, scenario), ask(t, "world", library, scenario)); diff != "" {
		t.Error(diff)
	}
}

func TestProcessLists(t *testing.T) {
	dir := t.TempDir()
	s := lab.Scenario{Epoch: began(), GPUs: make([]lab.GPU, 1), Processes: []lab.Process{
		{PID: 1, MemoryBytes: 1 << 20}, {PID: 2, Type: lab.Graphics}, {PID: 3, Type: lab.MPSClient, MemoryUnknown: true},
		{PID: 4, To: time.Second}, {PID: 5, From: time.Hour}, {PIDFile: dir + "/six"}, {PIDFile: dir + "/never"},
	}}
	if err := os.WriteFile(dir+"/six", []byte("6\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{
		"compute": []string{"1:1:-1", "3:?:-1", "6:0:-1"}, "graphics": []string{"2:0:-1"}, "mps": []string{"3:?:-1"},
	}
	for _, profile := range labtest.Profiles {
		if profile != "535.54" { // has lists of its own, below
			t.Run(profile, func(t *testing.T) {
				expect(t, ask(t, "processes", labtest.BuildProfile(t, profile), labtest.Write(t, s)), want)
			})
		}
	}
}

func TestLists535Overrun(t *testing.T) {
	s := lab.Scenario{GPUs: make([]lab.GPU, 1), Processes: []lab.Process{{PID: 1, MemoryBytes: 1 << 20}, {PID: 2, MemoryBytes: 2 << 20}}}
	got := ask(t, "overrun", labtest.BuildProfile(t, "535.54"), labtest.Write(t, s))
	list, _ := got["list"].([]any)
	if len(list) != 2 || list[0] != "1:1:-1" || list[1] == "2:2:-1" {
		t.Errorf("list %v: the second entry of 32 bytes should not read as one of 24", list)
	}
}

// What a process asks for is what it gets over a ring, and the device's own
// figure is the sum.
func TestSamples(t *testing.T) {
	s := lab.Scenario{Epoch: began(), GPUs: make([]lab.GPU, 2), Processes: []lab.Process{{PID: 1, SM: 50}, {PID: 2, SM: 25}}}
	library := labtest.BuildLibrary(t)
	got := ask(t, "samples", library, labtest.Write(t, s))
	expect(t, got, map[string]any{"ret": 2, "nothing new": "ret 6", "ring": 72, "ring value": 75, "type": 1, "idle": "ret 6", "idle ring": "ret 6"})
	for pid, want := range map[string]float64{"1": 50, "2": 25} {
		if v, _ := got[pid].(float64); math.Abs(v-want) > 3 {
			t.Errorf("pid %s: %v %%, want about %v", pid, got[pid], want)
		}
	}
	s.Quirks = []lab.Quirk{{Name: lab.SamplesProbeZero}}
	expect(t, ask(t, "grow", library, labtest.Write(t, s)), map[string]any{"ret": "ret 7"})
	s.Quirks = []lab.Quirk{{Name: lab.SamplesGarbage, N: 5}}
	expect(t, ask(t, "samples", library, labtest.Write(t, s)), map[string]any{"ret": 7, "0": 37100})
}

// Traps that end the process of a client that doesn't guard itself.
func TestTrapsKill(t *testing.T) {
	one := lab.Scenario{GPUs: make([]lab.GPU, 1)}
	code, stderr := die(t, "missing", labtest.BuildProfile(t, "470"), labtest.Write(t, one))
	if code != 127 || !strings.Contains(stderr, "undefined symbol: nvmlDeviceGetMemoryInfo_v2") {
		t.Errorf("missing symbol: exit %d, %s", code, stderr)
	}
	one.Quirks = []lab.Quirk{{Name: lab.SamplesGrow}}
	if _, stderr := die(t, "grow", labtest.BuildLibrary(t), labtest.Write(t, one)); !strings.Contains(stderr, "slice bounds out of range") {
		t.Errorf("grown set: %s", stderr)
	}
	one.Quirks = []lab.Quirk{{Name: lab.ListZero}}
	if _, stderr := die(t, "processes", labtest.BuildLibrary(t), labtest.Write(t, one)); !strings.Contains(stderr, "index out of range") {
		t.Errorf("empty list too small: %s", stderr)
	}
}

func TestMIG(t *testing.T) {
	s := lab.Scenario{
		Epoch: began(), GPUs: []lab.GPU{{Name: "NVIDIA H200"}},
		Instances: []lab.Instance{
			{GPUInstance: 1, UUID: "MIG-one", Profile: "2g.35gb"},
			{GPUInstance: 2, Profile: "1c.3g.71gb", MemoryUsedMiB: 700},
			{GPUInstance: 3, Profile: "1g.18gb", To: time.Second},
		},
		Processes: []lab.Process{{PID: 5, MemoryBytes: 64 << 20, MIG: true, GPUInstance: 1, SM: 50}, {PID: 6, MIG: true, GPUInstance: 2}},
	}
	library := labtest.BuildLibrary(t)
	expect(t, ask(t, "mig", library, labtest.Write(t, s)), map[string]any{
		"mode": 1, "max": 7, "util": "ret 3", "process util": "ret 3", "power": 70000, "end": 2,
		"card processes": []string{"5:64:1", "6:0:2"},
		"0 uuid":         "MIG-one", "0 name": "NVIDIA H200 MIG 2g.35gb", "0 gi": 1, "0 slices": 2, "0 used": 64, "0 total": 35 << 10,
		"0 processes": []string{"5:64:1"}, "0 power": "ret 3", "0 parent": 0,
		"1 slices": 1, "1 used": 700, "1 processes": []string{"6:0:2"},
	})
	s.Quirks = []lab.Quirk{{GPU: lab.Any, Name: lab.NoMIGPermission}}
	expect(t, ask(t, "mig", library, labtest.Write(t, s)), map[string]any{"card processes": "ret 4", "0 processes": []string{"5:64:1"}})
}

func TestAccounting(t *testing.T) {
	s := lab.Scenario{Epoch: began(), GPUs: make([]lab.GPU, 2), Accounts: []lab.Account{
		{PID: 900, UtilizationPercent: 40, MaxMemoryMiB: 900, TimeMS: 12000},
		{PID: 901, UtilizationPercent: 10, TimeMS: 5, Running: true},
		{PID: 900, UtilizationPercent: 99, Running: true}, // a reused number: the dead one hides it
	}}
	library := labtest.BuildLibrary(t)
	expect(t, ask(t, "accounting", library, labtest.Write(t, s)), map[string]any{
		"mode": 1, "900": "util 40 max 900 time 12000 running 0", "901": "util 10 max 0 time 0 running 1", "off": "ret 3",
	})
	s.Accounts = nil
	s.GPUs[0].Values = lab.Values{lab.AccountingMode: 1}
	s.Processes = []lab.Process{{PID: 7, SM: 60, MemoryBytes: 5 << 20, To: 20 * time.Second}}
	for pid := uint32(1000); pid < 1200; pid++ { // more of the dead than are kept
		s.Processes = append(s.Processes, lab.Process{PID: pid, To: time.Second})
	}
	got := ask(t, "accounting", library, labtest.Write(t, s))
	if list, _ := got["pids"].([]any); len(list) != 128 {
		t.Errorf("%d accounted, want the last 128", len(list))
	}
	s.Processes = s.Processes[:1]
	expect(t, ask(t, "accounting", library, labtest.Write(t, s)), map[string]any{"7": "util 60 max 5 time 20000 running 0"})
}

func TestFields(t *testing.T) {
	s := lab.Scenario{GPUs: []lab.GPU{{Values: lab.Values{lab.MemoryTemperatureC: 77, lab.EnergyMJ: lab.NotAvailable, lab.PowerMW: 5}}}}
	expect(t, ask(t, "fields", labtest.BuildLibrary(t), labtest.Write(t, s)), map[string]any{"call": 0, "0": 77, "1": "ret 3", "2": "ret 3", "3": 5})
}

func TestFaultsAndDelays(t *testing.T) {
	s := lab.Scenario{
		GPUs: make([]lab.GPU, 1),
		Faults: []lab.Fault{
			{GPU: 0, Function: "nvmlDeviceGetPowerUsage", Return: 15, Count: 2},
			{GPU: lab.Any, Function: "nvmlDeviceGetComputeRunningProcesses", Return: 999},
		},
		Delays: []lab.Delay{{GPU: lab.Any, Function: "nvmlDeviceGetTemperature", By: 30 * time.Millisecond}},
	}
	expect(t, ask(t, "faults", labtest.BuildLibrary(t), labtest.Write(t, s)), map[string]any{
		"0": "ret 15", "1": "ret 15", "2": 70000, "delayed": true, "list": "ret 999",
	})
}

// start runs a client up to its "ready", then act, and returns its answers.
func start(t *testing.T, name, library, scenario string, act func()) answers {
	t.Helper()
	cmd, stdout := clientCommand(t, name, library, scenario)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(stderr)
	if line, err := reader.ReadString('\n'); line != "ready\n" {
		_ = cmd.Process.Kill()
		t.Fatalf("client %s said %q (%v)", name, line, err)
	}
	act()
	if err := cmd.Wait(); err != nil {
		t.Fatalf("client %s: %v", name, err)
	}
	a := answers{}
	if err := json.Unmarshal(stdout.Bytes(), &a); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestHangEndsWithItsLine(t *testing.T) {
	s := lab.Scenario{GPUs: make([]lab.GPU, 1), Hangs: []lab.Hang{{GPU: 0, Function: "nvmlDeviceGetPowerUsage"}}}
	path := labtest.Write(t, s)
	got := start(t, "hang", labtest.BuildLibrary(t), path, func() {
		s.Hangs = nil
		s.GPUs[0].Values = lab.Values{lab.PowerMW: 4711}
		if err := s.WriteFile(path); err != nil {
			t.Error(err)
		}
	})
	// Only a call that waited for the new text can know this.
	expect(t, got, map[string]any{"power": 4711})
}

func TestXIDOnce(t *testing.T) {
	s := lab.Scenario{Epoch: began(), GPUs: make([]lab.GPU, 1), XIDs: []lab.XID{{At: time.Second, Code: 13}}} // before registration
	path := labtest.Write(t, s)
	got := start(t, "xid", labtest.BuildLibrary(t), path, func() {
		now := time.Since(s.Epoch)
		s.XIDs = append(s.XIDs, lab.XID{At: now, Code: 79}, lab.XID{At: now, Code: 79})
		if err := s.WriteFile(path); err != nil {
			t.Error(err)
		}
	})
	expect(t, got, map[string]any{"events": []string{"0:79", "0:79", "10"}})
}

func TestEnergy(t *testing.T) {
	epoch := time.Now().Add(-1000 * time.Second).Truncate(time.Second)
	s := lab.Scenario{Epoch: epoch, GPUs: []lab.GPU{{Values: lab.Values{lab.EnergyMJ: 5_000_000, lab.PowerMW: 100_000}}}, Changes: []lab.Change{
		{At: 400 * time.Second, Values: lab.Values{lab.PowerMW: 0}},
		{At: 2000 * time.Second, Values: lab.Values{lab.PowerMW: 900_000}},
	}}
	library := labtest.BuildLibrary(t)
	// 100 W for 400 s, then nothing: exact whenever it is read.
	expect(t, ask(t, "energy", library, labtest.Write(t, s)), map[string]any{"mj": fmt.Sprint(float64(45_000_000))})
	folded := s
	folded.Forget(500 * time.Second)
	if len(folded.Changes) != 1 {
		t.Errorf("%d changes left, want 1", len(folded.Changes))
	}
	expect(t, ask(t, "energy", library, labtest.Write(t, folded)), map[string]any{"mj": fmt.Sprint(float64(45_000_000))})
	// A reload of the driver starts the counter again.
	s.Changes = append(s.Changes, lab.Change{At: 600 * time.Second, Values: lab.Values{lab.EnergyMJ: 7}})
	expect(t, ask(t, "energy", library, labtest.Write(t, s)), map[string]any{"mj": 7})
	s.Forget(700 * time.Second)
	expect(t, ask(t, "energy", library, labtest.Write(t, s)), map[string]any{"mj": 7})
}

func TestLostAndRefused(t *testing.T) {
	s := lab.Scenario{Epoch: began(), GPUs: []lab.GPU{{Values: lab.Values{lab.Fail: 16}}, {Values: lab.Values{lab.Fail: 4}}, {}, {}},
		Changes: []lab.Change{{At: time.Second, GPU: 2, Values: lab.Values{lab.Lost: 1}}}}
	expect(t, ask(t, "lost", labtest.BuildLibrary(t), labtest.Write(t, s)), map[string]any{
		"count": 4, "0 handle": 0, "0 temp": "ret 16", "1 handle": "ret 4", "2 handle": "ret 15", "3 temp": 0,
	})
}

func TestInit(t *testing.T) {
	library := labtest.BuildLibrary(t)
	expect(t, ask(t, "init", library, labtest.Write(t, lab.Scenario{InitReturn: 18})), map[string]any{"init": 18})
	expect(t, ask(t, "init", library, "/nonexistent/scenario"), map[string]any{"init": 999})
}

// A typo must be seen.
func TestBadLinesFailInit(t *testing.T) {
	library := labtest.BuildLibrary(t)
	for _, bad := range []string{
		"gpu 0 tmep=5", "gqu 1", "gpu 0 temp=warm", "proc 0 sm=5", "proc 3 pid=1", "gpu 2", "at 5x gpu 0 temp=1", "at +1s gpu 0 name=x",
		"fault 0 nvmlDeviceGetPower 3", "fault 0 nvmlDeviceGetPowerUsage", "mig 0 gi=1", "quirk 0 none", "gpu 0 name=\"x", "driver 1 2",
		"proc 0 pid=1 type=X", "epoch yesterday",
	} {
		lines := []string{"gpu 0", bad}
		if strings.HasPrefix(bad, "gpu 0") {
			lines = lines[1:]
		}
		cmd, stdout := clientCommand(t, "init", library, text(t, lines...))
		var stderr strings.Builder
		cmd.Stderr = &stderr
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		if strings.TrimSpace(stdout.String()) != `{"init":999}` || !strings.HasPrefix(stderr.String(), "gpulab: ") {
			t.Errorf("%q: %s%s", bad, stdout, stderr.String())
		}
	}
}

func TestProfilesLackWhatTheirDriverLacks(t *testing.T) {
	want := map[string][]string{ // function: profiles that have it
		"nvmlDeviceGetUUID":                         {"470", "535.54", "535", "550", "580"},
		"nvmlDeviceGetComputeRunningProcesses":      {"470", "535.54", "535", "550", "580"},
		"nvmlDeviceGetComputeRunningProcesses_v2":   {"470", "535.54", "535", "550", "580"},
		"nvmlDeviceGetComputeRunningProcesses_v3":   {"535.54", "535", "550", "580"},
		"nvmlDeviceGetMemoryInfo_v2":                {"535.54", "535", "550", "580"},
		"nvmlDeviceGetRunningProcessDetailList":     {"535", "550", "580"},
		"nvmlDeviceGetCurrentClocksEventReasons":    {"535.54", "535", "550", "580"},
		"nvmlDeviceGetCurrentClocksThrottleReasons": {"470", "535.54", "535", "550", "580"},
		"nvmlDeviceGetTemperatureV":                 {"580"},
		"nvmlGpmSampleGet":                          {"535.54", "535", "550", "580"},
	}
	for _, profile := range labtest.Profiles {
		f, err := elf.Open(labtest.BuildProfile(t, profile))
		if err != nil {
			t.Fatal(err)
		}
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		soname, err := f.DynString(elf.DT_SONAME)
		if err != nil || len(soname) != 1 || soname[0] != "libnvidia-ml.so.1" {
			t.Errorf("%s: soname %v, %v", profile, soname, err)
		}
		exported := map[string]bool{}
		for _, s := range symbols {
			if s.Section == elf.SHN_UNDEF {
				continue
			}
			exported[s.Name] = true
			if !strings.HasPrefix(s.Name, "nvml") {
				t.Errorf("%s exports %s", profile, s.Name)
			}
		}
		for name, profiles := range want {
			if exported[name] != slices.Contains(profiles, profile) {
				t.Errorf("%s: exports %s: %v", profile, name, exported[name])
			}
		}
		_ = f.Close()
	}
}

func TestVersions(t *testing.T) {
	s := lab.Scenario{GPUs: []lab.GPU{{Values: lab.Values{lab.TemperatureC: 60, lab.SlowdownTemperatureC: 89}}}}
	expect(t, ask(t, "versions", labtest.BuildProfile(t, "580"), labtest.Write(t, s)), map[string]any{"margin": 29, "nvmlDeviceGetTemperatureV": true})
}
