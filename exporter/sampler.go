package exporter

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/resources"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/suspects"
)

// flushEvery is how often open rows go to the journal. A kill -9 loses at most
// this, the interval that was not whole yet, and what still waited for a name.
const flushEvery = 5 * time.Second

// sampler takes the passes of the source, in one goroutine, and publishes a
// snapshot for each. All state of a node's metering is here.
type sampler struct {
	options   Options
	logger    *slog.Logger
	holders   *holders.Table
	resources *resources.Reader
	rows      *writer
	store     *snapshot.Store
	now       func() gpu.Instant

	started time.Time
	run     string
	meter   *meter.Meter
	past    meter.Counters // of earlier runs of this process
	book    *meter.Book
	tally   *tally

	indexes   map[string]int // NVML index by UUID, frozen at first sight
	identity  map[string]gpu.Card
	dropped   map[string]int64
	keys      map[string]map[uint32]meter.ProcessKey // of the pass at hand, by card
	given     map[string][]holders.Given             // of the pass at hand, by card
	flushedAt int64                                  // CLOCK_MONOTONIC, µs
	sequence  uint64
	driver    gpu.Driver
	restarts  func() int64
	active    *activeSince
	suspects  *suspects.Watcher
}

func newSampler(options Options, table *holders.Table, measured *resources.Reader, rows *writer, notBeforeUS int64) *sampler {
	s := &sampler{
		options: options, logger: options.Logger, holders: table, resources: measured, rows: rows, store: options.store, now: options.Now,
		started: time.UnixMicro(options.Now().WallUS),
		book:    meter.NewBook(), tally: newTally(),
		restarts: options.ChildRestarts,
		indexes:  map[string]int{}, identity: map[string]gpu.Card{}, dropped: map[string]int64{},
		keys: map[string]map[uint32]meter.ProcessKey{}, given: map[string][]holders.Given{},
		active:   &activeSince{last: map[processOnDevice]time.Time{}, seen: map[processOnDevice]bool{}},
		suspects: options.suspects,
	}
	if s.suspects == nil {
		s.suspects = suspects.New(suspects.Options{}) // looks for nobody
	}
	s.begin(notBeforeUS)
	return s
}

// begin starts a run.
func (s *sampler) begin(notBeforeUS int64) {
	s.run = newRunID(time.UnixMicro(s.now().WallUS))
	s.meter = meter.New(meter.Options{Run: s.run, Node: s.options.NodeName, NotBeforeUS: notBeforeUS, MaxGap: s.options.MaxGap})
	s.logger.Info("run begins", "run", s.run, "node", s.options.NodeName)
}

// pass takes one pass of the source.
func (s *sampler) pass(ctx context.Context, pass gpu.Pass) {
	begun := s.now()
	for i := range pass.Readings {
		s.freeze(&pass.Readings[i].Card)
		for name, count := range pass.Readings[i].DroppedValues {
			s.dropped[name] += count
		}
	}
	if pass.Error == "" && pass.Driver != (gpu.Driver{}) {
		s.driver = pass.Driver
	}
	s.holders.Ask(s.suspects.Keys())
	s.holders.Refresh(ctx, pass)
	clear(s.keys)
	clear(s.given)
	for i := range pass.Readings {
		reading := &pass.Readings[i]
		s.tally.card(reading.Card.UUID).observe(reading, s.options.MaxGap)
		keys := s.holders.Keys(*reading)
		s.keys[reading.Card.UUID] = keys
		given := s.holders.Given(reading)
		s.given[reading.Card.UUID] = given
		observation := meter.Observation{Reading: *reading, Keys: keys, Reservations: reservations(given)}
		if err := s.meter.Observe(observation); errors.Is(err, meter.ErrNewRun) {
			s.restart(err)
			if err := s.meter.Observe(observation); err != nil {
				s.logger.Error("reading not metered", "gpu", reading.Card.UUID, "err", err)
			}
		}
	}
	s.suspects.Note(s.cardsWithMemory(pass))
	now := s.now()
	if err := s.meter.Tick(now); errors.Is(err, meter.ErrNewRun) {
		s.restart(err)
	}
	wall := time.UnixMicro(now.WallUS)
	committed := s.meter.Commit(now, s.holders.Attribute)
	s.book.Add(committed.Rows)
	s.tally.add(committed, wall)
	s.flush(now, false)
	s.publish(pass, now, time.Duration(now.MonotonicUS-begun.MonotonicUS)*time.Microsecond)
}

// cardsWithMemory is what a pass says of memory and who has it.
func (s *sampler) cardsWithMemory(pass gpu.Pass) []suspects.Card {
	cards := make([]suspects.Card, 0, len(pass.Readings))
	for i := range pass.Readings {
		if reading := &pass.Readings[i]; reading.State == gpu.StateGood {
			cards = append(cards, suspects.CardOf(reading, s.keys[reading.Card.UUID]))
		}
	}
	return cards
}

// reservations are those of what was given that hold without a process.
func reservations(given []holders.Given) []meter.Reservation {
	var all []meter.Reservation
	for _, each := range given {
		if each.Exclusive {
			all = append(all, meter.Reservation{Device: each.Device, Key: each.Key})
		}
	}
	return all
}

// freeze keeps a card's index what it was when the card was first seen: NVML
// renumbers when a card is lost, and a series must not change its card.
func (s *sampler) freeze(card *gpu.Card) {
	index, known := s.indexes[card.UUID]
	if !known {
		index = card.Index
		for taken := true; taken; {
			taken = false
			for _, other := range s.indexes {
				if other == index {
					taken, index = true, index+1
					break
				}
			}
		}
		s.indexes[card.UUID] = index
	}
	card.Index = index
	if card.Name != "" || s.identity[card.UUID].UUID == "" {
		s.identity[card.UUID] = *card
	}
}

// restart ends the run because the wall clock fell far back, and begins
// another at the clock's new time.
func (s *sampler) restart(reason error) {
	s.logger.Warn("run ends", "run", s.run, "reason", reason)
	s.finish()
	s.begin(0)
}

// finish commits what is whole and makes every row of the run final.
func (s *sampler) finish() {
	now := s.now()
	committed := s.meter.Drain(s.holders.Attribute)
	s.book.Add(committed.Rows)
	s.tally.add(committed, time.UnixMicro(now.WallUS))
	counters := s.meter.Counters()
	s.past.ClockJumps += counters.ClockJumps
	s.past.ClockWaits += counters.ClockWaits
	s.past.MaxGaps += counters.MaxGaps
	s.past.DroppedEnergySteps += counters.DroppedEnergySteps
	s.rows.put(journal.Batch{Final: s.book.FinishAll(), InstantUS: s.meter.LatestUS()})
}

// flush hands rows to the journal: final ones at once, open ones every
// flushEvery.
func (s *sampler) flush(now gpu.Instant, force bool) {
	final := s.book.Finish(s.meter.SettledUS)
	due := now.MonotonicUS-s.flushedAt >= flushEvery.Microseconds()
	if !force && !due && len(final) == 0 {
		return
	}
	s.flushedAt = now.MonotonicUS
	s.rows.put(journal.Batch{
		Open: s.book.Changed(), Final: final,
		InstantUS: s.meter.LatestUS(), OpenFrom: s.meter.OpenFrom(now.WallUS),
	})
}
