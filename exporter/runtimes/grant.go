package runtimes

import (
	"context"
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
	// Pod and Container are the names in Kubernetes, as whoever gave the GPUs
	// knows them: they name the workload where no engine does. Pod is nil
	// outside Kubernetes.
	Pod       *Pod
	Container string
}

// PodState is what engines have of one pod.
type PodState struct {
	Pod Pod // without labels and annotations
	// Ended says that nothing of it runs and nothing will again.
	Ended bool
	Since time.Time // when its newest sandbox was made
	// Containers are the ids of the newest container of each name.
	Containers map[string]string
}

// Runner is what has work of its own to do beside the passes. The error is ctx's.
type Runner interface {
	Run(ctx context.Context) error
}

// Reporter is what says how it did at its last try, for the exporter's own
// metrics. asked is false while there is nothing to ask, or no need.
type Reporter interface {
	Engine() string
	State() (state State, asked bool)
}

// Granter knows of grants. One that is a Runner is run, and one that is a
// Reporter is reported, by whoever uses it. Both methods answer from memory.
type Granter interface {
	// Grants are those in force now. The slice is the caller's to read until
	// the generation grows.
	Grants() []Grant
	// Generation grows whenever an answer of the granter may have changed.
	Generation() uint64
}
