package holders

import (
	"time"

	"gpuledger/exporter/meter"
)

// admitsAtOnce bounds how many processes that no card lists are read in one
// Refresh: a pass has no time for them all.
const admitsAtOnce = 8

// Ask names processes that no card lists and about which Attribute and Info
// shall know all the same, from the next Refresh on, until they are no longer
// asked for. They must have been seen in /proc.
func (t *Table) Ask(keys []meter.ProcessKey) { t.asked = keys }

// Lives reports whether an asked process is still there, a zombie included, as
// of the newest Refresh; known is false before it could be read.
func (t *Table) Lives(key meter.ProcessKey) (lives, known bool) {
	p := t.processes[key]
	if p == nil {
		return false, false
	}
	return p.handle != nil || p.zombie, true
}

func (t *Table) admitAsked(now time.Time) {
	admits := 0
	for i := range t.asked {
		key := t.asked[(t.askedFrom+i)%len(t.asked)]
		if _, listed := t.listed[key.PID]; listed {
			continue // it has been read for its card
		}
		p := t.processes[key]
		if p != nil && p.handle != nil {
			p.lastListed = now
			continue
		}
		if p != nil && !p.zombie || p == nil && admits == admitsAtOnce {
			continue // it has ended; or it has its turn at another pass
		}
		admits++
		// Whatever has the number now and began later is another process. What
		// can't be read is no fault of a card's list, so nothing counts it.
		_ = t.admit(key.PID, t.options.FS.StartMonotonicUS(key.StartTicks), now)
	}
	t.askedFrom += admits // those that had no turn come first next time
}
