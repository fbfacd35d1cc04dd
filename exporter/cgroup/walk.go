package cgroup

import "strings"

// walk reads one path from the host inwards.
type walk struct {
	chain    Chain
	relative bool
	closed   bool // inside a container: units, uids and jobs are not the host's
	unitDone bool // a unit that keeps its own subtree has been seen
	kube     bool // inside a kubelet's cgroups
	qos      string
	pod      bool // inside a pod
}

// walkPath recognises what it can of path's segments.
func walkPath(path []string, relative bool) Chain {
	w := &walk{relative: relative}
	if len(path) > 0 && !relative {
		w.chain.SystemSlice = path[0] == "system.slice" || path[0] == initScope
	}
	if w.talos(path) {
		return w.chain
	}
	for i := 0; i < len(path); {
		previous := ""
		if i > 0 {
			previous = path[i-1]
		}
		n := 0
		for _, rule := range []func(rest []string, previous string, i int) int{
			w.userSlice, w.job, w.kubernetes, w.container, w.machine, w.monitor,
		} {
			if n = rule(path[i:], previous, i); n > 0 {
				break
			}
		}
		if n == 0 {
			w.unit(path[i])
			n = 1
		}
		i += n
	}
	return w.chain
}

// enter adds a container or machine, behind which nothing is the host's.
func (w *walk) enter(level Level) {
	w.closed = true
	if last := len(w.chain.Levels) - 1; last >= 0 {
		// One id twice in a row is one container seen through a second
		// hierarchy, as Docker Desktop shows it.
		if l := w.chain.Levels[last]; l.Kind == level.Kind && l.System == level.System && l.ID == level.ID {
			return
		}
	}
	w.chain.Levels = append(w.chain.Levels, level)
	w.kube, w.pod, w.qos = false, false, ""
}

// unit takes a segment as the host's unit. Units nest only below slices and
// below user@UID.service; in the subtree of any other unit the names are that
// unit's own.
func (w *walk) unit(segment string) {
	if w.closed || w.unitDone || !hasUnitSuffix(segment) {
		return
	}
	w.chain.Unit = segment
	w.unitDone = !(w.chain.Delegated && strings.HasPrefix(segment, "user@") && strings.HasSuffix(segment, ".service"))
}

// userSlice reads the owner from the slice of a login. Only a top slice is
// proof: systemd alone creates it.
func (w *walk) userSlice(rest []string, _ string, i int) int {
	if i != 0 {
		return 0
	}
	switch {
	case rest[0] == "user.slice":
		w.chain.Delegated = true
		if len(rest) > 1 {
			if number, ok := between(rest[1], "user-", ".slice"); ok {
				w.chain.UID, w.chain.HasUID = parseUID(number)
				if w.chain.HasUID {
					return 2
				}
			}
		}
		return 1
	case rest[0] == "user" && len(rest) > 1:
		// cgmanager, before systemd: /user/1000.user/2.session
		number, ok := between(rest[1], "", ".user")
		if !ok {
			return 0
		}
		if w.chain.UID, w.chain.HasUID = parseUID(number); !w.chain.HasUID {
			return 0
		}
		w.chain.Delegated = true
		if len(rest) > 2 && strings.HasSuffix(rest[2], ".session") {
			w.chain.Unit, w.unitDone = rest[2], true
			return 3
		}
		return 2
	}
	return 0
}

// talos reads the fixed cgroups of a host without systemd.
func (w *walk) talos(path []string) bool {
	switch {
	case len(path) == 1 && path[0] == "init",
		len(path) == 2 && (path[0] == "podruntime" || path[0] == "system") &&
			containerdName(path[1]) && !hexOnly(path[1]) && !hasUnitSuffix(path[1]):
		w.chain.Unit = strings.Join(path, "/")
		w.chain.SystemSlice = !w.relative
		return true
	}
	return false
}

// scopePrefixes are how runtimes name a container's cgroup before its full id.
// Longer prefixes come before those they begin with.
var scopePrefixes = []struct {
	prefix, runtime string
	monitor         bool
}{
	{"docker-", "docker", false},
	{"cri-containerd-", "containerd", false},
	{"crio-conmon-", "crio", true},
	{"crio-", "crio", false},
	{"libpod-conmon-", runtimePodman, true},
	{"libpod-payload-", runtimePodman, false},
	{"libpod-", runtimePodman, false},
	{"nerdctl-", "nerdctl", false},
}

// threePartRuntimes are the middle part of "slice:prefix:id", which runc makes
// when it is told a systemd path and uses cgroupfs.
var threePartRuntimes = map[string]string{
	"docker": "docker", "cri-containerd": "containerd", "crio": "crio", "libpod": runtimePodman, "nerdctl": "nerdctl",
}

