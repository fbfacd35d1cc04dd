// Package gpu holds what a card says at one instant, or why it says nothing.
//
// It is plain data: it crosses the pipe from the NVML child to the exporter
// and is the only thing about a GPU that later stages ever see.
package gpu

import "context"

// Instant is a moment on both clocks of the node, taken together.
type Instant struct {
	// MonotonicUS is CLOCK_MONOTONIC in microseconds. It is the same clock in
	// every process of one boot, so instants from the child compare with ours.
	MonotonicUS int64
	// WallUS is the wall clock in microseconds since the Unix epoch.
	WallUS int64
}

// Optional is a value that a card may not be able to give. The zero value is
// "not known", which is never the same as zero.
type Optional[T any] struct {
	Value T
	Known bool
}

// Some is a known value.
func Some[T any](value T) Optional[T] { return Optional[T]{Value: value, Known: true} }

// Get returns the value and whether it is known.
func (o Optional[T]) Get() (T, bool) { return o.Value, o.Known }

// State says what a reading is worth.
type State uint8

const (
	// StateGood is a card that answered: its process lists are whole.
	StateGood State = iota
	// StateDown is a card that says it cannot work: lost, reset required or
	// refused. The time until the next reading is counted as down.
	StateDown
	// StateFailed is a reading that could not be completed (an error that says
	// nothing about the card's health, or one that is not understood). It
	// carries no process list and is not evidence of anything.
	StateFailed
)

// Down reasons, the values of the label reason of gpu_down_reason.
const (
	DownLost          = "lost"           // NVML_ERROR_GPU_IS_LOST
	DownResetRequired = "reset_required" // NVML_ERROR_RESET_REQUIRED
	DownRefused       = "refused"        // NVML_ERROR_NO_PERMISSION, NVML_ERROR_OPERATING_SYSTEM
)

// Card is a card's identity and what about it does not change while it works.
type Card struct {
	UUID     string // NVML's full form, GPU-xxxxxxxx-…
	Index    int    // NVML index; frozen per UUID by the exporter
	Name     string // product name, valid UTF-8
	PCIBusID string // domain:bus:device.function, as NVML prints it
	// Minor is the N of the card's device file /dev/nvidiaN, which is not always
	// its index.
	Minor           Optional[int64]
	Serial          string
	VBIOS           string
	MIGMode         Optional[bool]
	PersistenceMode Optional[bool]
	// PassedThrough says that the card is given to virtual machines: the node's
	// driver does not have it, and nothing but its holder is known.
	PassedThrough bool
	// AccountingMode is whether the driver keeps account of processes itself, as
	// of when the card was first read.
	AccountingMode Optional[bool]
}

// Driver is what the driver and the library say of themselves.
type Driver struct {
	DriverVersion string
	CUDAVersion   string // major.minor
	NVMLVersion   string
}

// Process is one PID with a context on a device. A PID is listed once,
// whichever of NVML's three lists it was on.
type Process struct {
	PID      uint32
	Compute  bool // NVML compute list
	Graphics bool // NVML graphics list
	MPS      bool // NVML MPS-client list
	// MemoryBytes is unknown where NVML says NVML_VALUE_NOT_AVAILABLE (2^64-1).
	MemoryBytes Optional[uint64]
}

// Sample is one record of nvmlDeviceGetProcessUtilization: a process's use of
// the engines since the previous call, in percent.
type Sample struct {
	PID                          uint32
	SM, Memory, Encoder, Decoder uint32 // percent
	TimestampUS                  uint64 // NVML's own clock
}

// Instance is one MIG compute instance of a card.
type Instance struct {
	UUID             string // MIG-…
	GPUInstance      int
	ComputeInstance  int
	Profile          string // e.g. "2g.35gb"
	Slices           int64  // compute slices of the card's SlicesTotal
	MemoryTotalBytes Optional[uint64]
	MemoryUsedBytes  Optional[uint64]
	Processes        []Process
}

// Temperature thresholds by name, in °C, the values of label threshold.
const (
	ThresholdSlowdown     = "slowdown"
	ThresholdShutdown     = "shutdown"
	ThresholdMaxOperating = "max_operating"
	ThresholdMemoryMax    = "memory_max"
)

