package runtimes

import (
	"time"

	"gpuledger/exporter/cgroup"
)

// Grant is GPUs that a scheduler or engine gave to a workload, whether or not
// a process uses them.
type Grant struct {
	Devices []Device
	// Exclusive says that a scheduler gave them to this workload alone: it holds
	// them without a process too. Otherwise they are shown as assigned.
	Exclusive bool
	// Levels is where the workload is, as its processes' cgroups would say: a
	// job, a container, or a pod and its container.
	Levels []cgroup.Level
	// UID is the person below whose slice that is, for engines that people run
	// themselves; -1 for the host's.
	UID int64
	// PID is a process of the workload, 0 if there is none or it is not known.
	PID uint32
	// Since is when the GPUs were given; zero if not known.
	Since time.Time
}

// Granter knows of grants. Both methods answer from memory.
type Granter interface {
	// Grants are those in force now. The slice is the caller's to read until
	// the generation grows.
	Grants() []Grant
	// Generation grows whenever an answer of the granter may have changed.
	Generation() uint64
}
