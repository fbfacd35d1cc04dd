package runtimes

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Status says what a look-up is worth.
type Status uint8

const (
	// StatusFound is an answer of the engine.
	StatusFound Status = iota
	// StatusWaiting is a question that has no answer yet: the engine is being
	// asked, or is in trouble and will be asked again.
	StatusWaiting
	// StatusMissing is an id that the engine does not know, or no engine at
	// all. It is asked again after a few seconds.
	StatusMissing
)

const (
	maxContainers = 4096
	negativeLife  = 5 * time.Second
	retryAfter    = 2 * time.Second
	// inUse is how long after its last use an answer is kept whatever comes: those
	// about living processes are used at least every 10 s.
	inUse            = 15 * time.Second
	concurrentLookup = 4
	maxBackoff       = 30 * time.Second
)

// State is how an engine did at the last try.
type State struct {
	Up       bool
	Duration time.Duration
	Error    string
}

// Directory answers from memory what an engine knows of its containers, and
// keeps that memory current.
type Directory struct {
	source Source
	logger *slog.Logger
	now    func() time.Time
	limit  int // of containers kept

	generation atomic.Uint64
	wanted     chan string
	first      chan struct{} // closed at the first look-up
	firstOnce  sync.Once

	mutex      sync.Mutex
	containers map[string]*entry
	state      State
	asked      bool
}

type entry struct {
	container Container
	status    Status
	retryAt   time.Time // zero if the answer holds until an event
	usedAt    time.Time
	asking    bool
	again     bool // an event came while the engine was being asked
	ended     bool // as far as the engine knows
}

// NewDirectory returns a directory over source. Nothing is asked before Run runs
// and the first id is looked up, so that an engine that is not in use is not
// woken.
func NewDirectory(source Source, logger *slog.Logger) *Directory {
	return newDirectory(source, logger, maxContainers)
}

// newDirectory keeps so many containers.
func newDirectory(source Source, logger *slog.Logger, limit int) *Directory {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Directory{
		source: source, logger: logger, now: time.Now, limit: limit, wanted: make(chan string, limit),
		first: make(chan struct{}), containers: map[string]*entry{},
	}
}

// Engine is what the engine is called.
func (d *Directory) Engine() string { return d.source.Engine() }

// Socket is the path that the engine is asked at.
func (d *Directory) Socket() string { return d.source.Socket() }

// Generation grows whenever an answer of Lookup may have changed.
func (d *Directory) Generation() uint64 { return d.generation.Load() }

// State is how the engine did at the last try. asked is false while nobody has
// needed it, or where there is none.
func (d *Directory) State() (state State, asked bool) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.state, d.asked
}

// Lookup answers at once from memory. The container is valid with StatusFound,
// and with StatusWaiting if its ID is set: then it is what was known before.
func (d *Directory) Lookup(id string) (Container, Status) {
	if !FullID(id) {
		return Container{}, StatusMissing
	}
	d.firstOnce.Do(func() { close(d.first) })
	now := d.now()
	d.mutex.Lock()
	defer d.mutex.Unlock()
	e := d.containers[id]
	if e == nil {
		if len(d.containers) >= d.limit && !d.evict(now) {
			return Container{}, StatusWaiting
		}
		e = &entry{status: StatusWaiting, retryAt: now}
		d.containers[id] = e
	}
	e.usedAt = now
	if !e.asking && !e.retryAt.IsZero() && !now.Before(e.retryAt) {
		select {
		case d.wanted <- id:
			e.asking = true
		default: // asked again at the next look-up
		}
	}
	return e.container, e.status
}

// evict makes room: those that have ended go first, and then those that were
// used longest ago. It is false if all are in use.
func (d *Directory) evict(now time.Time) bool {
	type candidate struct {
		id     string
		ended  bool
		usedAt time.Time
	}
	candidates := make([]candidate, 0, len(d.containers))
	for id, e := range d.containers {
		if !e.asking && now.Sub(e.usedAt) > inUse {
			candidates = append(candidates, candidate{id, e.ended, e.usedAt})
		}
	}
	slices.SortFunc(candidates, func(a, b candidate) int {
		if a.ended != b.ended {
			if a.ended {
				return -1
			}
			return 1
		}
		return a.usedAt.Compare(b.usedAt)
	})
	// Several at once, so that the next ones need not sort again.
	for _, c := range candidates[:min(len(candidates), d.limit/4)] {
		delete(d.containers, c.id)
	}
	return len(d.containers) < d.limit
}

