package exporter

import (
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/usage"
)

// endedWorkloadShown is how long the counters of an ended workload stay.
const endedWorkloadShown = time.Hour

// maxEnded is how many ended workloads stay that long at most, and keptEnded how
// many are left once there are more: a node on which thousands come and go in a
// minute must not remember an hour of them. On /metrics those that folded keep
// what they counted.
const (
	maxEnded  = 2500
	keptEnded = 2000
)

// tally keeps what counters show: sums of committed rows since the exporter
// started, across runs. It never looks at how the rows came about.
type tally struct {
	cards     map[string]*cardTally
	workloads map[workloadKey]*workloadTally
}

// workloadKey is a workload on a device.
type workloadKey struct {
	device   string
	workload meter.Workload // AttributedBy empty
}

type cardTally struct {
	rowsUS, meteredUS, idleUS, downUS int64
	energyMJ                          int64
	energySeen                        bool
	throttleUS                        map[string]int64
	xids                              map[uint64]snapshot.XID
	// answeredAt is when the card gave its first reading.
	answeredAt time.Time
	// previous is the last good reading, for what is integrated between two.
	previous *gpu.Reading
}

type workloadTally struct {
	card, device, profile string
	index                 int
	attributedBy          string
	totals                meter.Totals
	// latest is what the newest pass committed, over latestUS of card time.
	latest                                    usage.Amounts
	latestUS                                  int64
	detail                                    snapshot.Detail
	firstSeen, heldSince, lastActive, endedAt time.Time
	present                                   bool
}

func newTally() *tally {
	return &tally{cards: map[string]*cardTally{}, workloads: map[workloadKey]*workloadTally{}}
}

func (t *tally) card(uuid string) *cardTally {
	found, ok := t.cards[uuid]
	if !ok {
		found = &cardTally{throttleUS: map[string]int64{}, xids: map[uint64]snapshot.XID{}}
		t.cards[uuid] = found
	}
	return found
}

func (t *tally) workload(key workloadKey, now time.Time) *workloadTally {
	key.workload = key.workload.Key()
	found, ok := t.workloads[key]
	if !ok {
		found = &workloadTally{device: key.device, firstSeen: now}
		t.workloads[key] = found
	}
	return found
}

// add takes what the meter committed in one pass.
func (t *tally) add(committed meter.Committed, now time.Time) {
	for _, each := range t.workloads {
		each.latest, each.latestUS = usage.Amounts{}, 0
	}
	lengths := map[string]int64{}
	for _, interval := range committed.Intervals {
		length := interval.ToUS - interval.FromUS
		t.card(interval.Card).meteredUS += length
		lengths[interval.Card] += length
	}
	for i := range committed.Rows {
		row := &committed.Rows[i]
		card := t.card(row.Card)
		card.rowsUS += row.GPUUS
		card.energyMJ += row.EnergyMJ
		switch row.State {
		case usage.StateIdle:
			card.idleUS += row.GPUUS
			continue
		case usage.StateDown:
			card.downUS += row.GPUUS
			continue
		}
		each := t.workload(workloadKey{device: row.Device, workload: meter.Workload{
			User: row.User, UID: row.UID, Kind: row.Kind, Name: row.Workload, Project: row.Project, Class: row.Class,
		}}, now)
		each.card, each.profile, each.index, each.attributedBy = row.Card, row.Profile, row.Index, row.AttributedBy
		each.totals.Amounts = each.totals.Amounts.Plus(row.Amounts)
		each.latest = each.latest.Plus(row.Amounts)
		each.latestUS = lengths[row.Card]
		if row.ActiveUS > 0 {
			each.lastActive = now
		}
	}
}

// observe integrates what a card's readings say beside its holders.
func (c *cardTally) observe(reading *gpu.Reading, maxGap time.Duration) {
	for _, event := range reading.Events {
		seen := c.xids[event.XID]
		seen.Count++
		seen.Last = time.UnixMicro(event.At.WallUS)
		c.xids[event.XID] = seen
	}
	if reading.State != gpu.StateGood {
		c.previous = nil
		return
	}
	c.energySeen = c.energySeen || reading.EnergyMJ.Known || reading.PowerMW.Known
	if before := c.previous; before != nil {
		elapsedUS := reading.At.MonotonicUS - before.At.MonotonicUS
		if mask, known := before.ThrottleReasons.Get(); known && elapsedUS > 0 && elapsedUS <= maxGap.Microseconds() {
			for _, reason := range gpu.ThrottleReasons {
				if mask&reason.Mask != 0 {
					c.throttleUS[reason.Name] += elapsedUS
				}
			}
		}
	}
	kept := gpu.Reading{At: reading.At, ThrottleReasons: reading.ThrottleReasons}
	c.previous = &kept
}

// forget drops workloads that ended more than an hour ago, and of too many those
// that ended first.
func (t *tally) forget(now time.Time) {
	var ended []workloadKey
	for key, each := range t.workloads {
		switch {
		case each.present || each.endedAt.IsZero():
		case now.Sub(each.endedAt) > endedWorkloadShown:
			delete(t.workloads, key)
		default:
			ended = append(ended, key)
		}
	}
	if len(ended) <= maxEnded {
		return
	}
	slices.SortFunc(ended, func(a, b workloadKey) int { return t.workloads[a].endedAt.Compare(t.workloads[b].endedAt) })
	for _, key := range ended[:len(ended)-keptEnded] {
		delete(t.workloads, key)
	}
}
