package suspects

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"gpuledger/exporter/devicewalk"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
)

var (
	nvidia0 = procfs.OpenDevice{Number: procfs.DeviceNumber{Major: 195}, Path: "/dev/nvidia0"}
	nvidia1 = procfs.OpenDevice{Number: procfs.DeviceNumber{Major: 195, Minor: 1}, Path: "/dev/nvidia1"}
	control = procfs.OpenDevice{Number: procfs.DeviceNumber{Major: 195, Minor: 255}, Path: "/dev/nvidiactl"}
	modeset = procfs.OpenDevice{Number: procfs.DeviceNumber{Major: 195, Minor: 254}, Path: "/dev/nvidia-modeset"}
	uvm     = procfs.OpenDevice{Number: procfs.DeviceNumber{Major: 507}, Path: "/dev/nvidia-uvm"}
	numbers = Numbers{UVM: 507, Caps: 508}
)

func mapped(d procfs.OpenDevice) procfs.OpenDevice { d.Mapped = true; return d }

func stat(state byte, threads int) procfs.Stat {
	return procfs.Stat{Command: "python3", State: state, Threads: threads, StartTicks: 77, ParentPID: 12}
}

// exiting is a process on its way out, as the kernel writes it.
func exiting(t *testing.T, state string, threads string) procfs.Stat {
	t.Helper()
	s, err := procfs.ParseStat([]byte("9 (python3) " + state + " 12 0 0 0 -1 4194308 0 0 0 0 0 0 0 0 20 0 " + threads + " 0 77 0"))
	if err != nil {
		t.Fatal(err)
	}
	if !s.Exiting() {
		t.Fatalf("%+v is not exiting", s)
	}
	return s
}

const closing = "[<0>] os_acquire_semaphore+0x2b/0x40 [nvidia]\n[<0>] nvidia_close+0x11f/0x2f0 [nvidia]\n[<0>] __fput+0xe3/0x270\n"

