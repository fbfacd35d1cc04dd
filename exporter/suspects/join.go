package suspects

import (
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

// CardOf is what a reading says of memory and who has it; keys are the
// processes that its PIDs stand for.
func CardOf(reading *gpu.Reading, keys map[uint32]meter.ProcessKey) Card {
	return Card{
		UUID: reading.Card.UUID, Index: reading.Card.Index, Minor: reading.Card.Minor,
		UnexplainedBytes: reading.UnattributedMemoryBytes(), Listed: keys,
	}
}

// Keys are the processes that are suspected, for holders.Table.Ask.
func (f *Findings) Keys() []meter.ProcessKey {
	if f == nil {
		return nil
	}
	var keys []meter.ProcessKey
	seen := map[meter.ProcessKey]bool{}
	for _, finding := range f.Cards {
		for _, s := range finding.Suspects {
			if s.Key.StartTicks != 0 && !seen[s.Key] {
				seen[s.Key] = true
				keys = append(keys, s.Key)
			}
		}
	}
	return keys
}

// Of joins what was found of a card with who the processes belong to. Those
// that NVML lists by now, and those that have ended, are left out; ended says
// that there was one.
func (f *Findings) Of(uuid string, listed map[uint32]meter.ProcessKey, table *holders.Table) (joined []snapshot.Suspect, search snapshot.Search, ended bool) {
	search.Verdict = snapshot.SearchLooking
	if f == nil {
		return nil, search, false
	}
	finding, looked := f.Cards[uuid]
	search.At, search.Hidden, search.HidePID, search.Error = f.At, f.Hidden, f.HidePID, f.Error
	if f.Error != "" {
		search.Verdict = snapshot.SearchFailed
		return nil, search, false
	}
	if !looked {
		return nil, snapshot.Search{Verdict: snapshot.SearchLooking}, false
	}
	suspected := false
	for _, s := range finding.Suspects {
		if _, is := listed[s.Key.PID]; is {
			continue
		}
		lives, known := table.Lives(s.Key)
		if known && !lives {
			ended = true
			continue
		}
		one := snapshot.Suspect{PID: s.Key.PID, Reason: s.Reason, Strength: s.Strength, Why: s.Why, Monitor: s.Strength == None}
		attribution, info := table.Attribute(s.Key), table.Info(s.Key)
		one.Workload, one.Pending, one.Detail = attribution.Workload, attribution.Pending || !known && s.Key.StartTicks != 0, info.Detail
		one.Command, one.CommandLine, one.StartedAt, one.Zombie = info.Command, info.CommandLine, info.StartedAt, info.Zombie
		suspected = suspected || !one.Monitor
		joined = append(joined, one)
	}
	switch {
	case suspected:
		search.Verdict = snapshot.SearchFound
	case !f.Whole || ended:
		search.Verdict = snapshot.SearchLooking
	case f.Hidden > 0 || f.HidePID:
		search.Verdict = snapshot.SearchHidden
	default:
		search.Verdict = snapshot.SearchNobody
	}
	return joined, search, ended
}

// Keys are the processes that are suspected now; none once no card's memory
// needs explaining.
func (w *Watcher) Keys() []meter.ProcessKey {
	w.mutex.Lock()
	need := len(w.needy) > 0
	w.mutex.Unlock()
	if !need {
		return nil
	}
	return w.Findings().Keys()
}

// Of is Findings.Of for a card whose memory needs explaining, and says nothing
// of others.
func (w *Watcher) Of(uuid string, listed map[uint32]meter.ProcessKey, table *holders.Table) ([]snapshot.Suspect, snapshot.Search) {
	if !w.Needy(uuid) {
		return nil, snapshot.Search{}
	}
	joined, search, ended := w.Findings().Of(uuid, listed, table)
	if ended {
		w.Ended()
	}
	return joined, search
}
