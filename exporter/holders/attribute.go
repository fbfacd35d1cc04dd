package holders

import (
	"slices"
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
	Detail      snapshot.Detail
	// Evidence and Verdict are how the attribution came about.
	Evidence owner.Evidence
	Verdict  owner.Answer
}

// Attribute says whose a process is. Pending means that a better answer is on
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
		Command: p.facts.Command, CommandLine: p.commandLine, StartedAt: p.startedAt, FirstListed: p.firstSeen, Zombie: p.zombie,
		Detail: p.detail, Evidence: p.evidence, Verdict: p.verdict,
	}
}

// generation grows whenever a name or owner may have changed.
func (t *Table) generation() uint64 {
	sum := uint64(0)
	if t.options.Accounts != nil {
		sum += t.options.Accounts.Generation()
	}
	for _, docker := range t.options.Docker {
		sum += docker.Generation()
	}
	return sum
}

// resolve turns evidence into an attribution.
func (t *Table) resolve(p *process) {
	place := t.place(p)
	p.detail, p.evidence = place.detail, place.evidence
	p.verdict = owner.Resolve(place.evidence, t.owner)
	workload := meter.Workload{
		User: p.verdict.User, UID: p.verdict.UID, Kind: place.evidence.Kind, Name: place.evidence.Name,
		Project: p.verdict.Project, Class: p.verdict.Class, AttributedBy: string(p.verdict.AttributedBy),
	}
	if p.verdict.System {
		workload.Kind, workload.Name = meter.KindSystem, p.facts.Command
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
var sessionUnits = []string{"cron.service", "crond.service", "atd.service", "ssh.service", "sshd.service", "systemd-logind.service"}

func (t *Table) place(p *process) placement {
	chain := p.chain
	place := placement{evidence: owner.Evidence{
		Kind: meter.KindHost, Unit: chain.Unit, SliceUID: -1, JobUID: -1,
		ProcessUID: int64(p.facts.RealUID), EffectiveUID: int64(p.facts.EffectiveUID), LoginUID: p.facts.LoginUID,
		HostProcess: len(p.facts.NSPID) <= 1 && !chain.Ambiguous,
		Command:     p.facts.Command, Executable: p.facts.Executable, ExecutableUID: p.facts.ExecutableUID,
		SystemSlice: chain.SystemSlice,
	}}
	place.detail.Unit = chain.Unit
	evidence := &place.evidence
	if chain.HasUID && !chain.UIDElsewhere {
		evidence.SliceUID = int64(chain.UID)
	}
	if job := slices.IndexFunc(chain.Levels, func(l cgroup.Level) bool { return l.Kind == cgroup.LevelJob }); job == 0 {
		evidence.Kind, evidence.Name = chain.Levels[0].System, chain.Levels[0].ID
		evidence.JobUID, evidence.SliceUID = evidence.SliceUID, -1
		if evidence.Kind == "slurm" {
			place.detail.SlurmJob = evidence.Name
		}
		return place
	}
	if container, ok := chain.Container(); ok {
		evidence.HostProcess = false
		t.placeContainer(&place, container)
		return place
	}
	if len(chain.Levels) > 0 {
		evidence.HostProcess = false
		return place
	}
	if chain.HasUID || chain.Delegated || chain.Unit == "" || chain.Unit == "init.scope" {
		return place
	}
	if slices.Contains(sessionUnits, chain.Unit) && evidence.ProcessUID >= int64(t.owner.MinimumHumanUID) {
		return place
	}
	evidence.Kind, evidence.Name = meter.KindService, chain.Unit
	return place
}

// placeContainer names a container. Whoever runs it knows the name; a name that
// can't be had is the id's first part.
func (t *Table) placeContainer(place *placement, level cgroup.Level) {
	evidence := &place.evidence
	evidence.Kind, evidence.Name = level.System, level.ID
	if len(evidence.Name) > shortID && level.Kind == cgroup.LevelContainer {
		evidence.Name = evidence.Name[:shortID]
	}
	if level.Kind == cgroup.LevelContainer {
		place.detail.ContainerID = level.ID
	}
	switch level.System {
	case meter.KindDocker, cgroup.RuntimeUnknown, cgroup.RuntimeKubernetes:
	default:
		return
	}
	container, status := t.lookup(level.ID)
	place.waiting = status == runtimes.StatusWaiting
	if level.System == cgroup.RuntimeKubernetes {
		evidence.Kind = "kubernetes"
	}
	if container.ID == "" {
		return
	}
	if level.System == cgroup.RuntimeUnknown {
		evidence.Kind = meter.KindDocker
	}
	if evidence.Kind == meter.KindDocker {
		evidence.Name = container.Name
	}
	place.detail.ContainerName, place.detail.Image = container.Name, container.Image
	evidence.Container = &owner.Container{
		ID: container.ID, Name: container.Name, Image: container.Image, Labels: container.Labels,
		ImageLabels: container.ImageLabels, User: container.User, ImageUser: container.ImageUser, ImageKnown: container.ImageKnown,
	}
}

// lookup asks all engines; the first that knows the container answers.
func (t *Table) lookup(id string) (runtimes.Container, runtimes.Status) {
	status := runtimes.StatusMissing
	best := runtimes.Container{}
	for _, docker := range t.options.Docker {
		container, one := docker.Lookup(id)
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
