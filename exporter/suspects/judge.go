// Package suspects finds out who may be behind memory of a card that no
// process listed by NVML explains.
//
// A process that ended badly, or that NVML can't show, still has the card's
// device file open, or is caught in the kernel on its way out. Judge is the
// pure part: it takes what a walk over /proc found and says of each card who
// is suspected, why, and how strongly. Watcher is the goroutine that walks
// when there is a need.
package suspects

import (
	"cmp"
	"fmt"
	"path"
	"slices"
	"strings"

	"gpuledger/exporter/devicewalk"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
)

// Reasons of a suspicion. They are part of the JSON of gwho: never change one.
const (
	ReasonDeviceOpen      = "device_open"       // has the card's device file open
	ReasonDeviceMapped    = "device_mapped"     // has it mapped, and no longer open
	ReasonMainThreadEnded = "main_thread_ended" // the same, by threads that outlive the first
	ReasonEnding          = "ending"            // hangs in the kernel on its way out
	ReasonMPSServer       = "mps_server"        // has it open on behalf of others
	ReasonZombie          = "zombie"            // held the card, has ended and was not reaped
	ReasonListedElsewhere = "listed_elsewhere"  // has it open, NVML lists it on another card
	ReasonMPSClient       = "mps_client"        // has the driver open beside an MPS server
	ReasonDriverOpen      = "driver_open"       // has the driver open, but no card
	ReasonUnresponsive    = "unresponsive"      // can't be looked at: the look hangs in the kernel
	ReasonMonitor         = "monitor"           // has it open to watch it: no suspect
)

// Strengths of a suspicion. They are part of the JSON of gwho.
const (
	Strong = "strong"
	Likely = "likely"
	Weak   = "weak"
	None   = "none" // a program that watches cards
)

// mostSuspects bounds the suspects of one card.
const mostSuspects = 32

// Card is what NVML says of one card in a pass.
type Card struct {
	UUID  string
	Index int
	// Minor is the N of its /dev/nvidiaN.
	Minor gpu.Optional[int64]
	// UnexplainedBytes is memory in use that no listed process explains.
	UnexplainedBytes gpu.Optional[uint64]
	// Listed are the processes that NVML lists on it or on its instances.
	Listed map[uint32]meter.ProcessKey
}

// Suspect is a process that may be behind a card's unexplained memory.
type Suspect struct {
	Key      meter.ProcessKey // StartTicks is 0 for ReasonUnresponsive
	Reason   string
	Strength string
	// Why is a sentence's predicate: the process is its subject.
	Why string
}

// Judge says of each card with unexplained memory who is suspected, the
// strongest first. All are the cards of the pass; had says whether a process
// was seen to hold a card earlier.
func Judge(unexplained, all []Card, found devicewalk.Result, numbers Numbers, had func(key meter.ProcessKey, uuid string) bool) map[string][]Suspect {
	suspects := make(map[string][]Suspect, len(unexplained))
	for _, card := range unexplained {
		j := judge{card: card, all: all, numbers: numbers, had: had}
		j.findMPSServers(found.Processes)
		for _, process := range found.Processes {
			if _, listed := card.Listed[process.PID]; listed {
				continue
			}
			if suspect, ok := j.suspect(process); ok {
				suspects[card.UUID] = append(suspects[card.UUID], suspect)
			}
		}
		for _, pid := range found.Stuck {
			if _, listed := card.Listed[pid]; !listed {
				suspects[card.UUID] = append(suspects[card.UUID], Suspect{
					Key: meter.ProcessKey{PID: pid}, Reason: ReasonUnresponsive, Strength: Weak,
					Why: "can't be looked at: reading its entry in /proc hangs in the kernel",
				})
			}
		}
		sorted := suspects[card.UUID]
		slices.SortStableFunc(sorted, func(a, b Suspect) int {
			return cmp.Or(cmp.Compare(rank(a.Strength), rank(b.Strength)), cmp.Compare(a.Key.PID, b.Key.PID))
		})
		suspects[card.UUID] = sorted[:min(len(sorted), mostSuspects)]
	}
	return suspects
}

