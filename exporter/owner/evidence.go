// Package owner decides who the user behind a process is, and says why.
//
// It is pure: evidence and configuration come in, an answer goes out. Names of
// accounts come from functions in the configuration.
package owner

// Evidence is what is known of one process and its workload.
type Evidence struct {
	Kind string // kind of workload, a meter.Kind… value
	Name string // name of the workload
	Unit string // host's systemd unit
	// SliceUID is the uid of the host user's slice that the process runs in; -1
	// if none.
	SliceUID int64
	// Job is the scheduler's batch job that the process belongs to, and Pod its
	// Kubernetes pod; nil if it is in none, or none that is known.
	Job *Job
	Pod *Pod
	// ProcessUID is the process's real uid; -1 if not known. EffectiveUID is
	// kept for the record only: it changes with every setuid program.
	ProcessUID, EffectiveUID int64
	// LoginUID is the uid that the login session was opened for; -1 if unset.
	LoginUID int64
	// HostProcess says that the process runs on the host itself: in no
	// container, no pod and no PID namespace of its own. Only there is its uid
	// the host's.
	HostProcess bool
	// Container is what the engine says; nil if the process is in none, or none
	// that is known.
	Container *Container
	// Command is the program's name, Executable its path and ExecutableUID who
	// owns the file; -1 if not known.
	Command       string
	Executable    string
	ExecutableUID int64
	// SystemSlice says that only root can have placed the process where it is.
	SystemSlice bool
	// SystemLaunched says that one of the system's own processes started it to
	// work on behalf of users, under their uids: an MPS server.
	SystemLaunched bool
	// UserNamespace is the process's own; nil if that is the host's, or not
	// known.
	UserNamespace *UserNamespace
	// EngineOfRoot says that the process is, or may be, in a container that root's
	// own engine placed. What the image's processes do there, making user namespaces among
	// it, is then no word of whoever started the container.
	EngineOfRoot bool
	// Environment holds, of the variables that the process was started with,
	// those that Config.EnvironmentKeys lists, and no others; nil if they were not
	// looked at or may not be.
	Environment map[string]string
	// Chain is what the process's cgroup says it is in, from the host inwards,
	// as SYSTEM:ID. It is kept for the record only.
	Chain []string
}

// UserNamespace is a user namespace other than the host's.
type UserNamespace struct {
	// RootUID is the host's number of the namespace's uid 0; -1 if there is none.
	RootUID int64
}

// Job is what is known of a batch job.
type Job struct {
	System, ID, Step string // System is slurm, pbs, …
	// UID is the job's owner; -1 if not known.
	UID                     int64
	Account, Partition, QOS string // empty if not known
}

// Pod is what is known of a Kubernetes pod.
type Pod struct {
	UID, Namespace, Name string
	Labels, Annotations  map[string]string
	PriorityClass        string
	ServiceAccount       string
}

// Container is what an engine says of a container that bears on its owner.
type Container struct {
	ID, Name, Image string
	Labels          map[string]string
	ImageLabels     map[string]string // those that come with the image
	User            string            // what the container was started as
	ImageUser       string            // the image's own
	ImageKnown      bool              // whether ImageLabels and ImageUser are known
	Binds           []Bind            // what it was given of the host's files
}

// Bind is one file or directory of the host that a container was given.
type Bind struct {
	Path string // on the host
	// OwnerUID is who owns it; -1 if not known.
	OwnerUID int64
}

// given is the label that whoever started the container gave it; empty if
// there is none, or if it came with the image: such a label speaks of who
// built that. Where the image is not known neither can be told.
func (c *Container) given(key string) string {
	if c == nil || !c.ImageKnown {
		return ""
	}
	value := c.Labels[key]
	if inherited, ok := c.ImageLabels[key]; ok && inherited == value {
		return ""
	}
	return value
}
