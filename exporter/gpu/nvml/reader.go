// Package nvml reads NVIDIA's management library: the one place where cgo
// meets a driver.
//
// A driver can do what no code can catch: a symbol it lacks ends the process,
// a list it writes too long overruns memory, a call can hang in the kernel for
// ever. What can be guarded against is guarded here; for the rest the package
// is meant to run in a child process (package child).
package nvml

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// Options say how to read. The zero value of each field stands for its default.
type Options struct {
	// LibraryPath is the file to load; by default libnvidia-ml.so.1, looked
	// for as the dynamic linker does (LD_LIBRARY_PATH, ld.so.cache).
	LibraryPath string
	// Interval is the time from pass to pass; by default 1 s.
	Interval time.Duration
	// Deadline is how long a card may take for its reading; by default four
	// fifths of Interval and at least 500 ms. A reading that takes longer is
	// thrown away whenever it completes.
	Deadline time.Duration
	// FirstSamples has a card's first reading give the samples it finds, which
	// reach some seconds back. That is for those who take one look; who meters
	// must not count what was before.
	FirstSamples bool
	// Logger is where changes of state are told; by default slog.Default().
	Logger *slog.Logger
	// Clock stamps readings; by default Now. It must be safe for concurrent use.
	Clock func() gpu.Instant
}

const (
	defaultInterval = time.Second
	leastInterval   = 10 * time.Millisecond
	leastDeadline   = 500 * time.Millisecond

	// NVML that can't be started is tried again after these times.
	leastRetry = 500 * time.Millisecond
	mostRetry  = 15 * time.Second

	// Cards are counted anew at these intervals: seldom while all answer, and
	// more often while some can't be had.
	recountAll     = time.Minute
	recountRefused = 10 * time.Second
	// recountStale is the least time between two recounts that stale handles
	// ask for.
	recountStale = time.Second

	// restartAfter is how many passes in a row may have no reading but failed
	// ones before NVML is started again.
	restartAfter = 30
)

// Reader reads all cards of the node. It implements gpu.Source.
type Reader struct {
	library  *library
	interval time.Duration
	deadline time.Duration
	// firstSamples is as of Options.
	firstSamples bool
	logger       *slog.Logger
	now          func() gpu.Instant

	// All below belongs to Run.
	pass    uint64
	cards   map[string]*card
	results chan result
	stopped chan struct{} // closed when nobody takes results any more
	events  *eventQueue
	watch   *watcher

	control      chan controlResult
	controlSince time.Time // when the control operation now running began; zero if none is
	controlWhat  string

	ready     bool
	trouble   string        // why not ready
	retryAt   time.Time     // when to try again
	retry     time.Duration // how long to wait after the next failure
	recountAt time.Time
	countedAt time.Time
	renew     bool  // handles went stale: the next count begins a session
	fatal     error // why only a new process can go on
	session   uint64
	driver    gpu.Driver
	traits    driverTraits
	expected  int
	failures  int
	lookups   *lookups
	logged    map[string]string // per subject, what was said of it last
	offsetUS  int64             // wall minus monotonic clock at the last pass
}

// card is the reader's side of one card: its worker holds the other.
type card struct {
	uuid   string
	index  int
	device gonvml.Device
	orders chan request // never holds more than one
	// outstanding is the pass whose reading the worker is still at, 0 if none.
	outstanding uint64
	samples     sampleMark
	// refused is set while NVML counts the card and gives no handle for it.
	refused gpu.Reading
	barred  bool
	// leaving is a card that NVML no longer counts while its worker is inside
	// a call: it is kept until that ends, lest it come back and get a second.
	leaving bool
	// last is what was last known of the card.
	last gpu.Card
}