func TestJudge(t *testing.T) {
	python := func(devices ...procfs.OpenDevice) devicewalk.Process {
		return devicewalk.Process{PID: 9, Stat: stat('S', 4), Devices: devices, Executable: "/usr/bin/python3.13", UID: 1001}
	}
	with := func(p devicewalk.Process, change func(*devicewalk.Process)) devicewalk.Process { change(&p); return p }
	program := func(path string, owner int64, devices ...procfs.OpenDevice) devicewalk.Process {
		return with(python(devices...), func(p *devicewalk.Process) { p.Executable, p.ExecutableUID = path, owner })
	}
	server := with(program("/usr/bin/nvidia-cuda-mps-server", 0, nvidia0, control, uvm), func(p *devicewalk.Process) { p.PID = 5; p.UID = 1001 })
	for name, test := range map[string]struct {
		processes []devicewalk.Process
		stuck     []uint32
		listed    [2]map[uint32]meter.ProcessKey // on cards 0 and 1
		had       bool
		reason    string // of the last suspect; empty for none
		strength  string
		why       string
		count     int // of suspects, 0 for as many as there is a reason
	}{
		"has it open":             {processes: []devicewalk.Process{python(uvm, control, nvidia0)}, reason: ReasonDeviceOpen, strength: Strong, why: "has /dev/nvidia0 open, and NVML does not list it"},
		"has it mapped":           {processes: []devicewalk.Process{python(mapped(nvidia0))}, reason: ReasonDeviceMapped, strength: Strong, why: "mapped"},
		"open counts for more":    {processes: []devicewalk.Process{python(nvidia0, mapped(nvidia0))}, reason: ReasonDeviceOpen, strength: Strong},
		"has another open":        {processes: []devicewalk.Process{python(nvidia1, uvm)}},
		"is listed":               {processes: []devicewalk.Process{python(nvidia0)}, listed: [2]map[uint32]meter.ProcessKey{{9: {PID: 9, StartTicks: 77}}, nil}},
		"is listed elsewhere":     {processes: []devicewalk.Process{python(nvidia0, nvidia1)}, listed: [2]map[uint32]meter.ProcessKey{nil, {9: {}}}, reason: ReasonListedElsewhere, strength: Likely, why: "GPU 1 only"},
		"only the driver":         {processes: []devicewalk.Process{python(uvm)}, reason: ReasonDriverOpen, strength: Weak, why: "nvidia-uvm"},
		"only the driver, not us": {processes: []devicewalk.Process{python(uvm)}, listed: [2]map[uint32]meter.ProcessKey{nil, {9: {}}}},
		"modeset is no suspicion": {processes: []devicewalk.Process{python(modeset)}},
		"the main thread ended":   {processes: []devicewalk.Process{with(python(nvidia0), func(p *devicewalk.Process) { p.Stat = stat('Z', 3) })}, reason: ReasonMainThreadEnded, strength: Strong, why: "2 threads that live on have /dev/nvidia0 open"},
		"sleeps in the kernel":    {processes: []devicewalk.Process{with(python(nvidia0), func(p *devicewalk.Process) { p.Stat, p.KernelStack = stat('D', 1), closing })}, reason: ReasonDeviceOpen, strength: Strong, why: "no kill reaches it"},
		"ending, in the driver":   {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat, p.KernelStack = exiting(t, "D", "1"), closing })}, reason: ReasonEnding, strength: Strong, why: "hangs in the NVIDIA driver (os_acquire_semaphore)"},
		"ending, wchan only":      {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat, p.KernelStack = exiting(t, "D", "1"), "nv_kthread_q_flush" })}, reason: ReasonEnding, strength: Strong, why: "nv_kthread_q_flush"},
		"ending, elsewhere": {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) {
			p.Stat, p.KernelStack = exiting(t, "D", "1"), "[<0>] nfs_wait_bit_killable+0x1/0x2 [nfs]"
		})}},
		"ending, had it":           {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat = exiting(t, "D", "1") })}, had: true, reason: ReasonEnding, strength: Strong},
		"threads ending in driver": {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat, p.KernelStack = stat('Z', 2), closing })}, reason: ReasonEnding, strength: Strong},
		"zombie that had it":       {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat = stat('Z', 1) })}, had: true, reason: ReasonZombie, strength: Likely, why: "PID 12, has not reaped it"},
		"zombie that never had it": {processes: []devicewalk.Process{with(python(), func(p *devicewalk.Process) { p.Stat = stat('Z', 1) })}},
		"monitor":                  {processes: []devicewalk.Process{program("/usr/bin/nvidia-persistenced", 0, nvidia0)}, reason: ReasonMonitor, strength: None},
		"calls itself a monitor":   {processes: []devicewalk.Process{program("/home/alice/nvidia-persistenced", 1001, nvidia0)}, reason: ReasonDeviceOpen, strength: Strong},
		"monitor of another card":  {processes: []devicewalk.Process{program("/usr/bin/nvtop", 0, nvidia1)}},
		"script that watches":      {processes: []devicewalk.Process{with(program("/usr/bin/python3.13", 0, nvidia0), func(p *devicewalk.Process) { p.Stat.Command = "nvitop" })}, reason: ReasonMonitor, strength: None},
		"MPS server":               {processes: []devicewalk.Process{server}, reason: ReasonMPSServer, strength: Strong},
		"MPS client":               {processes: []devicewalk.Process{server, python(uvm, control)}, reason: ReasonMPSClient, strength: Likely, why: "an MPS server, PID 5", count: 2},
		"stranger beside MPS":      {processes: []devicewalk.Process{server, with(python(uvm), func(p *devicewalk.Process) { p.UID = 1002 })}, reason: ReasonMPSClient, strength: Weak, count: 2},
		"in a namespace":           {processes: []devicewalk.Process{with(python(nvidia0), func(p *devicewalk.Process) { p.NamespacePID = 7 })}, reason: ReasonDeviceOpen, strength: Strong, why: "it is PID 7 in a PID namespace of its own"},
		"can't be looked at":       {stuck: []uint32{9}, reason: ReasonUnresponsive, strength: Weak},
		"nobody":                   {},
	} {
		t.Run(name, func(t *testing.T) {
			cards := []Card{{UUID: "GPU-a", Minor: gpu.Some[int64](0), Listed: test.listed[0]}, {UUID: "GPU-b", Index: 1, Minor: gpu.Some[int64](1), Listed: test.listed[1]}}
			had := func(key meter.ProcessKey, uuid string) bool {
				return test.had && uuid == "GPU-a" && key == meter.ProcessKey{PID: 9, StartTicks: 77}
			}
			got := Judge(cards[:1], cards, devicewalk.Result{Processes: test.processes, Stuck: test.stuck}, numbers, had)
			if len(got) > 1 {
				t.Errorf("a card that is not asked about has suspects: %+v", got)
			}
			suspects := got["GPU-a"]
			if test.reason == "" {
				if len(suspects) > 0 {
					t.Errorf("suspects %+v, want none", suspects)
				}
				return
			}
			if len(suspects) != max(1, test.count) {
				t.Fatalf("suspects %+v", suspects)
			}
			last := suspects[len(suspects)-1]
			if last.Key.PID != 9 && test.reason != ReasonMPSServer || last.Reason != test.reason || last.Strength != test.strength || !strings.Contains(last.Why, test.why) {
				t.Errorf("got %+v, want %s %s %q", last, test.reason, test.strength, test.why)
			}
		})
	}
}