func rank(strength string) int { return slices.Index([]string{Strong, Likely, Weak, None}, strength) }

type judge struct {
	card       Card
	all        []Card
	numbers    Numbers
	had        func(key meter.ProcessKey, uuid string) bool
	mpsServers []devicewalk.Process // with this card open
}

// use is what a process has open or mapped of the driver.
type use struct {
	card     bool // this card
	mapped   bool // this card, by a mapping only
	anyCard  bool
	driver   string // a device of the driver as such
	cardName string // the card's device, as the driver names it
}

func (j *judge) use(p devicewalk.Process) use {
	u := use{cardName: "the GPU's device file"}
	minor, known := j.card.Minor.Get()
	if known {
		u.cardName = fmt.Sprintf("/dev/nvidia%d", minor)
	}
	for _, device := range p.Devices {
		number, driver := j.numbers.device(device.Number)
		switch {
		case number >= 0:
			u.anyCard = true
			// Of a card whose number is not known any may be meant.
			if !known || number == minor {
				u.mapped = device.Mapped && !u.card
				u.card = true
			}
		case driver != "":
			u.driver = cmp.Or(u.driver, driver)
		}
	}
	return u
}

func (j *judge) findMPSServers(processes []devicewalk.Process) {
	for _, p := range processes {
		if path.Base(p.Executable) == mpsServer && j.use(p).card {
			j.mpsServers = append(j.mpsServers, p)
		}
	}
}

const mpsServer = "nvidia-cuda-mps-server"

// monitors are programs that have cards open to watch or to keep them ready,
// and hold no memory of them. The name is that of root's own file.
var monitors = []string{
	"nvidia-persistenced", "nvidia-powerd", "nvidia-fabricmanager", "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "dcgmi",
	"nvidia-smi", "nvtop", "gpu-exporter", "gwho", "nvidia_gpu_exporter", "nvidia-device-plugin", "gpu-feature-discovery",
	"nvidia-cuda-mps-control",
}

// scripts are monitors that an interpreter runs; the process itself says what
// it is called, so that they are named and no more than named.
var scripts = []string{"nvitop", "gpustat"}

