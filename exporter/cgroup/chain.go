// Package cgroup turns the text of /proc/PID/cgroup into a chain of what the
// process belongs to, from the host inwards.
//
// It is pure, and it would rather say nothing than something wrong: a path
// that no rule recognises whole yields no name.
package cgroup

import "strconv"

// LevelKind says what a level of a chain is.
type LevelKind string

// Kinds of level.
const (
	LevelJob       LevelKind = "job"       // a scheduler's job
	LevelPod       LevelKind = "pod"       // a Kubernetes or Podman pod
	LevelContainer LevelKind = "container" // a container of some runtime
	LevelMachine   LevelKind = "machine"   // a system container or virtual machine
)

// Runtimes and job systems that carry a meaning beyond their name.
const (
	// RuntimeUnknown is a container whose id is certain and whose runtime the
	// path does not tell.
	RuntimeUnknown = "unknown"
	// RuntimeKubernetes is a container of a pod whose path does not tell
	// whether Docker, containerd or another runtime runs it.
	RuntimeKubernetes = "k8s"
	// RuntimeAmbiguous says that two lines name two different things.
	RuntimeAmbiguous = "ambiguous"
	// RuntimeContainerdGuess is the shape /NAMESPACE/ID that ctr makes and that
	// anybody else can make too.
	RuntimeContainerdGuess = "containerd?"
)

// Level is one thing that a process is in.
type Level struct {
	Kind LevelKind
	// System is the runtime (docker, podman, lxc, …) or the job system (slurm,
	// pbs, …).
	System string
	// ID is the container id, machine name, pod uid or job id. It may be empty
	// for a monitor that serves all containers of its runtime.
	ID   string
	Step string // job step or task
	QoS  string // pod: guaranteed, burstable, besteffort; empty if not told
}

// Chain is what a process belongs to.
type Chain struct {
	// Levels from the host inwards.
	Levels []Level
	// Unit is the host's systemd unit that holds the process: the last one
	// outside every container and job. Below a user's slice it is a unit of that
	// user's own manager.
	Unit string
	// UID is the uid a path names: of the user's slice, or of a Slurm job on
	// cgroup v1. Only valid if HasUID.
	UID    uint32
	HasUID bool
	// UIDElsewhere says that UID comes from another line than Levels do: it is
	// who started the runtime, not who is inside.
	UIDElsewhere bool
	// Delegated says that the path runs below a user's slice, where the user
	// may make any cgroup: names in it are the user's own word.
	Delegated bool
	// SystemSlice says that the path starts in a slice that only root can
	// place processes in.
	SystemSlice bool
	// Monitor says that the process serves the innermost level (conmon,
	// slurmstepd, a supervisor) and is not the workload.
	Monitor bool
	// Root says that every line is "/": a kernel thread, a zombie on cgroup v1,
	// a process that nobody placed, or one in the reader's own cgroup.
	Root bool
	// Relative says that the path starts outside the reader's own cgroup
	// namespace.
	Relative bool
	// Deleted says that the cgroup no longer exists.
	Deleted bool
	// Ambiguous says that two lines name different containers or jobs. Nothing
	// else is then told.
	Ambiguous bool
	// Mode is v1, v2 or hybrid, with -rel if Relative; empty if no line could
	// be read.
	Mode string

	guess bool // Levels is a guess from the shape alone
}

// Outermost returns the level the host itself made, the one whose name its
// runtimes and schedulers know; false if there is none. A guess is never
// returned.
func (c Chain) Outermost() (Level, bool) {
	if len(c.Levels) == 0 || c.guess {
		return Level{}, false
	}
	return c.Levels[0], true
}

// Container returns the container that the host's own runtime knows: the
// outermost one, even if it is in a pod or a job.
func (c Chain) Container() (Level, bool) {
	if c.guess {
		return Level{}, false
	}
	for _, level := range c.Levels {
		if level.Kind == LevelContainer || level.Kind == LevelMachine {
			return level, true
		}
	}
	return Level{}, false
}

// Known reports whether the chain says anything at all about where the process
// is.
func (c Chain) Known() bool {
	return len(c.Levels) > 0 && !c.guess || c.Unit != "" || c.HasUID || c.Delegated
}

// Identity is a chain flattened to the columns in which cgroup paths are
// reported and tested. An empty value means that the path does not tell.
type Identity struct {
	Mode             string `json:"mode,omitempty"`
	Runtime          string `json:"runtime,omitempty"`
	ContainerID      string `json:"container_id,omitempty"`
	OuterRuntime     string `json:"outer_runtime,omitempty"`
	OuterContainerID string `json:"outer_container_id,omitempty"`
	PodUID           string `json:"pod_uid,omitempty"`
	QoS              string `json:"qos,omitempty"`
	JobSystem        string `json:"job_system,omitempty"`
	JobID            string `json:"job_id,omitempty"`
	Step             string `json:"step,omitempty"`
	UID              string `json:"uid,omitempty"`
	Unit             string `json:"unit,omitempty"`
	Machine          string `json:"machine,omitempty"`
	Role             string `json:"role,omitempty"` // "monitor" or empty
}

// Identity flattens the chain: the innermost container, pod, job and machine,
// and the outermost container if it is another one.
func (c Chain) Identity() Identity {
	identity := Identity{Mode: c.Mode}
	if c.Ambiguous {
		identity.Runtime = RuntimeAmbiguous
		return identity
	}
	identity.Unit = c.Unit
	if c.HasUID {
		identity.UID = strconv.FormatUint(uint64(c.UID), 10)
	}
	if c.Monitor {
		identity.Role = "monitor"
	}
	containers := 0
	for _, level := range c.Levels {
		switch level.Kind {
		case LevelJob:
			identity.JobSystem, identity.JobID, identity.Step = level.System, level.ID, level.Step
		case LevelPod:
			identity.PodUID, identity.QoS = level.ID, level.QoS
			if level.System == runtimePodman {
				identity.PodUID = "libpod:" + level.ID
			}
		case LevelContainer, LevelMachine:
			if containers == 1 {
				identity.OuterRuntime, identity.OuterContainerID = identity.Runtime, identity.ContainerID
			}
			containers++
			identity.Runtime, identity.ContainerID = level.System, level.ID
			if level.Kind == LevelMachine {
				identity.Machine = level.ID
			}
		}
	}
	return identity
}
