package meter

import (
	"errors"

	"gpuledger/exporter/gpu"
)

const (
	microsecond int64 = 1
	second            = 1_000_000 * microsecond

	// jumpUS is how far the wall clock may run ahead of the ledger before the
	// difference is a jump (law L8).
	jumpUS = 1 * second
	// newRunUS is how far the wall clock may fall behind the ledger before
	// waiting for it makes no sense and a new run begins (law L8).
	newRunUS = 15 * 60 * second

	bucketUS = 15 * 60 * second
)

// ErrNewRun says that the wall clock fell behind the ledger's time by more
// than 15 minutes: this run must be finished and another begun.
var ErrNewRun = errors.New("wall clock is more than 15 minutes behind the ledger's time: a new run must begin")

// clock is one timeline's ledger time. It advances by the monotonic clock,
// never goes back, and never passes the wall clock.
type clock struct {
	ledgerUS    int64
	monotonicUS int64
	started     bool
}

// step is what an advance did beside moving on.
type step struct {
	jumped bool // ledger time skipped ahead to the wall clock
	waited bool // ledger time stood still, wholly or in part
}

// startClock begins at the wall clock, or at notBeforeUS if the wall clock is
// behind that by no more than newRunUS.
func startClock(at gpu.Instant, notBeforeUS int64) clock {
	ledgerUS := at.WallUS
	if notBeforeUS > ledgerUS && notBeforeUS-ledgerUS <= newRunUS {
		ledgerUS = notBeforeUS
	}
	return clock{ledgerUS: ledgerUS, monotonicUS: at.MonotonicUS, started: true}
}

// advance moves to at, whose monotonic time must not lie before the clock's.
func (c *clock) advance(at gpu.Instant) (step, error) {
	next := c.ledgerUS + at.MonotonicUS - c.monotonicUS
	switch {
	case at.WallUS-next > jumpUS:
		c.ledgerUS, c.monotonicUS = at.WallUS, at.MonotonicUS
		return step{jumped: true}, nil
	case next-at.WallUS > newRunUS:
		return step{}, ErrNewRun
	case next > at.WallUS:
		c.ledgerUS, c.monotonicUS = max(c.ledgerUS, at.WallUS), at.MonotonicUS
		return step{waited: true}, nil
	}
	c.ledgerUS, c.monotonicUS = next, at.MonotonicUS
	return step{}, nil
}

// bucketStart is the start of the bucket that ledgerUS lies in.
func bucketStart(ledgerUS int64) int64 {
	start := ledgerUS - ledgerUS%bucketUS
	if ledgerUS%bucketUS < 0 {
		start -= bucketUS
	}
	return start
}
