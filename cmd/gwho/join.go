package main

import (
	"context"
	"os"
	"slices"
	"strings"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/passthrough"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/suspects"
	"gpuledger/exporter/who"
)

// pendingPatience is how long the names of containers are waited for.
const pendingPatience = time.Second

// join makes an answer of passes, as the exporter does of its own.
type join struct {
	node  string
	began time.Time
	// table is nil if /proc cannot say who is behind a PID; blind says why.
	table *people
	blind error
	last  gpu.Pass
	// taken is what one look for who has unexplained memory found; nil if there
	// was no need.
	taken *suspects.Findings
	known map[string]gpu.Card // cards that have answered, by UUID
}

func newJoin(ctx context.Context, o options, node string) *join {
	j := &join{node: node, began: time.Now(), known: map[string]gpu.Card{}}
	j.table, j.blind = newPeople(ctx, o.procfs)
	return j
}

func (j *join) close() {
	if j.table != nil {
		j.table.Close()
	}
}

// pass takes a pass; the answer is about the last one.
func (j *join) pass(ctx context.Context, pass gpu.Pass) {
	// What a daemon would do is not what we do.
	pass.Error = strings.TrimSuffix(pass.Error, "; trying again")
	j.last = pass
	for _, r := range pass.Readings {
		if r.Card.UUID != "" {
			j.known[r.Card.UUID] = r.Card
		}
	}
	if j.table != nil {
		j.table.Refresh(ctx, pass)
	}
}

// lookPatience bounds the look for who has unexplained memory.
const lookPatience = 3 * time.Second

// look looks, once, for who has memory that no listed process explains.
func (j *join) look(ctx context.Context) {
	var all, needy []suspects.Card
	for i := range j.last.Readings {
		r := &j.last.Readings[i]
		if r.State != gpu.StateGood {
			continue
		}
		var keys map[uint32]meter.ProcessKey
		if j.table != nil {
			keys = j.table.Keys(*r)
		}
		card := suspects.CardOf(r, keys)
		all = append(all, card)
		if bytes, known := card.UnexplainedBytes.Get(); known && bytes >= suspects.DefaultThreshold {
			needy = append(needy, card)
		}
	}
	switch {
	case len(needy) == 0:
		return
	case j.table == nil:
		j.taken = suspects.Unable(needy, j.blind)
		return
	}
	j.taken = suspects.Look(ctx, j.table.proc, needy, all, lookPatience)
	j.table.Ask(j.taken.Keys())
	for range 1 + len(j.taken.Keys())/8 { // a few are read each time
		j.table.Refresh(ctx, j.last)
	}
}

// answer waits a moment for names that are still being looked up.
func (j *join) answer(ctx context.Context) who.Answer {
	if j.table != nil {
		j.last = passthrough.Add(ctx, j.table.proc, "/sys", j.last)
		if slices.ContainsFunc(j.last.Readings, func(r gpu.Reading) bool { return r.Card.PassedThrough }) {
			j.table.Refresh(ctx, j.last)
		}
	}
	j.look(ctx)
	deadline := time.NewTimer(pendingPatience)
	defer deadline.Stop()
	retry := time.NewTicker(20 * time.Millisecond)
	defer retry.Stop()
	for {
		s, pending := j.snapshot()
		if !pending {
			return j.build(s)
		}
		select {
		case <-retry.C:
			continue
		case <-deadline.C:
		case <-ctx.Done():
		}
		return j.build(s)
	}
}

func (j *join) build(s *snapshot.Snapshot) who.Answer {
	a := who.Build(s, who.Peer(uint32(os.Geteuid())), who.SourceDirect, time.UnixMicro(j.last.At.WallUS))
	if j.blind != nil && a.Error == "" {
		a.Missing = slices.DeleteFunc(a.Missing, func(m who.Missing) bool { return m.What == who.MissingProcess })
		a.Missing = append(a.Missing, who.Missing{What: who.MissingProcess, Message: "who is behind the PIDs is not known: " + j.blind.Error()})
	}
	for _, c := range a.Cards {
		for _, d := range c.Devices {
			for i := range d.Holders {
				// That it was inactive for a moment says nothing of how long.
				if idle := d.Holders[i].IdleSeconds; idle != nil && *d.Holders[i].ActivityPercent == 0 {
					d.Holders[i].IdleSeconds = nil
				}
			}
		}
	}
	return a
}

