// Package snapshot is the one immutable value that everything a node shows is
// rendered from. The sampler builds a new one each pass and swaps it in; a
// reader never waits and never sees half of one.
package snapshot

import (
	"sync/atomic"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
)

// Snapshot is the node at one instant. It is never changed once published.
type Snapshot struct {
	Seq       uint64 // grows by one each snapshot
	Node      string
	Run       string
	At        time.Time
	Started   time.Time // when the exporter started; created time of its counters
	NVMLUp    bool
	NVMLError string // why NVML is not up, and what to do
	Driver    gpu.Driver
	Expected  int // cards NVML counts, refused ones included
	Cards     []Card
	Workloads []Workload
	// Resources are what workloads use of the node beside its cards, one entry a
	// workload, whatever the number of its cards.
	Resources []Resources
	Exporter  Exporter
}

// Card is one card and what is known of it now.
type Card struct {
	// Reading is the card's reading of this pass; nil if it gave none in time.
	Reading *gpu.Reading
	// Identity survives readings that fail.
	Identity gpu.Card
	Up       bool
	Reason   string // why it is not up: a gpu.Down… constant or "hung" or "failed"
	// Holders are the processes on the card and its instances, joined with
	// who is behind them, and containers assigned to it without a process.
	Holders []Holder

	// Totals since the exporter started, from committed rows.
	IdleUS, DownUS, MeteredUS int64
	// ConservationErrorUS is |Σ rows − Σ committed intervals|, from the rows as
	// the journal took them.
	ConservationErrorUS     int64
	EnergyMJ                gpu.Optional[int64] // measured since the exporter started
	ThrottleUS              map[string]int64    // by reason, since the exporter started
	XIDs                    map[uint64]XID
	UnattributedMemoryBytes gpu.Optional[uint64]
	// Search says how the search for who has that memory stands, and Suspects
	// who that may be, the most suspicious first.
	Search    Search
	Suspects  []Suspect
	ECCErrors map[string]int64
}

// XID is how often a card reported one XID, and when last.
type XID struct {
	Count int64
	Last  time.Time
}

// Holder is one process (or one assignment without a process) on a device.
type Holder struct {
	Device      string // UUID of card or MIG instance
	Profile     string // MIG profile
	PID         uint32 // 0 for an assignment without a process
	Process     gpu.Process
	Workload    meter.Workload
	Detail      Detail
	Pending     bool   // still being looked up
	Command     string // program name (comm), valid UTF-8
	CommandLine string // full command line: only for the owner and root, never in metrics, journal or logs
	StartedAt   time.Time
	Zombie      bool
	System      bool // shown, never billed
	// Disagrees says that something else of high confidence names another user.
	Disagrees bool
	Holds     bool // counts as holding (not system, not graphics only)
	// ActivityPercent is the process's own SM activity in the last interval.
	ActivityPercent gpu.Optional[uint32]
	Estimated       bool
	LastActive      time.Time // zero if never seen active
}

// Detail is what hangs on a workload beside its key.
type Detail struct {
	ContainerID, ContainerName, Image string
	PodNamespace, PodName             string
	SlurmJob                          string
	Unit                              string
}

// Workload is one workload on one device and its totals since the exporter
// started. It stays for an hour after its end.
type Workload struct {
	Card, Device, Profile string
	Index                 int
	Key                   meter.Workload
	Detail                Detail
	Totals                meter.Totals
	Present               bool // has a process or assignment on the device now
	Processes             int
	ZombieProcesses       int
	MemoryUsedBytes       gpu.Optional[uint64]
	ActivityPercent       gpu.Optional[uint32]
	PowerMW               gpu.Optional[int64]
	TemperatureC          gpu.Optional[int64]
	HeldSince             time.Time
	LastActive            time.Time
	EndedAt               time.Time // zero while present
	FirstSeen             time.Time // created time of its counters
	Assigned              bool      // started with this GPU, no context yet
}

// Resources are what a workload that holds a GPU uses of the node beside it.
// Counters begin when it was first seen with one, and stay for an hour after
// its end; everything else is unknown then.
type Resources struct {
	Key       meter.Workload // AttributedBy empty
	FirstSeen time.Time      // created time of the counters

	CPUUS                   gpu.Optional[int64] // µs
	ReadBytes, WrittenBytes gpu.Optional[int64] // by storage

	// ResidentBytes is memory with no file behind it.
	ResidentBytes gpu.Optional[uint64]
	// CPUPercent is of one core, in the last interval.
	CPUPercent                                gpu.Optional[int64]
	ReadBytesPerSecond, WrittenBytesPerSecond gpu.Optional[int64]
}

// Exporter is the exporter's view of itself.
type Exporter struct {
	SampleDuration        time.Duration
	ChildRestarts         int64
	DroppedValues         map[string]int64 // by metric, since start
	GonePIDs              int64
	HiddenPIDs            int64
	ClockWaits            int64
	ClockJumps            int64
	DroppedEnergySteps    int64
	MaxGaps               int64 // intervals thrown away as longer than max-gap
	JournalBytes          int64
	JournalOldestUnpulled time.Duration // age of the oldest row never pulled
	JournalError          string
	JournalWaitingRows    int64
	Collectors            map[string]CollectorState // runtimes, procfs, nvml, journal
}

// CollectorState is how one input did at its last try.
type CollectorState struct {
	Up       bool
	Duration time.Duration
	Error    string
}

// Store holds the newest snapshot.
type Store struct{ current atomic.Pointer[Snapshot] }

// Load returns the newest snapshot, nil before the first.
func (s *Store) Load() *Snapshot { return s.current.Load() }

// Publish makes next the newest snapshot. next must not be changed afterwards.
func (s *Store) Publish(next *Snapshot) { s.current.Store(next) }