// Reading is what one card said at one instant.
type Reading struct {
	Card   Card
	At     Instant // stamped before the first call of the reading
	TookUS int64   // how long the reading took
	State  State
	// Reason says why State is not StateGood: a Down… constant for StateDown,
	// free text naming call and return code for StateFailed.
	Reason string

	// SlicesTotal is the number of compute slices of the card when MIG is on
	// (7 on an A100 or H100, 4 on an A30), 0 when it is off.
	SlicesTotal int64
	Instances   []Instance
	// Processes are those of the whole card; empty when MIG is on, where every
	// process belongs to an instance.
	Processes []Process

	// Samples are the per-process samples newer than those of the previous
	// reading of the same child. SamplesKnown is false where the driver has no
	// per-process figure (MIG, old drivers) and at a child's first reading,
	// whose samples reach back before it.
	Samples      []Sample
	SamplesKnown bool

	UtilizationPercent        Optional[uint32] // SM, of the last sample period
	MemoryUtilizationPercent  Optional[uint32]
	EncoderUtilizationPercent Optional[uint32]
	DecoderUtilizationPercent Optional[uint32]

	MemoryTotalBytes    Optional[uint64]
	MemoryUsedBytes     Optional[uint64] // without the driver's reserve
	MemoryReservedBytes Optional[uint64]
	MemoryFreeBytes     Optional[uint64]

	TemperatureC       Optional[int64] // core sensor
	MemoryTemperatureC Optional[int64]
	ThresholdsC        map[string]int64 // by Threshold… name; absent if not had
	PowerMW            Optional[int64]
	PowerLimitMW       Optional[int64] // enforced limit
	EnergyMJ           Optional[int64] // the card's own counter, since driver load

	ClocksMHz  map[string]int64 // "sm", "memory", "graphics", "video"
	FanPercent []int64          // by fan number
	// ThrottleReasons is the clocks event reasons bit mask.
	ThrottleReasons Optional[uint64]

	PCIeGeneration    Optional[int64] // current
	PCIeGenerationMax Optional[int64]
	PCIeWidth         Optional[int64]
	PCIeWidthMax      Optional[int64]

	// ECCErrors are volatile counts by kind ("corrected", "uncorrected").
	ECCErrors map[string]int64

	// Events are the XIDs delivered for this card since its last reading.
	Events []XIDEvent

	// DroppedValues counts values thrown away as out of range in this reading,
	// by metric name.
	DroppedValues map[string]int64
}

// UnattributedMemoryBytes is used memory that no listed process explains;
// unknown if the card's or any process's own memory is.
func (r *Reading) UnattributedMemoryBytes() Optional[uint64] {
	used, known := r.MemoryUsedBytes.Get()
	explain := func(processes []Process) {
		for _, process := range processes {
			bytes, has := process.MemoryBytes.Get()
			known = known && has
			used -= min(used, bytes)
		}
	}
	explain(r.Processes)
	for _, instance := range r.Instances {
		explain(instance.Processes)
	}
	if !known {
		return Optional[uint64]{}
	}
	return Some(used)
}

// XIDEvent is one NVML critical XID event.
type XIDEvent struct {
	XID uint64
	At  Instant
}

// Pass is one round over all cards: what the source delivers per interval.
type Pass struct {
	At     Instant
	Driver Driver
	// Error is why NVML as a whole is not available; empty while it is.
	Error string
	// Expected is the number of cards NVML counted, those refused included.
	Expected int
	// Readings of the cards that answered within their deadline. A card that
	// hangs is absent: its last reading is not repeated.
	Readings []Reading
	// Hung are UUIDs of the cards whose worker is still inside a call.
	Hung []string
}

// Source delivers passes until ctx ends or it can do no more.
type Source interface {
	// Run calls deliver once per pass, from one goroutine. It returns ctx's
	// error when ctx ends, and any other error only if no remedy is left.
	Run(ctx context.Context, deliver func(Pass)) error
}
