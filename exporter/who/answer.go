// Package who answers "who holds what" from a snapshot.
//
// An Answer is made for one Viewer: other people's command lines are left out
// when it is built, not when it is shown, so nothing behind Build can show
// them. docs/gwho.md documents the JSON.
package who

import (
	"time"
)

// Version is the version of the JSON form of Answer. Fields are added without
// raising it; it is raised when one changes its meaning or goes.
const Version = 1

// Sources of an answer.
const (
	SourceExporter = "exporter" // from a running gpu-exporter
	SourceDirect   = "direct"   // read from NVML and /proc by gwho itself
)

// States of a card.
const (
	CardUp     = "up"
	CardDown   = "down"   // says it cannot work: lost, reset required, refused
	CardHung   = "hung"   // did not answer in time
	CardFailed = "failed" // answered with an error that says nothing about its health
)

// Codes of Missing.
const (
	MissingNVML     = "nvml"     // NVML as a whole is not available
	MissingCard     = "card"     // a card did not answer, or is not listed
	MissingProcess  = "process"  // PIDs that /proc would not explain
	MissingRuntime  = "runtime"  // a container runtime or another input could not be read
	MissingStale    = "stale"    // the exporter's last pass is old
	MissingExporter = "exporter" // there is an exporter, but it gave no answer
)

// Answer is who holds what on one node at one instant, for one viewer. Values
// that are not known are null, which is never the same as 0.
type Answer struct {
	Version int `json:"version"`
	// Source is SourceExporter or SourceDirect.
	Source string `json:"source"`
	Node   string `json:"node"`
	// At is when the cards were read.
	At time.Time `json:"at"`
	// AnsweredAt is when the answer was made, by the same clock.
	AnsweredAt time.Time `json:"answered_at"`
	// ViewerUID is the uid the answer was made for; null for an unknown viewer,
	// who gets nobody's command line.
	ViewerUID *int64 `json:"viewer_uid"`
	Driver    Driver `json:"driver"`
	// Error is why NVML is not available, and what to do; empty while it is.
	Error string `json:"error"`
	// Expected is how many cards NVML counts, those that gave nothing included.
	Expected int `json:"expected_cards"`
	// Missing names the parts of the answer that could not be had.
	Missing []Missing `json:"missing"`
	Cards   []Card    `json:"cards"`
}

// Driver is what the driver and NVML say of themselves; empty if unknown.
type Driver struct {
	DriverVersion string `json:"driver_version"`
	CUDAVersion   string `json:"cuda_version"`
	NVMLVersion   string `json:"nvml_version"`
}

// Missing is one part of the answer that could not be had.
type Missing struct {
	// What is one of the Missing… codes.
	What string `json:"what"`
	// Card is the index of the card it is about; null if about none.
	Card *int `json:"card"`
	// Message says what is missing, why, and what to do.
	Message string `json:"message"`
}

// Card is one GPU.
type Card struct {
	// Index is NVML's; -1 for a card that hung before it could say.
	Index    int    `json:"index"`
	UUID     string `json:"uuid"`
	Name     string `json:"name"`
	PCIBusID string `json:"pci_bus_id"`
	// State is CardUp, CardDown, CardHung or CardFailed.
	State string `json:"state"`
	// Reason is why State is not CardUp.
	Reason string `json:"reason"`
	// PassedThrough says that the card is given to virtual machines. Nothing is
	// known of it but which process has it.
	PassedThrough bool `json:"passed_through"`
	// MIG says that the card is cut into instances; the devices are those.
	MIG bool `json:"mig"`

	MemoryTotalBytes    *uint64 `json:"memory_total_bytes"`
	MemoryUsedBytes     *uint64 `json:"memory_used_bytes"` // without the driver's reserve
	MemoryReservedBytes *uint64 `json:"memory_reserved_bytes"`
	// MemoryUnattributedBytes is used memory that no listed process explains.
	MemoryUnattributedBytes *uint64 `json:"memory_unattributed_bytes"`
	// SuspectsVerdict says how the search for who has that memory stands, a
	// Suspects… constant, and SuspectsMessage the same as a sentence. Both are
	// empty if there is too little of it to look for.
	SuspectsVerdict string `json:"suspects_verdict"`
	SuspectsMessage string `json:"suspects_message"`
	// Suspects are processes that NVML does not list on the card and that may
	// have that memory, the most suspicious first.
	Suspects []Suspect `json:"suspects"`
	// SuspectsRemedies are what releases the memory, the mildest first, where
	// nobody is to be found.
	SuspectsRemedies []string `json:"suspects_remedies"`

	UtilizationPercent *int64   `json:"utilization_percent"` // SM, of the last sample period
	TemperatureCelsius *int64   `json:"temperature_celsius"` // core sensor
	PowerWatts         *float64 `json:"power_watts"`
	PowerLimitWatts    *float64 `json:"power_limit_watts"`

	// Devices are the card itself, or its MIG instances.
	Devices []Device `json:"devices"`
}

// Device is what can be held: a whole card or one MIG compute instance.
type Device struct {
	UUID string `json:"uuid"`
	// Profile is the MIG profile, such as "2g.35gb"; empty for a whole card.
	Profile          string  `json:"profile"`
	GPUInstance      *int    `json:"gpu_instance"`     // null for a whole card
	ComputeInstance  *int    `json:"compute_instance"` // null for a whole card
	Slices           int64   `json:"slices"`           // compute slices of the card's Of
	Of               int64   `json:"of"`               // 1 for a whole card
	MemoryTotalBytes *uint64 `json:"memory_total_bytes"`
	MemoryUsedBytes  *uint64 `json:"memory_used_bytes"`
	// Free says that the device works and nobody holds it or was given it.
	// Graphics-only and system processes leave it free. A card that did not
	// answer is not called free, nor is one with much memory in unknown hands.
	Free    bool     `json:"free"`
	Holders []Holder `json:"holders"`
}