// Open makes a Reader. It does not load the library: that NVML is missing or
// broken is something passes report, as it can be mended while we run.
func Open(options Options) (*Reader, error) {
	if options.Interval == 0 {
		options.Interval = defaultInterval
	}
	if options.Interval < leastInterval {
		return nil, fmt.Errorf("open NVML reader: interval %v is too short: at least %v", options.Interval, leastInterval)
	}
	if options.Deadline == 0 {
		options.Deadline = max(options.Interval*4/5, leastDeadline)
	}
	if options.Deadline < 0 {
		return nil, fmt.Errorf("open NVML reader: deadline %v is negative", options.Deadline)
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	if options.Clock == nil {
		options.Clock = Now
	}
	return &Reader{
		library:  newLibrary(options.LibraryPath),
		interval: options.Interval,
		deadline: options.Deadline, firstSamples: options.FirstSamples,
		logger:  options.Logger,
		now:     options.Clock,
		cards:   map[string]*card{},
		results: make(chan result),
		stopped: make(chan struct{}),
		events:  newEventQueue(),
		control: make(chan controlResult, 1),
		retry:   leastRetry,
		lookups: newLookups(),
		logged:  map[string]string{},
		trouble: "NVML is being started",
	}, nil
}

// Run delivers one pass per interval until ctx ends; the first at once. It
// returns ctx's error then, and ErrLibraryMismatch, after a pass that says so,
// when only a new process can go on. It must be called once only.
func (r *Reader) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	defer r.stop()
	ticker := time.NewTicker(r.interval)
	defer ticker.Stop()
	for {
		pass, err := r.read(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		deliver(pass)
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// stop lets workers and the event watcher go. Those inside a call can't be
// waited for; they end when it does.
func (r *Reader) stop() {
	for _, c := range r.cards {
		close(c.orders)
	}
	if r.watch != nil {
		r.watch.stop()
	}
	close(r.stopped)
}

// read makes one pass.
func (r *Reader) read(ctx context.Context) (gpu.Pass, error) {
	r.pass++
	pass := gpu.Pass{At: r.now()}
	r.watchClock(pass.At)
	err := r.steer(ctx)
	pass.Driver, pass.Expected = r.driver, r.expected
	if !r.ready {
		pass.Error = r.trouble
		// The cards that were in a call when NVML went away are still in it.
		r.takeLate()
		pass.Hung = r.hung()
		return pass, err
	}
	r.order()
	pass.Readings = r.collect(ctx)
	pass.Hung = r.hung()
	err = r.judge(&pass)
	return pass, err
}

// watchClock forgets how far samples were taken if the wall clock was put
// back: samples bear its time, so the new ones would all look old.
func (r *Reader) watchClock(at gpu.Instant) {
	const slack = int64(500 * time.Millisecond / time.Microsecond)
	offset := at.WallUS - at.MonotonicUS
	if r.offsetUS != 0 && offset < r.offsetUS-slack {
		for _, c := range r.cards {
			c.samples = sampleMark{}
		}
	}
	r.offsetUS = offset
}

// order sends every card that is free to its reading. One that is still inside
// a call gets no second one.
func (r *Reader) order() {
	r.takeLate()
	for _, c := range r.cards {
		if c.barred || c.leaving || c.outstanding != 0 {
			continue
		}
		c.outstanding = r.pass
		c.orders <- request{
			pass: r.pass, device: c.device, index: c.index, session: r.session, samples: c.samples, driver: r.traits,
		}
	}
}

// takeLate takes results of earlier passes off their workers and throws them away.
func (r *Reader) takeLate() {
	for {
		select {
		case late := <-r.results:
			r.settle(late)
		default:
			return
		}
	}
}

// settle notes that a worker is free. It says whether the result is of use.
func (r *Reader) settle(done result) (*card, bool) {
	c := r.cards[done.uuid]
	if c == nil {
		return nil, false
	}
	c.outstanding = 0
	if c.leaving {
		r.dismiss(c)
		return nil, false
	}
	if done.pass != r.pass {
		r.logger.Warn("reading came after its deadline and was thrown away", "uuid", c.uuid, "took", time.Duration(done.reading.TookUS)*time.Microsecond)
		return c, false
	}
	return c, true
}

// collect waits for the readings of this pass until they are all in or their
// deadline has passed.
func (r *Reader) collect(ctx context.Context) []gpu.Reading {
	readings := make([]gpu.Reading, 0, len(r.cards))
	waiting := 0
	for _, c := range r.cards {
		switch {
		case c.barred:
			refused := c.refused
			refused.At = r.now()
			refused.Events = r.events.take(c.uuid)
			readings = append(readings, refused)
		case c.outstanding == r.pass:
			waiting++
		}
	}
	deadline := time.NewTimer(r.deadline)
	defer deadline.Stop()
	for waiting > 0 {
		select {
		case done := <-r.results:
			c, fresh := r.settle(done)
			if !fresh {
				continue
			}
			waiting--
			c.samples = done.samples
			c.last = done.reading.Card
			done.reading.Events = r.events.take(c.uuid)
			r.heed(done)
			readings = append(readings, done.reading)
		case <-deadline.C:
			return readings
		case <-ctx.Done():
			return nil
		}
	}
	return readings
}

// heed acts on what a reading says about more than its own card.
func (r *Reader) heed(done result) {
	if done.stale {
		r.recountSoon()
	}
	if done.whole != gonvml.SUCCESS && r.ready {
		r.lose(failure(done.wholeCall, done.whole)+": "+remedy(done.whole), done.whole)
	}
	switch done.reading.State {
	case gpu.StateGood:
		r.retry = leastRetry
		r.say(done.uuid, slog.LevelInfo, "card answers", "uuid", done.uuid)
	case gpu.StateDown:
		r.recountAt = earlier(r.recountAt, time.Now().Add(recountRefused))
		r.say(done.uuid, slog.LevelWarn, "card is down", "uuid", done.uuid, "reason", done.reading.Reason)
	case gpu.StateFailed:
		r.say(done.uuid, slog.LevelWarn, "card can't be read", "uuid", done.uuid, "reason", done.reading.Reason)
	}
}

// say logs a state of a subject when it changes, not each time it is seen.
func (r *Reader) say(subject string, level slog.Level, message string, attributes ...any) {
	line := message + fmt.Sprint(attributes...)
	if r.logged[subject] == line {
		return
	}
	r.logged[subject] = line
	r.logger.Log(context.Background(), level, message, attributes...)
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// hung are the cards whose workers are inside a call.
func (r *Reader) hung() []string {
	var uuids []string
	for _, c := range r.cards {
		if c.outstanding != 0 {
			uuids = append(uuids, c.uuid)
			r.say(c.uuid, slog.LevelWarn, "card does not answer: its worker is inside a call", "uuid", c.uuid)
		}
	}
	sortStrings(uuids)
	return uuids
}

// judge ends a pass: in order, and with an error if NVML as a whole failed.
func (r *Reader) judge(pass *gpu.Pass) error {
	sortReadings(pass.Readings)
	if !r.ready {
		// Some card reported that NVML is gone, which goes for all of them.
		pass.Error = r.trouble
		if errors.Is(r.fatal, ErrLibraryMismatch) {
			return r.fatal
		}
		return nil
	}
	good := false
	for _, reading := range pass.Readings {
		good = good || reading.State != gpu.StateFailed
	}
	if good || len(pass.Readings) == 0 {
		r.failures = 0
		return nil
	}
	if r.failures++; r.failures >= restartAfter {
		r.failures = 0
		r.lose("no card could be read "+fmt.Sprint(restartAfter)+" times in a row ("+pass.Readings[0].Reason+"): NVML is started again", gonvml.ERROR_UNKNOWN)
	}
	return nil
}
