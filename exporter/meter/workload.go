package meter

import "gpuledger/exporter/usage"

// Kinds of workload.
const (
	KindHost    = "host"
	KindService = "service"
	KindDocker  = "docker"
	KindSystem  = "system"

	KindPodman     = "podman"
	KindContainerd = "containerd"
	KindKubernetes = "kubernetes"
	KindVM         = "vm"
	KindLXC        = "lxc"
	KindNspawn     = "nspawn"
	// KindContainer is a container whose runtime cannot be told.
	KindContainer = "container"
)

// Workload names who a piece of time belongs to, and how that is known.
type Workload struct {
	User    string
	UID     int64 // -1 where no uid stands behind the user
	Kind    string
	Name    string // container name, unit, …; empty for KindHost
	Project string
	Class   string
	// AttributedBy is the resolution step that named User. It is not part of
	// the key.
	AttributedBy string
	// Review says that the site does not trust that step for billing. It is not
	// part of the key.
	Review bool
}

// Key is the workload without how its user was found.
func (w Workload) Key() Workload {
	w.AttributedBy, w.Review = "", false
	return w
}

// SameKey reports whether both are one workload: how the user was found is not
// part of that.
func (w Workload) SameKey(other Workload) bool { return identityOf(w) == identityOf(other) }

// Unattributed reports whether no user could be named. Each unattributed
// workload shares as a user of its own (law L2).
func (w Workload) Unattributed() bool { return w.User == UserUnattributed }

// UserUnattributed is the user of workloads that no step could attribute.
const UserUnattributed = "unattributed"

// Totals are a workload's amounts on one device since the exporter started.
type Totals struct {
	usage.Amounts
}