func TestCardWithoutMinorNumber(t *testing.T) {
	card := Card{UUID: "GPU-a"}
	got := Judge([]Card{card}, []Card{card}, devicewalk.Result{Processes: []devicewalk.Process{{PID: 9, Stat: stat('S', 1), Devices: []procfs.OpenDevice{nvidia1}}}},
		numbers, func(meter.ProcessKey, string) bool { return false })
	want := []Suspect{{Key: meter.ProcessKey{PID: 9, StartTicks: 77}, Reason: ReasonDeviceOpen, Strength: Strong, Why: "has the GPU's device file open, and NVML does not list it"}}
	if diff := cmp.Diff(want, got["GPU-a"]); diff != "" {
		t.Error(diff)
	}
}

func TestStrongestFirstAndBounded(t *testing.T) {
	card := Card{UUID: "GPU-a", Minor: gpu.Some[int64](0)}
	var processes []devicewalk.Process
	for pid := range uint32(100) {
		processes = append(processes, devicewalk.Process{PID: pid + 1, Stat: stat('S', 1), Devices: []procfs.OpenDevice{uvm}})
	}
	processes = append(processes, devicewalk.Process{PID: 200, Stat: stat('S', 1), Devices: []procfs.OpenDevice{nvidia0}})
	got := Judge([]Card{card}, nil, devicewalk.Result{Processes: processes}, numbers, func(meter.ProcessKey, string) bool { return false })["GPU-a"]
	if len(got) != mostSuspects || got[0].Key.PID != 200 || got[1].Key.PID != 1 {
		t.Errorf("%d suspects, %+v", len(got), got[:2])
	}
}

func TestByName(t *testing.T) {
	for name, want := range map[string]bool{
		"/dev/nvidia0": true, "/dev/nvidia17": true, "/dev/nvidia": false, "/dev/nvidiactl": false, "/dev/nvidia255": false,
		"/dev/nvidia01": false, "/home/alice/nvidia0": false, "/dev/nvidia-uvm": false,
	} {
		if number, ok := byName(name); ok != want || ok && number.Major != 195 {
			t.Errorf("%s: %+v, %v", name, number, ok)
		}
	}
}