// snapshot is the node as the last pass shows it, and whether anything about
// it is still being looked up.
func (j *join) snapshot() (*snapshot.Snapshot, bool) {
	s := &snapshot.Snapshot{
		Node: j.node, At: time.UnixMicro(j.last.At.WallUS), Started: j.began,
		NVMLUp: j.last.Error == "", NVMLError: j.last.Error, Driver: j.last.Driver, Expected: j.last.Expected,
	}
	if j.table != nil {
		s.Exporter.Collectors = j.table.Collectors()
	}
	pending := false
	seen := map[string]bool{}
	for i := range j.last.Readings {
		r := &j.last.Readings[i]
		seen[r.Card.UUID] = true
		c := snapshot.Card{Identity: r.Card, Up: r.State == gpu.StateGood, Reason: r.Reason, Reading: r}
		switch r.State {
		case gpu.StateGood:
			c.Reason = ""
			c.Holders = j.holders(r)
			c.UnattributedMemoryBytes = r.UnattributedMemoryBytes()
			if j.taken != nil && j.taken.Needs(r.Card.UUID) {
				c.Suspects, c.Search = j.suspects(r)
				pending = pending || slices.ContainsFunc(c.Suspects, func(s snapshot.Suspect) bool { return s.Pending })
			}
			pending = pending || slices.ContainsFunc(c.Holders, func(h snapshot.Holder) bool { return h.Pending })
		case gpu.StateFailed:
			c.Reading = nil
		}
		s.Cards = append(s.Cards, c)
	}
	for _, uuid := range j.last.Hung {
		if seen[uuid] {
			continue
		}
		identity, known := j.known[uuid]
		if !known {
			identity = gpu.Card{UUID: uuid, Index: -1}
		}
		s.Cards = append(s.Cards, snapshot.Card{Identity: identity, Reason: who.CardHung})
	}
	return s, pending
}

func (j *join) suspects(r *gpu.Reading) ([]snapshot.Suspect, snapshot.Search) {
	if j.table == nil {
		found, search, _ := j.taken.Of(r.Card.UUID, nil, nil)
		return found, search
	}
	found, search, _ := j.taken.Of(r.Card.UUID, j.table.Keys(*r), j.table.Table)
	return found, search
}

func (j *join) holders(r *gpu.Reading) []snapshot.Holder {
	activity := map[uint32]uint32{}
	for _, sample := range r.Samples {
		if sample.SM <= 100 {
			activity[sample.PID] = max(activity[sample.PID], sample.SM)
		}
	}
	var keys map[uint32]meter.ProcessKey
	if j.table != nil {
		keys = j.table.Keys(*r)
	}
	var out []snapshot.Holder
	add := func(device, profile string, processes []gpu.Process) {
		for _, p := range processes {
			h := snapshot.Holder{Device: device, Profile: profile, PID: p.PID, Process: p,
				Workload: meter.Workload{User: meter.UserUnattributed, UID: -1}}
			if j.table != nil {
				j.explain(&h, keys[p.PID])
			}
			h.System = h.Workload.Kind == meter.KindSystem
			h.Holds = meter.Holds(p, h.Workload)
			if r.SamplesKnown {
				h.ActivityPercent = gpu.Some(activity[p.PID])
			}
			out = append(out, h)
		}
	}
	add(r.Card.UUID, "", r.Processes)
	for _, i := range r.Instances {
		add(i.UUID, i.Profile, i.Processes)
	}
	return out
}

func (j *join) explain(h *snapshot.Holder, key meter.ProcessKey) {
	attribution, info := j.table.Attribute(key), j.table.Info(key)
	h.Workload, h.Pending, h.Detail, h.Disagrees = attribution.Workload, attribution.Pending, info.Detail, info.Verdict.Disagrees
	h.Command, h.CommandLine, h.StartedAt, h.Zombie = info.Command, info.CommandLine, info.StartedAt, info.Zombie
}