func (w *walk) container(rest []string, previous string, _ int) int {
	segment := rest[0]
	if parts := strings.SplitN(segment, ":", 3); len(parts) == 3 {
		runtime, known := threePartRuntimes[parts[1]]
		if !known || !fullID(parts[2]) {
			return 0
		}
		w.kubernetesSlice(parts[0])
		w.enter(Level{Kind: LevelContainer, System: runtime, ID: parts[2]})
		return 1
	}

	name, scope := strings.CutSuffix(segment, ".scope")
	for _, p := range scopePrefixes {
		if id, ok := strings.CutPrefix(name, p.prefix); ok && fullID(id) {
			if scope {
				w.unit(segment)
			}
			w.enter(Level{Kind: LevelContainer, System: p.runtime, ID: id})
			w.chain.Monitor = p.monitor
			return 1
		}
	}
	if fullID(name) && previous != "lxc" {
		runtime := RuntimeUnknown
		switch {
		case scope:
			w.unit(segment)
		case w.pod:
			runtime = RuntimeKubernetes
		case previous == "docker", previous == "actions_job", w.ecsTask():
			runtime = "docker"
		}
		w.enter(Level{Kind: LevelContainer, System: runtime, ID: name})
		return 1
	}
	if w.pod && uuid(segment, "-") {
		w.enter(Level{Kind: LevelContainer, System: RuntimeKubernetes, ID: segment})
		return 1
	}
	if len(rest) > 1 {
		id := rest[1]
		switch {
		case segment == "buildkit" && len(id) == 25 && containerdName(id):
			w.enter(Level{Kind: LevelContainer, System: "buildkit", ID: id})
			return 2
		case segment == "garden" && gardenID(id):
			w.enter(Level{Kind: LevelContainer, System: "garden", ID: id})
			return 2
		case segment == "mesos" && uuid(id, "-") && !w.chain.Delegated:
			w.enter(Level{Kind: LevelContainer, System: "mesos", ID: id})
			return 2
		}
	}
	for _, runtime := range []string{"apptainer", "singularity"} {
		if number, ok := between(segment, runtime+"-", ".scope"); ok && digits(number) && !w.closed {
			w.unit(segment)
			w.enter(Level{Kind: LevelContainer, System: "apptainer", ID: number})
			return 1
		}
	}
	return 0
}

// gardenID is Cloud Foundry's 28 characters, or a whole UUID.
func gardenID(s string) bool {
	if uuid(s, "-") {
		return true
	}
	return len(s) == 28 && s[8] == '-' && strings.Count(s, "-") == 4 && hexOnly(strings.ReplaceAll(s, "-", ""))
}

// kubernetes reads the kubelet's own cgroups down to the pod.
func (w *walk) kubernetes(rest []string, _ string, _ int) int {
	segment := rest[0]
	if id, ok := between(segment, "machine-libpod_pod_", ".slice"); ok && fullID(id) {
		w.chain.Levels = append(w.chain.Levels, Level{Kind: LevelPod, System: runtimePodman, ID: id})
		return 1
	}
	if id, ok := between(segment, "user-libpod_pod_", ".slice"); ok && fullID(id) {
		w.chain.Levels = append(w.chain.Levels, Level{Kind: LevelPod, System: runtimePodman, ID: id})
		return 1
	}
	if segment == "kubepods" || w.kubernetesSlice(segment) {
		w.kube = true
		return 1
	}
	if w.kube && (segment == "burstable" || segment == "besteffort" || segment == "guaranteed") {
		w.qos = segment
		return 1
	}
	if w.kube && !w.pod {
		for _, prefix := range []string{"kata_", "kata_overhead_"} {
			if id, ok := strings.CutPrefix(segment, prefix); ok && containerdName(id) {
				w.enter(Level{Kind: LevelContainer, System: "kata", ID: id})
				return 1
			}
		}
	}
	if w.kube || w.relative && !w.closed {
		if id, ok := strings.CutPrefix(segment, "pod"); ok {
			if uid, ok := podUID(id); ok {
				w.enterPod(uid)
				return 1
			}
		}
	}
	return 0
}

// kubernetesSlice reads kubepods.slice, kubepods-burstable.slice and
// kubepods-burstable-podUID.slice, each also behind a prefix of the kubelet's
// own cgroup root.
func (w *walk) kubernetesSlice(segment string) bool {
	name, ok := strings.CutSuffix(segment, ".slice")
	if !ok {
		return false
	}
	if i := strings.Index(name, "-kubepods"); i > 0 {
		name = name[i+1:]
	}
	name, ok = strings.CutPrefix(name, "kubepods")
	if !ok || name != "" && name[0] != '-' {
		return false
	}
	for _, class := range []string{"burstable", "besteffort"} {
		if rest, ok := strings.CutPrefix(name, "-"+class); ok && (rest == "" || rest[0] == '-') {
			w.qos, name = class, rest
		}
	}
	w.kube = true
	if id, ok := strings.CutPrefix(name, "-pod"); ok {
		if uid, ok := podUID(id); ok {
			w.enterPod(uid)
		}
	}
	return true
}

func (w *walk) enterPod(uid string) {
	qos := w.qos
	if qos == "" && w.kube {
		qos = "guaranteed" // the kubelet gives it no segment of its own
	}
	w.chain.Levels = append(w.chain.Levels, Level{Kind: LevelPod, System: RuntimeKubernetes, ID: uid, QoS: qos})
	w.pod = true
}

// monitor reads the processes that serve a container or job.
func (w *walk) monitor(rest []string, previous string, _ int) int {
	if rest[0] == "conmon" && previous == "libpod_parent" && len(rest) == 1 {
		w.enter(Level{Kind: LevelContainer, System: runtimePodman})
		w.chain.Monitor = true
		return 1
	}
	return 0
}
