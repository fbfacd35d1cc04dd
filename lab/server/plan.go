package server

import (
	"fmt"
	"time"

	"gpuledger/lab"
)

// Workload is one process of the simulated server and what it does on a card.
type Workload struct {
	Command string // its name, as ps shows it
	UID     uint32
	// Cgroup is where it is put, from the root of the hierarchy; empty for a
	// container, whose runtime says so.
	Cgroup string
	// Container runs it in a container of this name, with Owner as its label.
	Container string
	Owner     string
	// Every starts it again and again, each time for For; 0: it runs all the
	// time.
	Every, For time.Duration

	GPU         int
	Type        string
	MemoryMiB   int64
	SM, Memory  int
	GPUInstance int // of a MIG card; 0 elsewhere
}

func session(u User) string {
	return fmt.Sprintf("user.slice/user-%d.slice/session-1.scope", u.UID)
}

// The service is a system account without a person behind it.
const (
	serviceUser = "ollama"
	serviceUID  = 64055
)

// Plan is the demonstration's server: people in sessions, a container, a
// service, a display server, an idle hoarder and someone whose jobs come and
// go. With mig the last card is cut into instances.
func Plan(users []User, gpus int, withDocker, mig bool) (lab.Scenario, []Workload) {
	s := lab.Scenario{}
	for i := range gpus {
		s.GPUs = append(s.GPUs, lab.GPU{
			UUID:     fmt.Sprintf("GPU-1ab00000-%04x-4000-8000-00000000000%x", i, i&0xf),
			Name:     "NVIDIA H200",
			Serial:   fmt.Sprintf("16530240%05d", i),
			VBIOS:    "96.00.A5.00.01",
			PCIBusID: fmt.Sprintf("00000000:%02X:00.0", 0x18+i*0x11),
			Values:   lab.Values{lab.MemoryTotalMiB: 143771, lab.TemperatureC: idleC, lab.PowerMW: idleMW, lab.MemoryTemperatureC: 40, lab.EnergyMJ: 123_456_789},
		})
	}
	person := func(i int) User { return users[i%len(users)] }
	card := func(i int) int { return i % gpus }
	last := gpus - 1
	if mig {
		s.Instances = []lab.Instance{
			{GPU: last, GPUInstance: 1, Profile: "3g.71gb"},
			{GPU: last, GPUInstance: 2, Profile: "2g.35gb"},
		}
		card = func(i int) int { return i % max(last, 1) }
	}
	plan := []Workload{
		{Command: "train.py", UID: person(0).UID, Cgroup: session(person(0)), GPU: card(0), MemoryMiB: 81920, SM: 55, Memory: 30},
		{Command: "jupyter-kernel", UID: person(1).UID, Cgroup: session(person(1)), GPU: card(0), MemoryMiB: 12288, SM: 20, Memory: 5},
		{Command: "ollama", UID: serviceUID, Cgroup: "system.slice/ollama.service", GPU: card(1), MemoryMiB: 24576, SM: 30, Memory: 15},
		{Command: "notebook", UID: person(2).UID, Cgroup: session(person(2)), GPU: card(1), MemoryMiB: 40960},
		{Command: "Xorg", UID: 0, Cgroup: "system.slice/display-manager.service", GPU: card(0), Type: lab.Graphics, MemoryMiB: 64},
		{Command: "eval.py", UID: person(2).UID, Cgroup: session(person(2)), GPU: card(1), MemoryMiB: 8192, SM: 40, Memory: 10, Every: 30 * time.Second, For: 12 * time.Second},
	}
	if withDocker {
		plan[1] = Workload{Command: "finetune.py", UID: person(1).UID, Container: "gpu-lab-finetune", Owner: person(1).Name, GPU: card(0), MemoryMiB: 32768, SM: 35, Memory: 20}
	}
	for i := 3; i < len(users); i++ {
		plan = append(plan, Workload{Command: "infer.py", UID: users[i].UID, Cgroup: session(users[i]), GPU: card(i), MemoryMiB: 4096, SM: 5, Memory: 2})
	}
	if mig {
		plan = append(plan,
			Workload{Command: "mig-train.py", UID: person(0).UID, Cgroup: session(person(0)), GPU: last, MemoryMiB: 20480, GPUInstance: 1},
			Workload{Command: "mig-infer.py", UID: person(2).UID, Cgroup: session(person(2)), GPU: last, MemoryMiB: 4096, GPUInstance: 2})
		if gpus == 1 { // the only card is cut: all others would have no place
			plan = plan[len(plan)-2:]
		}
	}
	return s, plan
}

// An idle card, and what use adds to it.
const (
	idleC, fullC   = 32, 74
	idleMW, fullMW = 78_000, 690_000
)

// load is what a card's sensors say at a use of its engines.
func load(percent int) lab.Values {
	p := int64(min(percent, 100))
	return lab.Values{lab.PowerMW: idleMW + (fullMW-idleMW)*p/100, lab.TemperatureC: idleC + (fullC-idleC)*p/100}
}

// Example is a scenario that shows most of what the format can say.
func Example(epoch time.Time) lab.Scenario {
	s, plan := Plan([]User{{"alice", 1001}, {"bob", 1002}, {"carol", 1003}}, 3, false, true)
	s.DriverVersion = "550.54.15"
	s.Epoch = epoch.Truncate(time.Second)
	for i, w := range plan {
		p := lab.Process{GPU: w.GPU, PID: uint32(4001 + i), Type: w.Type, MemoryBytes: uint64(w.MemoryMiB) << 20, SM: w.SM, Memory: w.Memory,
			MIG: w.GPUInstance > 0, GPUInstance: w.GPUInstance}
		if w.Every > 0 {
			p.From, p.To = 30*time.Second, 30*time.Second+w.For
		}
		s.Processes = append(s.Processes, p)
	}
	hot := load(75)
	hot[lab.TemperatureC], hot[lab.ThrottleReasons] = 91, 0x40
	s.Changes = []lab.Change{{At: 0, GPU: 0, Values: load(75)}, {At: time.Minute, GPU: 0, Values: hot}, {At: 5 * time.Minute, GPU: 1, Values: lab.Values{lab.Lost: 1}}}
	s.XIDs = []lab.XID{{At: 90 * time.Second, GPU: 0, Code: 13}, {At: 5 * time.Minute, GPU: 1, Code: 79}}
	s.Delays = []lab.Delay{{GPU: lab.Any, Function: "nvmlDeviceGetProcessUtilization", By: 5 * time.Millisecond}}
	return s
}