// Run looks up what is wanted and follows the engine's events until ctx ends.
func (d *Directory) Run(ctx context.Context) error {
	var group sync.WaitGroup
	for range concurrentLookup {
		group.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case id := <-d.wanted:
					d.ask(ctx, id)
				}
			}
		})
	}
	group.Go(func() { d.follow(ctx) })
	group.Wait()
	return ctx.Err()
}

func (d *Directory) ask(ctx context.Context, id string) {
	started := time.Now()
	container, err := d.source.Container(ctx, id)
	if ctx.Err() != nil {
		return
	}
	now := d.now()
	d.mutex.Lock()
	e := d.containers[id]
	if e == nil {
		d.mutex.Unlock()
		return
	}
	before := e.status
	e.asking = false
	e.ended = errors.Is(err, ErrNoSuchContainer) || err == nil && container.PID == 0
	told := err != nil && container.ID == id && e.container.ID == ""
	if told {
		e.container = container // and asked again below
	}
	switch {
	case err == nil:
		e.container, e.status, e.retryAt = container, StatusFound, time.Time{}
	case errors.Is(err, ErrNoSuchContainer):
		// A container that was known keeps its name: its processes may still be
		// accounted for.
		if e.container.ID == "" {
			e.status = StatusMissing
		} else {
			e.status = StatusFound
		}
		e.retryAt = now.Add(negativeLife)
	case errors.Is(err, ErrNoEngine):
		e.status = StatusFound
		if e.container.ID == "" {
			e.status = StatusMissing
		}
		e.retryAt = now.Add(negativeLife)
	default:
		e.status = StatusFound
		if e.container.ID == "" {
			e.status = StatusWaiting
		}
		e.retryAt = now.Add(retryAfter)
	}
	if e.again {
		e.again, e.retryAt = false, now
		select {
		case d.wanted <- id:
			e.asking = true
		default:
		}
	}
	changed := err == nil || told || before != e.status
	d.mutex.Unlock()
	if changed {
		d.generation.Add(1)
	}
	d.report(time.Since(started), err)
}

// report keeps the state, and logs only when it changes.
func (d *Directory) report(took time.Duration, err error) {
	state := State{Up: true, Duration: took}
	if err != nil && !errors.Is(err, ErrNoSuchContainer) {
		state = State{Duration: took, Error: err.Error()}
	}
	d.mutex.Lock()
	before := d.state
	d.state = state
	d.asked = d.asked || !errors.Is(err, ErrNoEngine)
	d.mutex.Unlock()
	if state.Error != "" && before.Error == "" {
		d.logger.Warn("container engine cannot be asked; names of new containers are missing", "engine", d.source.Engine(), "err", err)
	} else if state.Up && before.Error != "" {
		d.logger.Info("container engine answers again", "engine", d.source.Engine())
	}
}

// follow keeps the event stream open. Whenever it has been away everything is
// asked anew, because a rename may have been missed.
func (d *Directory) follow(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-d.first:
	}
	for backoff := time.Second; ctx.Err() == nil; {
		opened := false
		err := d.source.Follow(ctx, func() { opened = true; d.refreshAll() }, d.refresh)
		if opened {
			backoff = time.Second
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && opened {
			d.logger.Debug("event stream of the container engine ended", "engine", d.source.Engine(), "err", err)
		}
		timer := time.NewTimer(backoff)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		backoff = min(2*backoff, maxBackoff)
	}
}

// refresh asks again for one container that is known, and meanwhile answers
// what was known.
func (d *Directory) refresh(id string) {
	now := d.now()
	d.mutex.Lock()
	e := d.containers[id]
	if e != nil {
		e.retryAt = now
		if e.asking {
			e.again = true
		} else {
			select {
			case d.wanted <- id:
				e.asking = true
			default: // asked at the next look-up
			}
		}
	}
	d.mutex.Unlock()
}

func (d *Directory) refreshAll() {
	d.mutex.Lock()
	ids := make([]string, 0, len(d.containers))
	for id := range d.containers {
		ids = append(ids, id)
	}
	d.mutex.Unlock()
	for _, id := range ids {
		d.refresh(id)
	}
}
