package exporter

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/resources"
	"gpuledger/exporter/snapshot"
)

// publish builds the snapshot of a pass and swaps it in.
func (s *sampler) publish(pass gpu.Pass, now gpu.Instant, took time.Duration) {
	s.sequence++
	wall := time.UnixMicro(now.WallUS).UTC()
	next := &snapshot.Snapshot{
		Seq: s.sequence, Node: s.options.NodeName, Run: s.run, At: wall, Started: s.started,
		NVMLUp: pass.Error == "", NVMLError: pass.Error, Driver: s.driver, Expected: max(pass.Expected, len(s.identity)),
	}
	readings := map[string]*gpu.Reading{}
	for i := range pass.Readings {
		readings[pass.Readings[i].Card.UUID] = &pass.Readings[i]
	}
	presence := newPresence(s)
	for _, uuid := range s.cardsByIndex() {
		next.Cards = append(next.Cards, s.cardView(uuid, readings[uuid], slices.Contains(pass.Hung, uuid), presence))
	}
	next.Workloads = s.workloadViews(presence, wall)
	s.resources.Hold(presence.holding)
	next.Resources = s.resources.Latest(time.Now())
	next.Exporter = s.exporterView(took)
	s.tally.forget(wall)
	s.store.Publish(next)
}

func (s *sampler) cardsByIndex() []string {
	return slices.SortedFunc(maps.Keys(s.identity), func(a, b string) int {
		return cmp.Or(cmp.Compare(s.indexes[a], s.indexes[b]), cmp.Compare(a, b))
	})
}

// Reasons why a card is not up, beside gpu.Down….
const (
	reasonHung    = "hung"
	reasonFailed  = "failed"
	reasonMissing = "missing"
)

func (s *sampler) cardView(uuid string, reading *gpu.Reading, hung bool, seen *presence) snapshot.Card {
	tally := s.tally.card(uuid)
	view := snapshot.Card{
		Identity: s.identity[uuid], IdleUS: tally.idleUS, DownUS: tally.downUS, MeteredUS: tally.meteredUS,
		ConservationErrorUS: max(tally.rowsUS-tally.meteredUS, tally.meteredUS-tally.rowsUS),
		ThrottleUS:          maps.Clone(tally.throttleUS), XIDs: maps.Clone(tally.xids),
	}
	if tally.energySeen {
		view.EnergyMJ = gpu.Some(tally.energyMJ)
	}
	switch {
	case reading == nil && hung:
		view.Reason = reasonHung
	case reading == nil:
		view.Reason = reasonMissing
	case reading.State == gpu.StateFailed:
		view.Reason = reasonFailed
	case reading.State == gpu.StateDown:
		view.Reason = reading.Reason
	default:
		view.Up = true
	}
	if reading == nil || reading.State == gpu.StateFailed {
		return view
	}
	view.Reading, view.ECCErrors = reading, reading.ECCErrors
	seen.answered[uuid] = true
	if view.Up {
		view.Holders = s.holdersOf(reading, seen)
		view.UnattributedMemoryBytes = reading.UnattributedMemoryBytes()
		view.Suspects, view.Search = s.suspects.Of(uuid, s.keys[uuid], s.holders)
	}
	return view
}

// holdersOf joins a card's processes with who is behind them.
func (s *sampler) holdersOf(reading *gpu.Reading, seen *presence) []snapshot.Holder {
	keys := s.keys[reading.Card.UUID]
	activity := make(map[uint32]uint32, len(reading.Samples))
	for _, sample := range reading.Samples {
		if sample.SM <= 100 {
			activity[sample.PID] = max(activity[sample.PID], sample.SM)
		}
	}
	count := len(reading.Processes)
	for _, instance := range reading.Instances {
		count += len(instance.Processes)
	}
	all := make([]snapshot.Holder, 0, count)
	add := func(device, profile string, processes []gpu.Process) {
		for _, process := range processes {
			key := keys[process.PID]
			attribution := s.holders.Attribute(key)
			info := s.holders.Info(key)
			holder := snapshot.Holder{
				Device: device, Profile: profile, PID: process.PID, Process: process,
				Workload: attribution.Workload, Pending: attribution.Pending,
				Detail: info.Detail, Command: info.Command, CommandLine: info.CommandLine, StartedAt: info.StartedAt, Zombie: info.Zombie,
				System: attribution.Workload.Kind == meter.KindSystem, Disagrees: info.Verdict.Disagrees,
				Holds: meter.Holds(process, attribution.Workload),
			}
			if reading.SamplesKnown {
				holder.ActivityPercent = gpu.Some(activity[process.PID])
			}
			holder.LastActive = seen.active(key, device, activity[process.PID] > 0, reading.At)
			all = append(all, holder)
			// A name that is still being looked up begins no series.
			if holder.Holds && !holder.Pending {
				seen.holds(reading, device, profile, &all[len(all)-1], info.FirstListed)
				seen.holding = append(seen.holding, resources.Holder{
					PID: key.PID, StartTicks: key.StartTicks, Workload: holder.Workload.Key(), Cgroup: info.Cgroup,
				})
			}
		}
	}
	add(reading.Card.UUID, "", reading.Processes)
	for _, instance := range reading.Instances {
		add(instance.UUID, instance.Profile, instance.Processes)
	}
	return append(all, s.givenOf(reading, all, seen)...)
}

// givenOf are the workloads that were given a device of the card and have no
// process on it.
func (s *sampler) givenOf(reading *gpu.Reading, present []snapshot.Holder, seen *presence) []snapshot.Holder {
	var all []snapshot.Holder
	for _, given := range s.given[reading.Card.UUID] {
		attribution := s.holders.Attribute(given.Key)
		same := func(h snapshot.Holder) bool {
			return h.Device == given.Device && h.Holds && h.Workload.SameKey(attribution.Workload)
		}
		if slices.ContainsFunc(present, same) {
			continue
		}
		info := s.holders.Info(given.Key)
		holder := snapshot.Holder{
			Device: given.Device, Profile: profileOf(reading, given.Device), Workload: attribution.Workload, Pending: attribution.Pending,
			Detail: info.Detail, StartedAt: given.Since, Holds: given.Exclusive, Disagrees: info.Verdict.Disagrees,
		}
		all = append(all, holder)
		if !holder.Pending {
			seen.given(reading, holder)
		}
	}
	return all
}

func profileOf(reading *gpu.Reading, device string) string {
	for _, instance := range reading.Instances {
		if instance.UUID == device {
			return instance.Profile
		}
	}
	return ""
}

func (s *sampler) exporterView(took time.Duration) snapshot.Exporter {
	counters, stats := s.meter.Counters(), s.rows.stats()
	return snapshot.Exporter{
		SampleDuration: took, ChildRestarts: s.restarts(), DroppedValues: maps.Clone(s.dropped),
		GonePIDs: s.holders.Gone(), HiddenPIDs: s.holders.Hidden(),
		ClockWaits: s.past.ClockWaits + counters.ClockWaits, ClockJumps: s.past.ClockJumps + counters.ClockJumps,
		MaxGaps: s.past.MaxGaps + counters.MaxGaps, DroppedEnergySteps: s.past.DroppedEnergySteps + counters.DroppedEnergySteps,
		JournalBytes: stats.Bytes, JournalOldestUnpulled: stats.OldestUnpulled, JournalError: stats.LastError,
		JournalWaitingRows: int64(stats.WaitingRows), Collectors: s.holders.Collectors(),
	}
}