// suspect judges one process that NVML does not list on the card.
func (j *judge) suspect(p devicewalk.Process) (Suspect, bool) {
	key := meter.ProcessKey{PID: p.PID, StartTicks: p.Stat.StartTicks}
	u := j.use(p)
	s := Suspect{Key: key}
	threadsLeft := p.Stat.Zombie() && p.Stat.Threads > 1
	elsewhere := j.listedElsewhere(p.PID)
	switch {
	case p.ExecutableUID == 0 && slices.Contains(monitors, path.Base(p.Executable)):
		if !u.card {
			return s, false
		}
		s.Reason, s.Strength, s.Why = ReasonMonitor, None, "has "+u.cardName+" open to watch it, or to keep it ready"
	case p.ExecutableUID == 0 && slices.Contains(scripts, p.Stat.Command):
		if !u.card {
			return s, false
		}
		s.Reason, s.Strength, s.Why = ReasonMonitor, None, "has "+u.cardName+" open and calls itself "+p.Stat.Command
	case u.card && path.Base(p.Executable) == mpsServer:
		s.Reason, s.Strength, s.Why = ReasonMPSServer, Strong, "is an MPS server with "+u.cardName+" open, on behalf of its clients"
	case u.card && threadsLeft:
		s.Reason, s.Strength = ReasonMainThreadEnded, Strong
		s.Why = fmt.Sprintf("its main thread has ended, but %s that live on have %s open", threads(p.Stat.Threads-1), u.cardName)
	case u.card && len(elsewhere) > 0:
		s.Reason, s.Strength, s.Why = ReasonListedElsewhere, Likely, "has "+u.cardName+" open; NVML lists it on "+strings.Join(elsewhere, ", ")+" only"
	case u.card && u.mapped:
		s.Reason, s.Strength, s.Why = ReasonDeviceMapped, Strong, "has "+u.cardName+" mapped, and NVML does not list it"
	case u.card:
		s.Reason, s.Strength, s.Why = ReasonDeviceOpen, Strong, "has "+u.cardName+" open, and NVML does not list it"
	case p.Stat.Exiting() && (!p.Stat.Zombie() || threadsLeft):
		function := driverFunction(p.KernelStack)
		switch {
		case function != "":
			s.Reason, s.Strength, s.Why = ReasonEnding, Strong, "is ending and hangs in the NVIDIA driver ("+function+")"
		case j.had(key, j.card.UUID):
			s.Reason, s.Strength, s.Why = ReasonEnding, Strong, "held this GPU, is ending and does not get there"
		default:
			return s, false // most processes end like this, for a moment
		}
	case p.Stat.Zombie():
		if !j.had(key, j.card.UUID) {
			return s, false
		}
		s.Reason, s.Strength = ReasonZombie, Likely
		s.Why = fmt.Sprintf("held this GPU and has ended; its parent, PID %d, has not reaped it", p.Stat.ParentPID)
	case u.anyCard || len(elsewhere) > 0:
		return s, false // it is at another card
	case u.driver != "" && len(j.mpsServers) > 0:
		s.Reason, s.Strength = ReasonMPSClient, Weak
		if slices.ContainsFunc(j.mpsServers, func(server devicewalk.Process) bool { return server.UID == p.UID }) {
			s.Strength = Likely
		}
		s.Why = fmt.Sprintf("has the driver (%s) open while an MPS server, PID %d, has this GPU: perhaps one of its clients", u.driver, j.mpsServers[0].PID)
	case u.driver != "":
		s.Reason, s.Strength, s.Why = ReasonDriverOpen, Weak, "has the driver ("+u.driver+") open, but no GPU"
	default:
		return s, false
	}
	s.Why += circumstances(p, s.Reason)
	return s, true
}

// circumstances are what else is worth knowing of a suspect.
func circumstances(p devicewalk.Process, reason string) string {
	text := ""
	if p.Stat.State == 'D' && reason != ReasonMonitor {
		text += "; it sleeps in the kernel (state D)"
		if function := driverFunction(p.KernelStack); function != "" && reason != ReasonEnding {
			text += ", in " + function
		}
		text += ", so that no kill reaches it before it wakes"
	}
	if p.NamespacePID != 0 {
		text += fmt.Sprintf("; it is PID %d in a PID namespace of its own", p.NamespacePID)
	}
	return text
}

func threads(count int) string {
	if count == 1 {
		return "1 thread"
	}
	return fmt.Sprintf("%d threads", count)
}

// listedElsewhere are the other cards that NVML lists a process on.
func (j *judge) listedElsewhere(pid uint32) []string {
	var names []string
	for _, other := range j.all {
		if _, listed := other.Listed[pid]; listed && other.UUID != j.card.UUID {
			names = append(names, fmt.Sprintf("GPU %d", other.Index))
		}
	}
	return names
}

// driverFunction is the innermost function of NVIDIA's modules in a kernel
// stack; empty if none is.
func driverFunction(stack string) string {
	for line := range strings.Lines(stack) {
		line = strings.TrimSpace(line)
		name := strings.TrimSpace(strings.TrimPrefix(line, "[<0>]"))
		if end := strings.IndexAny(name, "+ "); end >= 0 {
			name = name[:end]
		}
		// A stack names the module; wchan gives the function alone.
		if strings.Contains(line, "[nvidia") || strings.HasPrefix(name, "nvidia_") || strings.HasPrefix(name, "nv_") || strings.HasPrefix(name, "uvm_") {
			return name
		}
	}
	return ""
}
