package holders

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/snapshot"
)

// shortID is how much of a container's id stands for its name, as Docker
// itself shows it.
const shortID = 12

// Info is what is known of a process beside who it belongs to.
type Info struct {
	Command     string // program name
	CommandLine string // for the owner and root only
	StartedAt   time.Time
	FirstListed time.Time // when a card first listed it to us
	Zombie      bool
	Cgroup      string // the text of its /proc/PID/cgroup
	Detail      snapshot.Detail
	// Evidence and Verdict are how the attribution came about.
	Evidence owner.Evidence
	Verdict  owner.Answer
}

// Attribute says whose a process is, as of the newest Refresh. Pending means that a better answer is on
// its way; nobody waits for it longer than 10 s after the process was first
// seen.
func (t *Table) Attribute(key meter.ProcessKey) meter.Attribution {
	p := t.processes[key]
	if p == nil {
		return meter.Attribution{Workload: meter.Workload{
			User: meter.UserUnattributed, UID: -1, Kind: meter.KindHost, AttributedBy: string(owner.StepNone),
		}}
	}
	if generation := t.generation(); !p.resolved || p.answer.Pending || p.generation != generation {
		t.resolve(p)
		p.resolved, p.generation = true, generation
	}
	return p.answer
}

// Info returns what is known of a process; the zero value if nothing is.
func (t *Table) Info(key meter.ProcessKey) Info {
	p := t.processes[key]
	if p == nil {
		return Info{}
	}
	t.Attribute(key)
	return Info{
		Command: p.facts.Command, CommandLine: p.commandLine, StartedAt: p.startedAt, FirstListed: p.firstSeen, Zombie: p.zombie, Cgroup: p.facts.Cgroup,
		Detail: p.detail, Evidence: p.evidence, Verdict: p.verdict,
	}
}

// generation grows whenever a name or owner may have changed.
func (t *Table) generation() uint64 {
	sum := t.gatherer.generation.Load()
	if t.options.Accounts != nil {
		sum += t.options.Accounts.Generation()
	}
	for _, engine := range t.options.Engines {
		sum += engine.Generation()
	}
	if t.options.Personal != nil {
		sum += t.options.Personal.Generation()
	}
	for _, granter := range t.options.Granters {
		sum += granter.Generation() // they also know of jobs and pods
	}
	return sum
}

// resolve turns evidence into an attribution.
func (t *Table) resolve(p *process) {
	place := t.place(p)
	t.gather(p, &place)
	p.detail, p.evidence = place.detail, place.evidence
	p.verdict = owner.Resolve(place.evidence, t.owner)
	workload := meter.Workload{
		User: p.verdict.User, UID: p.verdict.UID, Kind: place.evidence.Kind, Name: place.evidence.Name,
		Project: p.verdict.Project, Class: p.verdict.Class, AttributedBy: string(p.verdict.AttributedBy),
		Review: p.verdict.Review,
	}
	if p.verdict.System {
		// The file's name, not comm: that one is cut and can be changed.
		workload.Kind, workload.Name = meter.KindSystem, path.Base(p.facts.Executable)
	}
	waiting := place.waiting || p.verdict.Waiting
	p.answer = meter.Attribution{Workload: workload, Pending: waiting && t.now().Sub(p.firstSeen) < lookupPatience}
}

// placement is where a process runs.
type placement struct {
	evidence owner.Evidence
	detail   snapshot.Detail
	waiting  bool
}

// sessionUnits are services whose processes of ordinary users are those
// users' own: one row a user, not one a session.
var sessionUnits = []string{
	"cron.service", "crond.service", "cronie.service", "anacron.service", "atd.service", "ssh.service", "sshd.service",
	"dropbear.service", "systemd-logind.service", "xrdp.service", "xrdp-sesman.service",
}

// sessionUnit also knows the units that a socket starts for each connection.
func sessionUnit(unit string) bool {
	return slices.Contains(sessionUnits, unit) || strings.HasSuffix(unit, ".service") &&
		(strings.HasPrefix(unit, "ssh@") || strings.HasPrefix(unit, "sshd@") || strings.HasPrefix(unit, "dropbear@"))
}

// place says where a process runs, and what is known of that.
func (t *Table) place(p *process) placement {
	place := t.placeByCgroup(p)
	if p.pod != nil && place.evidence.Pod == nil {
		placeInPod(&place, runtimes.Container{Name: p.podContainer, Pod: p.pod})
	}
	return place
}

