package meter

import (
	"cmp"
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/usage"
)

// Options of a Meter.
type Options struct {
	Run  string // the run's random id, part of every row's key
	Node string
	// NotBeforeUS is the newest ledger instant of earlier runs of this node.
	// The new run's time stands still until the wall clock has passed it, so
	// that no second is in two runs.
	NotBeforeUS int64
	// MaxGap is the longest interval that counts (default 10 s); a longer one is
	// wholly unobserved.
	MaxGap time.Duration
	// AttributionWait is how long an interval waits for a name or owner
	// (default 10 s).
	AttributionWait time.Duration
}

// Counters are what a meter saw that is not usage.
type Counters struct {
	ClockJumps         int64 // intervals lost to the wall clock running ahead
	ClockWaits         int64 // readings at which the ledger's time stood still
	MaxGaps            int64 // intervals lost for being longer than MaxGap
	DroppedEnergySteps int64 // energy steps that could not be true
}

// Interval is a stretch of a card's timeline that was committed.
type Interval struct {
	Card         string
	FromUS, ToUS int64 // ledger time, µs since the Unix epoch
}

// Committed is what one Commit added: increments, not sums, in a fixed order.
// Rows that have the same key add up.
type Committed struct {
	Rows      []usage.Row
	Intervals []Interval
}

// Meter is one run's count over all cards of a node. It is not safe for
// concurrent use.
type Meter struct {
	options  Options
	cards    map[string]*timeline
	counters Counters
	latestUS int64 // newest ledger time of any card, or edge promised by OpenFrom
	begun    bool  // a reading was taken
}

// New begins a run.
func New(options Options) *Meter {
	if options.MaxGap == 0 {
		options.MaxGap = 10 * time.Second
	}
	if options.AttributionWait == 0 {
		options.AttributionWait = 10 * time.Second
	}
	return &Meter{options: options, cards: map[string]*timeline{}, latestUS: options.NotBeforeUS}
}

// Counters returns what was seen so far.
func (m *Meter) Counters() Counters { return m.counters }

// Observe takes one card's reading. A reading that is not newer than the
// card's last is ignored, as is one whose state is gpu.StateFailed: it is
// evidence of nothing. ErrNewRun asks the caller to Drain this meter, begin
// another and observe the reading there.
func (m *Meter) Observe(o Observation) error {
	reading := &o.Reading
	if reading.State == gpu.StateFailed {
		return nil
	}
	card, ok := m.cards[reading.Card.UUID]
	if !ok {
		card = newTimeline(reading.Card.UUID)
		m.cards[reading.Card.UUID] = card
	}
	if !card.clock.started {
		if m.latestUS-reading.At.WallUS > newRunUS {
			if m.begun {
				return ErrNewRun
			}
			// An earlier run's clock was far ahead of today's: waiting for it
			// makes no sense, and this already is a new run.
			m.latestUS = 0
		}
		m.begun = true
		card.clock = startClock(reading.At, m.latestUS)
		if card.clock.ledgerUS > reading.At.WallUS {
			m.counters.ClockWaits++
		}
		card.last = &o
		m.latestUS = max(m.latestUS, card.clock.ledgerUS)
		return nil
	}
	if reading.At.MonotonicUS <= card.clock.monotonicUS {
		return nil
	}
	fromUS, elapsedUS := card.clock.ledgerUS, reading.At.MonotonicUS-card.clock.monotonicUS
	moved, err := card.clock.advance(reading.At)
	if err != nil {
		return err
	}
	m.latestUS = max(m.latestUS, card.clock.ledgerUS)
	if moved.waited {
		m.counters.ClockWaits++
	}
	switch {
	case card.last == nil:
	case moved.jumped:
		m.counters.ClockJumps++
	case elapsedUS > m.options.MaxGap.Microseconds():
		m.counters.MaxGaps++
	default:
		next := interval{fromUS: fromUS, toUS: card.clock.ledgerUS, endMonotonicUS: reading.At.MonotonicUS, during: card.last}
		next.energyMJ = card.energy(card.last.Reading, *reading, elapsedUS, &m.counters)
		next.activity = activityOf(reading)
		card.waiting = append(card.waiting, next)
	}
	card.last = &o
	return nil
}

// Tick tells the meter that time passed, whether or not cards gave readings.
// A card whose last reading is older than MaxGap can never complete that
// interval, so the time up to now is settled as unobserved. ErrNewRun as in
// Observe.
func (m *Meter) Tick(now gpu.Instant) error {
	for _, card := range m.cards {
		if now.MonotonicUS-card.clock.monotonicUS <= m.options.MaxGap.Microseconds() {
			continue
		}
		if _, err := card.clock.advance(now); err != nil {
			return err
		}
		if card.last != nil {
			m.counters.MaxGaps++
			card.last = nil
		}
		m.latestUS = max(m.latestUS, card.clock.ledgerUS)
	}
	return nil
}

// Commit commits every whole interval that need not wait any longer for an
// attribution. attribute is asked for each process of an interval.
func (m *Meter) Commit(now gpu.Instant, attribute func(ProcessKey) Attribution) Committed {
	return m.commit(attribute, func(next interval) bool {
		return now.MonotonicUS-next.endMonotonicUS < m.options.AttributionWait.Microseconds()
	})
}

// Drain commits every whole interval now, with what is known: the end of a run.
func (m *Meter) Drain(attribute func(ProcessKey) Attribution) Committed {
	return m.commit(attribute, func(interval) bool { return false })
}

func (m *Meter) commit(attribute func(ProcessKey) Attribution, mayWait func(interval) bool) Committed {
	var committed Committed
	for _, uuid := range sortedKeys(m.cards) {
		card := m.cards[uuid]
		done := 0
		for _, next := range card.waiting {
			workloads, pending := attributed(next.during, attribute)
			if pending && mayWait(next) {
				break
			}
			rows := card.commit(next, workloads, m.options)
			committed.Rows = append(committed.Rows, rows...)
			committed.Intervals = append(committed.Intervals, Interval{Card: uuid, FromUS: next.fromUS, ToUS: next.toUS})
			done++
		}
		card.waiting = slices.Delete(card.waiting, 0, done)
	}
	return committed
}

// SettledUS is the ledger time up to which the card's rows can change no more:
// everything before it is committed or unobserved. For a card never seen it is
// the newest ledger time of the node.
func (m *Meter) SettledUS(card string) int64 {
	line, ok := m.cards[card]
	if !ok {
		return m.latestUS
	}
	if len(line.waiting) > 0 {
		return line.waiting[0].fromUS
	}
	return line.clock.ledgerUS
}

// LatestUS is the newest ledger time of any card: what the next run must not
// begin before.
func (m *Meter) LatestUS() int64 { return m.latestUS }

// OpenFrom is the start of the earliest bucket that may still receive rows.
// The answer is a promise: a card seen for the first time later begins no
// earlier, even if its reading was stamped before wallUS.
func (m *Meter) OpenFrom(wallUS int64) time.Time {
	earliestUS := wallUS
	if m.begun {
		earliestUS = max(wallUS, m.latestUS)
	}
	for uuid := range m.cards {
		earliestUS = min(earliestUS, m.SettledUS(uuid))
	}
	edgeUS := bucketStart(earliestUS)
	m.latestUS = max(m.latestUS, edgeUS)
	return time.UnixMicro(edgeUS).UTC()
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