// Holder is one process on a device, or a workload that the device was given
// to and that has no process on it.
type Holder struct {
	User string `json:"user"`
	UID  *int64 `json:"uid"` // null where no uid stands behind the user
	// Kind is the kind of workload: host, service, docker, …
	Kind string `json:"kind"`
	// Workload is its name: a container, a unit, a job; empty for kind host.
	Workload string `json:"workload"`
	Project  string `json:"project"`
	Class    string `json:"class"`
	// AttributedBy is the rule that named the user.
	AttributedBy string `json:"attributed_by"`
	// Review says that the site does not trust that rule for billing: somebody
	// has to look at it before.
	Review bool `json:"review"`
	// Disagrees says that a later rule of high confidence names somebody else.
	Disagrees bool `json:"disagrees"`

	PID *uint32 `json:"pid"` // on the node; null without a process
	// Command is the program's name.
	Command string `json:"command"`
	// CommandLine is the whole command line: only for the viewer's own
	// processes, and for root; null for everybody else.
	CommandLine *string `json:"command_line"`
	// Contexts the process has: "compute", "graphics", "mps".
	Contexts    []string `json:"contexts"`
	MemoryBytes *uint64  `json:"memory_bytes"`
	// ActivityPercent is the process's own SM activity in the last interval.
	ActivityPercent *int64 `json:"activity_percent"`
	// Estimated says that ActivityPercent is derived from the device's figure.
	Estimated bool `json:"estimated"`

	StartedAt    *time.Time `json:"started_at"`     // of the process
	HeldSince    *time.Time `json:"held_since"`     // the workload, on this device
	LastActiveAt *time.Time `json:"last_active_at"` // null if never seen active
	// IdleSeconds is for how long the process is known to have been inactive; 0
	// while it is active, null where activity is unknown.
	IdleSeconds *int64 `json:"idle_seconds"`

	// Resources are what the whole workload uses of the node beside the card, the
	// same on each of its holders; null if nothing is known of it.
	Resources *Resources `json:"resources"`

	// Holds says that the time counts for the user: a compute context, an MPS
	// client, or exclusive use given by a scheduler.
	Holds bool `json:"holds"`
	// Assigned says that the device was given to the workload, which has no
	// process on it.
	Assigned     bool `json:"assigned"`
	GraphicsOnly bool `json:"graphics_only"`
	System       bool `json:"system"`  // shown, never billed
	Zombie       bool `json:"zombie"`  // ended, but not yet reaped
	Pending      bool `json:"pending"` // name or owner still being looked up

	ContainerID   string `json:"container_id"`
	ContainerName string `json:"container_name"`
	Image         string `json:"image"`
	PodNamespace  string `json:"pod_namespace"`
	PodName       string `json:"pod_name"`
	SlurmJob      string `json:"slurm_job"`
	Unit          string `json:"unit"`
}

// Verdicts on memory that no listed process explains.
const (
	SuspectsLooking = "looking" // it is being looked for who has it
	SuspectsFound   = "found"   // somebody is suspected
	SuspectsNobody  = "nobody"  // no process has the card open
	SuspectsHidden  = "hidden"  // none that may be looked into has; others may not be
	SuspectsFailed  = "failed"  // processes could not be looked at
)

// Suspect is a process that may have a card's unexplained memory. It does not
// hold the card: no time counts for it.
type Suspect struct {
	PID      uint32 `json:"pid"`
	User     string `json:"user"`
	UID      *int64 `json:"uid"` // null where no uid stands behind the user
	Kind     string `json:"kind"`
	Workload string `json:"workload"`
	Command  string `json:"command"`
	// CommandLine is for the viewer's own processes and for root, as a holder's.
	CommandLine  *string `json:"command_line"`
	AttributedBy string  `json:"attributed_by"`
	// Reason is why it is suspected, a word; Why the same as a sentence without
	// its subject, the process.
	Reason string `json:"reason"`
	Why    string `json:"why"`
	// Strength is "strong", "likely" or "weak"; "none" for a program that only
	// watches the card or keeps it ready.
	Strength  string     `json:"strength"`
	StartedAt *time.Time `json:"started_at"`
	Zombie    bool       `json:"zombie"`
	Pending   bool       `json:"pending"` // name or owner still being looked up

	ContainerID   string `json:"container_id"`
	ContainerName string `json:"container_name"`
	Image         string `json:"image"`
	PodNamespace  string `json:"pod_namespace"`
	PodName       string `json:"pod_name"`
	SlurmJob      string `json:"slurm_job"`
	Unit          string `json:"unit"`
}

// Resources are what a workload uses of the node in the last seconds: all of
// its processes together, those without a card too.
type Resources struct {
	CPUPercent            *int64  `json:"cpu_percent"`           // of one core
	ResidentMemoryBytes   *uint64 `json:"resident_memory_bytes"` // with no file behind it
	ReadBytesPerSecond    *int64  `json:"read_bytes_per_second"` // by storage
	WrittenBytesPerSecond *int64  `json:"written_bytes_per_second"`
}

// Complete reports whether no part of the answer is missing.
func (a Answer) Complete() bool { return len(a.Missing) == 0 }