func (t *Table) placeByCgroup(p *process) placement {
	chain := p.chain
	_, inContainer := chain.Container()
	// "/" on every line is no place: on cgroup v1 it is also where a process
	// ends, and in a cgroup namespace of our own it is our own cgroup.
	nowhere := chain.Root && (p.facts.Exiting() || !t.options.FS.InitialCgroupNamespace())
	place := placement{evidence: owner.Evidence{
		Kind: meter.KindHost, Unit: chain.Unit, SliceUID: -1,
		ProcessUID: int64(p.facts.RealUID), EffectiveUID: int64(p.facts.EffectiveUID), LoginUID: p.facts.LoginUID,
		HostProcess: len(p.facts.NSPID) <= 1 && !chain.Ambiguous && !inContainer && !nowhere,
		Command:     p.facts.Command, Executable: p.facts.Executable, ExecutableUID: p.facts.ExecutableUID,
		SystemSlice: chain.SystemSlice, SystemLaunched: p.mpsServer,
	}}
	place.detail.Unit = chain.Unit
	evidence := &place.evidence
	if p.granted && !p.known { // no process of the workload could be read
		evidence.ProcessUID, evidence.EffectiveUID = -1, -1
	}
	if chain.HasUID && !chain.UIDElsewhere {
		evidence.SliceUID = int64(chain.UID)
	}
	if len(chain.Levels) > 0 && chain.Levels[0].Kind == cgroup.LevelJob {
		t.placeJob(&place, chain)
		return place
	}
	if level, ok := chain.Container(); ok {
		t.placeContainer(&place, chain, level)
		return place
	}
	if level, ok := chain.Outermost(); ok { // a pod without a container: its sandbox
		evidence.HostProcess = false
		evidence.Kind, evidence.Name = kindOf(level.System), short(level.ID)
		return place
	}
	if len(chain.Levels) > 0 {
		evidence.HostProcess = false // the shape of a container's cgroup, and no more
		return place
	}
	if chain.HasUID || chain.Delegated || chain.Unit == "" || chain.Unit == "init.scope" {
		return place
	}
	person := t.owner.Human(evidence.ProcessUID) || evidence.ProcessUID == 0 && t.owner.Human(evidence.LoginUID)
	if sessionUnit(chain.Unit) && person {
		return place
	}
	evidence.Kind, evidence.Name = meter.KindService, chain.Unit
	return place
}

// placeJob names a batch job. Its owner is the uid in the path, where that is
// the scheduler's. A launcher that runs jobs below its own slice (flux) has
// them run as their owners; and below a person's slice a job is the person's
// own word, which makes it that person's.
func (t *Table) placeJob(place *placement, chain cgroup.Chain) {
	evidence := &place.evidence
	evidence.Kind, evidence.Name = chain.Levels[0].System, chain.Levels[0].ID
	evidence.Job = &owner.Job{System: evidence.Kind, ID: evidence.Name, Step: chain.Levels[0].Step, UID: -1}
	if !chain.Delegated {
		evidence.Job.UID, evidence.SliceUID = evidence.SliceUID, -1
	}
	if evidence.Kind != kindSlurm {
		return
	}
	if t.options.Slurm != nil && !chain.Delegated {
		job, status := t.options.Slurm.Lookup(evidence.Name)
		place.waiting = status == runtimes.StatusWaiting
		evidence.Job.Account, evidence.Job.Partition, evidence.Job.QOS = job.Account, job.Partition, job.QOS
		if evidence.Job.UID < 0 { // on cgroup v2 the path does not tell
			evidence.Job.UID = job.UID
		}
		if job.ID != "" { // the path may have the SLUID only
			evidence.Name, evidence.Job.ID = job.ID, job.ID
		}
	}
	place.detail.SlurmJob = evidence.Name
}

// kindSlurm is what jobs of Slurm are.
const kindSlurm = "slurm"

// kindOf is the kind of workload that a runtime's containers are.
func kindOf(runtime string) string {
	switch runtime {
	case cgroup.RuntimeKubernetes:
		return meter.KindKubernetes
	case cgroup.RuntimeUnknown:
		return meter.KindContainer
	case "nerdctl", "kata":
		return meter.KindContainerd
	case "qemu":
		return meter.KindVM
	case "libvirt-lxc":
		return meter.KindLXC
	}
	return runtime
}

