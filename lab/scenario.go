// Package lab describes a simulated GPU server: what its cards, processes and
// faults are, as the text that the stand-in NVML library of lab/nvml reads.
//
// The library computes everything from that text and the wall clock, so a
// scenario is a history, not a state: to change a running world add a Change
// (or end a process), don't edit a base value, which would alter the past and
// make the energy counter jump.
package lab

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Scenario is one simulated server. The zero value is a driver without cards.
type Scenario struct {
	// DriverVersion is e.g. "550.54.15"; empty: that of the library's profile.
	DriverVersion string
	// NVMLVersion is e.g. "12.550.54.15"; empty: made from the others.
	NVMLVersion string
	// CUDAVersion is 1000 × major + 10 × minor; 0: that of the profile.
	CUDAVersion int
	// InitReturn is what nvmlInit answers: 0, or e.g. 9 (driver not loaded),
	// 18 (library and driver differ), 999.
	InitReturn int
	// Epoch is what all times below count from, and when the energy counters
	// and the sample ring begin. Zero: the file's modification time, which a
	// rewritten file changes.
	Epoch time.Time
	// RingCapacity is what a probe for per-process samples answers; 0: 72.
	RingCapacity int

	GPUs      []GPU // in NVML's order
	Processes []Process
	Instances []Instance
	Accounts  []Account
	Changes   []Change
	XIDs      []XID
	Faults    []Fault
	Delays    []Delay
	Hangs     []Hang
	Quirks    []Quirk
}

// GPU is one card. Empty texts: UUID and PCIBusID are made from the number,
// Name is "NVIDIA Lab GPU", the others are not supported.
type GPU struct {
	UUID       string // GPU-…
	Name       string // any bytes but NUL
	Serial     string
	VBIOS      string
	PCIBusID   string // domain:bus:device.function, domain of 8 digits
	PartNumber string
	Values     Values
}

// Process types.
const (
	Compute   = "C"
	Graphics  = "G"
	MPSClient = "M" // on the compute list too
)

// Process is one context on a card. A PID may have several, of other types or
// with other times.
type Process struct {
	GPU int
	PID uint32
	// PIDFile is read for the PID instead (relative names: beside the
	// scenario); the process is listed while the file is there.
	PIDFile string
	// Type is Compute (also if empty), Graphics or MPSClient.
	Type string
	// MemoryBytes is what the process lists say. MemoryUnknown: they say
	// NVML_VALUE_NOT_AVAILABLE.
	MemoryBytes   uint64
	MemoryUnknown bool
	// SM, Memory, Encoder and Decoder are the use of the engines in per cent.
	SM, Memory, Encoder, Decoder int
	// MIG: the process runs in instance (GPUInstance, ComputeInstance).
	MIG                          bool
	GPUInstance, ComputeInstance int
	// From and To are when the context is there, after the epoch. A To of 0:
	// for ever.
	From, To time.Duration
}

// Instance is one MIG compute instance. A card with any has MIG mode on, unless
// MIGMode says otherwise.
type Instance struct {
	GPU                          int
	GPUInstance, ComputeInstance int
	UUID                         string // MIG-…; empty: made from the card's
	Profile                      string // e.g. "2g.35gb", "1c.3g.40gb"
	// Slices are the compute instance's slices, GPUInstanceSlices those of its
	// GPU instance; 0: what Profile says.
	Slices, GPUInstanceSlices int
	// MemoryTotalMiB and MemoryUsedMiB; 0: what Profile says, and the sum of
	// the processes.
	MemoryTotalMiB, MemoryUsedMiB int64
	From, To                      time.Duration
}

// Account is one entry of accounting mode, written out. A card with any has the
// mode on.
type Account struct {
	GPU                      int
	PID                      uint32
	UtilizationPercent       int
	MemoryUtilizationPercent int
	MaxMemoryMiB             int64
	TimeMS                   int64 // answered once it has ended
	StartUS                  int64 // Unix time; 0: the epoch
	Running                  bool
}

// Change sets values of a card from an instant on.
type Change struct {
	At     time.Duration
	GPU    int
	Values Values
}

// XID is one critical error event, delivered once to each event set that was
// registered before it.
type XID struct {
	At   time.Duration
	GPU  int
	Code int
}

// Any stands for all cards, and for calls without a card.
const Any = -1

// Fault makes a function answer Return, Count times in each client (0: always).
type Fault struct {
	GPU      int    // or Any
	Function string // with or without its _v suffix; "*": all but init
	Return   int
	Count    int
}

// Delay makes a function slow.
type Delay struct {
	GPU      int
	Function string
	By       time.Duration
}

// Hang makes a function block until a scenario without this line is written.
type Hang struct {
	GPU      int
	Function string
}

// Quirk is a way in which drivers were seen to misbehave.
type Quirk struct {
	GPU  int
	Name string
	N    int
}

// Quirk names.
const (
	// SamplesProbeZero: the probe for per-process samples answers count 0.
	SamplesProbeZero = "samples_probe_zero"
	// SamplesGrow: the set grew since the probe; the call after it answers a
	// larger count with INSUFFICIENT_SIZE, again and again.
	SamplesGrow = "samples_grow"
	// SamplesGarbage: N rows of dead clients, with impossible values.
	SamplesGarbage = "samples_garbage"
	// ListZero: process lists answer count 0 with INSUFFICIENT_SIZE.
	ListZero = "list_zero"
	// ListEndless: process lists want one more entry however many are offered.
	ListEndless = "list_endless"
	// NoMIGPermission: a card's own process lists answer NO_PERMISSION while
	// MIG is on.
	NoMIGPermission = "no_mig_permission"
)

// WriteFile puts the scenario at path in one step, so that no reader sees half
// of it. Readable by everyone: clients under any user load it.
func (s Scenario) WriteFile(path string) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("scenario %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // after the rename there is nothing to remove
	_, err = f.WriteString(s.String())
	if err == nil {
		err = f.Chmod(0o644)
	}
	if closeErr := f.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("scenario %s: %w", path, err)
	}
	return nil
}

// Forget drops what ended before an instant and folds older changes into the
// cards' base values, so that the text of a world that runs for weeks stays
// short. The counters go on as they were; only per-process history older than
// before is lost.
func (s *Scenario) Forget(before time.Duration) {
	// Copies of a Scenario share their slices: leave those alone.
	s.Processes = slices.DeleteFunc(slices.Clone(s.Processes), func(p Process) bool { return p.To != 0 && p.To < before })
	s.GPUs, s.Changes = slices.Clone(s.GPUs), slices.Clone(s.Changes)
	slices.SortStableFunc(s.Changes, func(a, b Change) int { return cmp.Compare(a.At, b.At) })
	n := 0
	for n < len(s.Changes) && s.Changes[n].At < before {
		c := s.Changes[n]
		s.GPUs[c.GPU].Values = s.GPUs[c.GPU].Values.fold(c)
		n++
	}
	s.Changes = s.Changes[n:]
}
