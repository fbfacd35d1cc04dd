package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
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
	maxContainers    = 4096
	negativeLife     = 5 * time.Second
	retryAfter       = 2 * time.Second
	unusedLife       = 10 * time.Minute
	concurrentLookup = 4
	maxBackoff       = 30 * time.Second
)

// State is how an engine did at the last try.
type State struct {
	Up       bool
	Duration time.Duration
	Error    string
}

// Docker answers from memory what a Docker engine knows of its containers, and
// keeps that memory current.
type Docker struct {
	client *DockerClient
	logger *slog.Logger
	now    func() time.Time

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
}

// NewDocker returns a directory over client. Nothing is asked before Run runs
// and the first id is looked up, so that an engine that is not in use is not
// woken.
func NewDocker(client *DockerClient, logger *slog.Logger) *Docker {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Docker{
		client: client, logger: logger, now: time.Now, wanted: make(chan string, maxContainers),
		first: make(chan struct{}), containers: map[string]*entry{},
	}
}

// Socket is the path of the engine's socket.
func (d *Docker) Socket() string { return d.client.Socket() }

// Generation grows whenever an answer of Lookup may have changed.
func (d *Docker) Generation() uint64 { return d.generation.Load() }

// State is how the engine did at the last try. asked is false while nobody has
// needed it, or where there is none.
func (d *Docker) State() (state State, asked bool) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return d.state, d.asked
}

// Lookup answers at once from memory. The container is valid with StatusFound,
// and with StatusWaiting if its ID is set: then it is what was known before.
func (d *Docker) Lookup(id string) (Container, Status) {
	if !fullID(id) {
		return Container{}, StatusMissing
	}
	d.firstOnce.Do(func() { close(d.first) })
	now := d.now()
	d.mutex.Lock()
	defer d.mutex.Unlock()
	e := d.containers[id]
	if e == nil {
		if len(d.containers) >= maxContainers && !d.evict(now) {
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

// evict drops what nobody has used for long.
func (d *Docker) evict(now time.Time) bool {
	for id, e := range d.containers {
		if !e.asking && now.Sub(e.usedAt) > unusedLife {
			delete(d.containers, id)
		}
	}
	return len(d.containers) < maxContainers
}

// Run looks up what is wanted and follows the engine's events until ctx ends.
func (d *Docker) Run(ctx context.Context) error {
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

func (d *Docker) ask(ctx context.Context, id string) {
	started := time.Now()
	container, err := d.client.Container(ctx, id)
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
		if e.container.ID == "" {
			e.status = StatusMissing
		}
		e.retryAt = now.Add(negativeLife)
	default:
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
	changed := err == nil || before != e.status
	d.mutex.Unlock()
	if changed {
		d.generation.Add(1)
	}
	d.report(time.Since(started), err)
}

// report keeps the state, and logs only when it changes.
func (d *Docker) report(took time.Duration, err error) {
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
		d.logger.Warn("container engine cannot be asked; names of new containers are missing", "engine", "docker", "err", err)
	} else if state.Up && before.Error != "" {
		d.logger.Info("container engine answers again", "engine", "docker")
	}
}

// follow keeps the event stream open. Whenever it has been away everything is
// asked anew, because a rename may have been missed.
func (d *Docker) follow(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-d.first:
	}
	for backoff := time.Second; ctx.Err() == nil; {
		opened, err := d.events(ctx)
		if opened {
			backoff = time.Second
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil && opened {
			d.logger.Debug("event stream of the container engine ended", "engine", "docker", "err", err)
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

func (d *Docker) events(ctx context.Context) (opened bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	version, err := func() (string, error) {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		return d.client.negotiate(ctx)
	}()
	if err != nil {
		return false, err
	}
	filters := url.QueryEscape(`{"type":["container"],"event":["die","destroy","rename","start","update"]}`)
	response, err := d.client.open(ctx, "/v"+version+"/events?filters="+filters)
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	d.refreshAll()
	decoder := json.NewDecoder(&bounded{reader: response.Body})
	for {
		var event struct {
			Action string
			Actor  struct{ ID string }
		}
		if err := decoder.Decode(&event); err != nil {
			return true, fmt.Errorf("docker on %s: events: %w", d.client.socket, err)
		}
		d.refresh(event.Actor.ID)
	}
}

// refresh asks again for one container that is known, and meanwhile answers
// what was known.
func (d *Docker) refresh(id string) {
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

func (d *Docker) refreshAll() {
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

// bounded ends the stream at an event that is too long, so that one without an
// end cannot fill memory.
type bounded struct {
	reader io.Reader
	since  int
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.reader.Read(p)
	for i := n - 1; i >= 0; i-- {
		if p[i] == '\n' {
			b.since = n - 1 - i
			return n, err
		}
	}
	if b.since += n; b.since > maxAnswerBytes {
		return n, errors.New("an event is longer than the bound")
	}
	return n, err
}
