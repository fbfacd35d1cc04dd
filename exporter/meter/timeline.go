package meter

import (
	"gpuledger/exporter/gpu"
)

// unknownPowerLimitMW bounds energy steps of cards that do not tell their
// limit: more than any card on the market draws.
const unknownPowerLimitMW = 2_000_000

// nanojoulesPerMillijoule: milliwatts × microseconds are nanojoules.
const nanojoulesPerMillijoule = 1_000_000

// timeline is one card's time: its clock, its last reading, the whole
// intervals that wait to be committed, and what splits carry.
type timeline struct {
	card    string
	clock   clock
	last    *Observation // state since clock.ledgerUS; nil while unobserved
	waiting []interval

	hasEnergyCounter bool
	powerRemainderNJ int64

	slices  surplus[string] // card time among devices
	devices map[string]*device
}

// interval is a whole stretch between two readings, not yet committed.
type interval struct {
	fromUS, toUS   int64
	endMonotonicUS int64
	during         *Observation // the state that held in it
	energyMJ       int64
	activity       activity
}

// activity is what the reading at an interval's end says of the SM use in it.
type activity struct {
	// perProcess is SM percent by PID; nil where the driver has none.
	perProcess map[uint32]int64
	// endListed are the PIDs on the list at the end: a sample of a PID that is
	// on neither end's list is garbage.
	endListed map[uint32]bool
	// device is the card's utilisation in percent, where perProcess is nil.
	device gpu.Optional[uint32]
}

func newTimeline(card string) *timeline {
	return &timeline{card: card, slices: surplus[string]{}, devices: map[string]*device{}}
}

// activityOf reads the activity of the interval that ends with reading.
// Samples over 100 % are not believed (drivers were seen to report 37100 %).
// Whether a PID is on a list is decided when the interval is committed.
func activityOf(reading *gpu.Reading) activity {
	if reading.State != gpu.StateGood || reading.SlicesTotal > 0 || len(reading.Instances) > 0 {
		return activity{}
	}
	if !reading.SamplesKnown {
		return activity{device: reading.UtilizationPercent}
	}
	listed := make(map[uint32]bool, len(reading.Processes))
	for _, process := range reading.Processes {
		listed[process.PID] = true
	}
	known := activity{perProcess: make(map[uint32]int64, len(reading.Samples))}
	for _, sample := range reading.Samples {
		if sample.SM > 100 {
			continue
		}
		known.perProcess[sample.PID] = max(known.perProcess[sample.PID], int64(sample.SM))
	}
	known.endListed = listed
	return known
}

// energy is what the card used between two consecutive readings, in mJ, by
// law L4.
func (t *timeline) energy(before, after gpu.Reading, elapsedUS int64, counters *Counters) int64 {
	if before.State != gpu.StateGood || after.State != gpu.StateGood {
		return 0
	}
	from, knewFrom := before.EnergyMJ.Get()
	to, knowsTo := after.EnergyMJ.Get()
	t.hasEnergyCounter = t.hasEnergyCounter || knewFrom || knowsTo
	if t.hasEnergyCounter {
		limitMW := int64(unknownPowerLimitMW)
		if known, ok := after.PowerLimitMW.Get(); ok && known > 0 {
			limitMW = known
		}
		if !knewFrom || !knowsTo || to < from || to-from > limitMW*elapsedUS/nanojoulesPerMillijoule*3/2 {
			counters.DroppedEnergySteps++
			return 0
		}
		return to - from
	}
	powerMW, ok := before.PowerMW.Get()
	if !ok || powerMW < 0 {
		return 0
	}
	t.powerRemainderNJ += powerMW * elapsedUS
	energyMJ := t.powerRemainderNJ / nanojoulesPerMillijoule
	t.powerRemainderNJ %= nanojoulesPerMillijoule
	return energyMJ
}
