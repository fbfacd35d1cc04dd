package exporter

import (
	"cmp"
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/resources"
	"gpuledger/exporter/snapshot"
)

// presence is what one pass shows of workloads on devices.
type presence struct {
	tally    *tally
	memory   *activeSince
	answered map[string]bool // cards that gave a reading
	found    map[workloadKey]*presentWorkload
	holding  []resources.Holder
}

type presentWorkload struct {
	processes, zombies int
	memoryBytes        uint64
	memoryKnown        bool
	// assigned says that it has no process on the device and was given it.
	assigned    bool
	temperature gpu.Optional[int64]
}

// activeSince remembers when each process was last seen using a device.
type activeSince struct {
	last map[processOnDevice]time.Time
	seen map[processOnDevice]bool // in the pass being built
}

type processOnDevice struct {
	key    meter.ProcessKey
	device string
}

func newPresence(s *sampler) *presence {
	return &presence{
		tally: s.tally, memory: s.active, answered: map[string]bool{}, found: map[workloadKey]*presentWorkload{},
	}
}

// active notes whether a process used its device just now and returns when it
// last did.
func (p *presence) active(key meter.ProcessKey, device string, now bool, at gpu.Instant) time.Time {
	on := processOnDevice{key: key, device: device}
	p.memory.seen[on] = true
	if now {
		p.memory.last[on] = time.UnixMicro(at.WallUS).UTC()
	}
	return p.memory.last[on]
}

// forget drops processes that are on no device any more.
func (a *activeSince) forget() {
	for on := range a.last {
		if !a.seen[on] {
			delete(a.last, on)
		}
	}
	clear(a.seen)
}

// holds notes that a process, first listed to us at firstListed, holds a device
// for its workload.
func (p *presence) holds(reading *gpu.Reading, device, profile string, holder *snapshot.Holder, firstListed time.Time) {
	key := workloadKey{device: device, workload: holder.Workload}
	key.workload = key.workload.Key()
	found, ok := p.found[key]
	if !ok {
		found = &presentWorkload{memoryKnown: true, temperature: reading.TemperatureC}
		p.found[key] = found
	}
	found.processes++
	if holder.Zombie {
		found.zombies++
	}
	bytes, known := holder.Process.MemoryBytes.Get()
	found.memoryBytes += bytes
	found.memoryKnown = found.memoryKnown && known

	at := time.UnixMicro(reading.At.WallUS).UTC()
	each := p.tally.workload(key, at)
	each.card, each.profile, each.index = reading.Card.UUID, profile, reading.Card.Index
	each.detail, each.attributedBy = holder.Detail, holder.Workload.AttributedBy
	if !each.present {
		each.present, each.endedAt, each.heldSince = true, time.Time{}, at
		answeredAt := p.tally.card(reading.Card.UUID).answeredAt
		if !holder.StartedAt.IsZero() && (answeredAt.IsZero() || !firstListed.After(answeredAt)) {
			// It was there before us: the process's start is the best there is.
			each.heldSince = holder.StartedAt
		}
	}
}

// given notes a workload that was given a device and has no process on it.
func (p *presence) given(reading *gpu.Reading, holder snapshot.Holder) {
	key := workloadKey{device: holder.Device, workload: holder.Workload}
	key.workload = key.workload.Key()
	if p.found[key] == nil {
		p.found[key] = &presentWorkload{assigned: true, temperature: reading.TemperatureC}
	}
	at := time.UnixMicro(reading.At.WallUS).UTC()
	each := p.tally.workload(key, at)
	each.card, each.profile, each.index = reading.Card.UUID, holder.Profile, reading.Card.Index
	each.detail, each.attributedBy = holder.Detail, holder.Workload.AttributedBy
	if !each.present {
		each.present, each.endedAt, each.heldSince = true, time.Time{}, at
		if !holder.StartedAt.IsZero() {
			each.heldSince = holder.StartedAt
		}
	}
}

// workloadViews closes the pass: who is there, who is gone.
func (s *sampler) workloadViews(seen *presence, wall time.Time) []snapshot.Workload {
	for uuid := range seen.answered {
		if card := s.tally.card(uuid); card.answeredAt.IsZero() {
			card.answeredAt = wall
		}
	}
	s.active.forget()
	views := make([]snapshot.Workload, 0, len(s.tally.workloads))
	for key, each := range s.tally.workloads {
		now := seen.found[key]
		if now == nil && seen.answered[each.card] && (each.present || each.endedAt.IsZero()) {
			each.present, each.endedAt = false, wall
		}
		view := snapshot.Workload{
			Card: each.card, Device: each.device, Profile: each.profile, Index: each.index,
			Key: key.workload, Detail: each.detail, Totals: each.totals, Present: each.present,
			HeldSince: each.heldSince, LastActive: each.lastActive, EndedAt: each.endedAt, FirstSeen: each.firstSeen,
		}
		view.Key.AttributedBy = each.attributedBy
		if now != nil {
			view.Assigned = now.assigned
			view.Processes, view.ZombieProcesses, view.TemperatureC = now.processes, now.zombies, now.temperature
			if now.memoryKnown {
				view.MemoryUsedBytes = gpu.Some(now.memoryBytes)
			}
			if each.latest.ActiveKnownUS > 0 {
				view.ActivityPercent = gpu.Some(uint32(min(100, each.latest.ActiveUS*100/each.latest.ActiveKnownUS)))
			}
			if each.latestUS > 0 && s.tally.card(each.card).energySeen {
				view.PowerMW = gpu.Some(each.latest.EnergyMJ * 1_000_000 / each.latestUS)
			}
		}
		views = append(views, view)
	}
	slices.SortFunc(views, func(a, b snapshot.Workload) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Device, b.Device), cmp.Compare(a.Key.User, b.Key.User),
			cmp.Compare(a.Key.Kind, b.Key.Kind), cmp.Compare(a.Key.Name, b.Key.Name), cmp.Compare(a.Key.UID, b.Key.UID),
			cmp.Compare(a.Key.Project, b.Key.Project), cmp.Compare(a.Key.Class, b.Key.Class))
	})
	return views
}