func short(id string) string { return id[:min(len(id), shortID)] }

// placeContainer names a container. Whoever runs it knows the name; a name that
// can't be had is the id's first part.
func (t *Table) placeContainer(place *placement, chain cgroup.Chain, level cgroup.Level) {
	evidence := &place.evidence
	evidence.Kind, evidence.Name = kindOf(level.System), level.ID
	if level.Kind == cgroup.LevelContainer {
		evidence.Name, place.detail.ContainerID = short(level.ID), level.ID
	}
	// Whatever runs the containers of a pod, the pod is Kubernetes's.
	pod := slices.ContainsFunc(chain.Levels, func(l cgroup.Level) bool {
		return l.Kind == cgroup.LevelPod && l.System == cgroup.RuntimeKubernetes
	})
	if pod {
		evidence.Kind = meter.KindKubernetes
	}
	if level.Kind != cgroup.LevelContainer {
		return
	}
	container, status := t.lookup(chain, level.ID)
	place.waiting = status == runtimes.StatusWaiting
	if container.ID == "" {
		return
	}
	if !pod {
		evidence.Kind = cmp.Or(container.Runtime, evidence.Kind)
		if container.Name != "" {
			evidence.Name = container.Name
		}
	}
	if container.Pod != nil {
		placeInPod(place, container)
	}
	place.detail.ContainerName, place.detail.Image = container.Name, container.Image
	evidence.Container = &owner.Container{
		ID: container.ID, Name: container.Name, Image: container.Image, Labels: container.Labels,
		ImageLabels: container.ImageLabels, User: container.User, ImageUser: container.ImageUser, ImageKnown: container.ImageKnown,
		Binds: bindsOf(container),
	}
}

// placeInPod names a pod's container as Kubernetes does.
func placeInPod(place *placement, container runtimes.Container) {
	pod := container.Pod
	place.evidence.Kind = meter.KindKubernetes
	place.evidence.Name = pod.Namespace + "/" + pod.Name + "/" + container.Name
	place.detail.PodNamespace, place.detail.PodName = pod.Namespace, pod.Name
	place.evidence.Pod = &owner.Pod{
		UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Labels: pod.Labels, Annotations: pod.Annotations,
		PriorityClass: pod.PriorityClass, ServiceAccount: pod.ServiceAccount,
	}
}

// lookup asks all engines that can know the container; the first that does
// answers.
func (t *Table) lookup(chain cgroup.Chain, id string) (runtimes.Container, runtimes.Status) {
	status := runtimes.StatusMissing
	best := runtimes.Container{}
	for _, engine := range t.engines(chain) {
		if !mayKnow(engine.Engine(), engine.Socket(), chain) {
			continue
		}
		container, one := engine.Lookup(id)
		if one == runtimes.StatusFound {
			return container, one
		}
		if one == runtimes.StatusWaiting {
			status = one
			if container.ID != "" {
				best = container
			}
		}
	}
	return best, status
}

// engines are those of the host, and of the person in whose slice it is.
func (t *Table) engines(chain cgroup.Chain) []*runtimes.Directory {
	if t.options.Personal == nil || !chain.Delegated || !chain.HasUID {
		return t.options.Engines
	}
	return append(slices.Clip(t.options.Engines), t.options.Personal.Of(chain.UID)...)
}

// mayKnow keeps people's own engines and the host's apart. A person can make a
// cgroup with the id of another's container below the own slice, and an engine
// that a person runs can answer to any id.
//
// Podman's containers can be told by their cgroups. So no other engine is asked
// about them, and Podman, which asking would start, about no others.
func mayKnow(engine, socket string, chain cgroup.Chain) bool {
	level, _ := chain.Container()
	if (engine == meter.KindPodman) != (level.System == meter.KindPodman) {
		return false
	}
	of, own := engineUID(socket)
	if chain.Delegated || own {
		return own && chain.Delegated && chain.HasUID && of == strconv.FormatUint(uint64(chain.UID), 10)
	}
	return true
}

// engineUID is whose engine a socket below a person's runtime directory is.
func engineUID(socket string) (uid string, own bool) {
	for _, runtime := range []string{"/run/user/", "/var/run/user/"} {
		if rest, ok := strings.CutPrefix(path.Clean(socket), runtime); ok {
			uid, _, own = strings.Cut(rest, "/")
			return uid, own
		}
	}
	return "", false
}
