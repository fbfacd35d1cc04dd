package holders

import (
	"slices"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/runtimes"
)

// gather adds to a process's evidence what its place does not tell. What takes
// reading a process's own memory or asking a file system is only asked for if
// the steps before it name nobody, and read by the gatherer's goroutines.
func (t *Table) gather(p *process, place *placement) {
	e := &place.evidence
	for _, level := range p.chain.Levels {
		e.Chain = append(e.Chain, level.System+":"+level.ID)
	}
	e.EngineOfRoot = engineOfRoot(p.chain, e.HostProcess)
	if namespace := p.facts.UserNamespace; namespace != nil {
		e.UserNamespace = &owner.UserNamespace{RootUID: namespace.RootUID}
	}
	so := owner.Resolve(*e, t.owner)
	if e.Container != nil && len(e.Container.Binds) > 0 && (t.options.GatherAll || t.owner.Reaches(owner.StepHomePath, so)) {
		for i := range e.Container.Binds {
			uid, known := t.gatherer.ownerOf(e.Container.Binds[i].Path)
			e.Container.Binds[i].OwnerUID = uid
			place.waiting = place.waiting || !known
		}
		so = owner.Resolve(*e, t.owner)
	}
	if p.facts.PID != 0 && p.facts.StartTicks != 0 && (t.options.GatherAll || t.owner.Reaches(owner.StepEnvironment, so)) {
		key := meter.ProcessKey{PID: p.facts.PID, StartTicks: p.facts.StartTicks}
		values, known := t.gatherer.environment(key, p.facts.Executable)
		e.Environment = values
		place.waiting = place.waiting || !known
	}
}

// engineOfRoot reports whether a process is in what may be a container that
// root's engine made: any that is in no person's slice or job, has a PID
// namespace or a place of its own, and is not known to be a login's.
func engineOfRoot(chain cgroup.Chain, hostProcess bool) bool {
	level, ok := chain.Outermost()
	return !hostProcess && !chain.Delegated && !(chain.HasUID && !chain.UIDElsewhere) &&
		!(ok && level.Kind == cgroup.LevelJob) && (ok || len(chain.Levels) > 0 || !sessionUnit(chain.Unit))
}

// bindsOf are the host's files that a container was given. Who owns them is
// not known yet.
func bindsOf(container runtimes.Container) []owner.Bind {
	binds := make([]owner.Bind, 0, len(container.Binds))
	for _, path := range container.Binds[:min(len(container.Binds), maxBinds)] {
		if !slices.ContainsFunc(binds, func(b owner.Bind) bool { return b.Path == path }) {
			binds = append(binds, owner.Bind{Path: path, OwnerUID: -1})
		}
	}
	return binds
}

// Explanation is what is known of a process, and what each step of finding its
// owner says of it.
type Explanation struct {
	Info
	Chain       cgroup.Chain
	Attribution meter.Attribution
	Verdicts    []owner.Verdict
}

// Explain says how a process's attribution came about, as of the newest
// Refresh; ok is false if nothing is known of it.
func (t *Table) Explain(key meter.ProcessKey) (Explanation, bool) {
	p := t.processes[key]
	if p == nil {
		return Explanation{}, false
	}
	attribution := t.Attribute(key)
	return Explanation{
		Info: t.Info(key), Chain: p.chain, Attribution: attribution, Verdicts: owner.Explain(p.evidence, t.owner),
	}, true
}
