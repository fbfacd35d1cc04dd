package runtimes

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/cgroup"
)

// Lister is an engine, or its files, that can say which containers run.
// Neither method starts an engine that does not run.
type Lister interface {
	Source
	// List are the ids of the containers that run. The error is ErrNoEngine if
	// the engine does not run. Ids beside an error are those that its files tell
	// of, which may have ended.
	List(ctx context.Context) ([]string, error)
}

const (
	// relistEvery is how often containers are listed where nothing reports events,
	// and where an engine isn't there.
	relistEvery = 10 * time.Second
	// relistFollowed is how often they are listed while events are reported.
	relistFollowed = time.Minute
	maxChanges     = 1024
)

// Assigned knows which running containers of one engine were given GPUs. It is
// a Granter: such containers are shown as assigned, and hold nothing until they
// have a context.
type Assigned struct {
	lister Lister
	runs   func(pid uint32, id string) bool
	logger *slog.Logger

	generation atomic.Uint64
	changes    chan string
	missed     atomic.Bool // more changes than could be queued

	mutex  sync.Mutex
	given  map[string]Grant // by container
	plain  map[string]bool  // containers that run and were given none
	grants []Grant
}

// NewAssigned asks lister. runs says whether a process is there and in the
// container; it is false for PID 0.
func NewAssigned(lister Lister, runs func(pid uint32, id string) bool, logger *slog.Logger) *Assigned {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Assigned{
		lister: lister, runs: runs, logger: logger, changes: make(chan string, maxChanges),
		given: map[string]Grant{}, plain: map[string]bool{},
	}
}

// Generation grows whenever an answer of Grants may have changed.
func (a *Assigned) Generation() uint64 { return a.generation.Load() }

// Grants are the GPUs given to containers that run.
func (a *Assigned) Grants() []Grant {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	return a.grants
}

// Run lists containers, follows the engine's events, and lists again whenever
// some may have been missed, until ctx ends.
func (a *Assigned) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		stream, stop := context.WithCancel(ctx)
		opened := make(chan struct{})
		ended := make(chan error, 1)
		if err := a.list(ctx); err == nil {
			go func() {
				ended <- a.lister.Follow(stream, func() { close(opened) }, a.note)
			}()
		} else {
			ended <- err
		}
		a.follow(ctx, opened, ended)
		stop()
		select {
		case <-ctx.Done():
		case <-time.After(relistEvery):
		}
	}
	return ctx.Err()
}

// follow takes in events until the stream has ended.
func (a *Assigned) follow(ctx context.Context, opened <-chan struct{}, ended <-chan error) {
	again := time.NewTicker(relistFollowed)
	defer again.Stop()
	for {
		select {
		case <-again.C: // one may have failed to be told of
			a.listAnew(ctx)
		case <-opened: // what changed between the list and the stream was missed
			opened = nil
			a.listAnew(ctx)
		case id := <-a.changes:
			a.ask(ctx, id)
			if a.missed.CompareAndSwap(true, false) {
				a.listAnew(ctx)
			}
			if len(a.changes) == 0 {
				a.publish()
			}
		case err := <-ended:
			if err != nil && !errors.Is(err, ErrNoEngine) && ctx.Err() == nil {
				a.logger.Debug("containers are listed again", "engine", a.lister.Engine(), "err", err)
			}
			return
		}
	}
}

func (a *Assigned) listAnew(ctx context.Context) {
	if err := a.list(ctx); err != nil && ctx.Err() == nil {
		a.logger.Debug("containers can't be listed", "engine", a.lister.Engine(), "err", err)
	}
}

// note queues a change. It never waits: the stream has to be read.
func (a *Assigned) note(id string) {
	select {
	case a.changes <- id:
	default:
		a.missed.Store(true)
	}
}

// list takes in all containers that run.
func (a *Assigned) list(ctx context.Context) error {
	defer a.publish()
	ids, err := a.lister.List(ctx)
	if err != nil && len(ids) == 0 {
		// Containers can outlive their engine.
		a.forget(func(id string, grant Grant) bool { return a.runs(grant.PID, id) })
		return err
	}
	running := make(map[string]bool, len(ids))
	for _, id := range ids[:min(len(ids), maxContainers)] {
		running[id] = true
	}
	a.forget(func(id string, _ Grant) bool { return running[id] })
	for id := range running {
		a.mutex.Lock()
		known := a.plain[id]
		a.mutex.Unlock()
		if !known && ctx.Err() == nil {
			a.ask(ctx, id)
		}
	}
	return err
}

// forget drops the containers that keep does not want.
func (a *Assigned) forget(keep func(id string, grant Grant) bool) {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	for id, grant := range a.given {
		if !keep(id, grant) {
			delete(a.given, id)
		}
	}
	for id := range a.plain {
		if !keep(id, Grant{}) {
			delete(a.plain, id)
		}
	}
}

// ask takes in one container that began, ended or changed.
func (a *Assigned) ask(ctx context.Context, id string) {
	container, err := a.lister.Container(ctx, id)
	if err != nil && !errors.Is(err, ErrNoSuchContainer) {
		return // what was known stands until it can be asked again
	}
	a.mutex.Lock()
	defer a.mutex.Unlock()
	delete(a.given, id)
	delete(a.plain, id)
	switch {
	case err == nil && !a.runs(container.PID, id): // files can be older than its end
	case err != nil || len(container.Devices) == 0 || inPod(container):
		if len(a.plain) < maxContainers {
			a.plain[id] = true // dropped at the next list if it isn't there
		}
	case len(a.given) < maxContainers:
		a.given[id] = Grant{
			Devices: container.Devices, UID: -1, PID: container.PID, Since: container.StartedAt,
			Levels: []cgroup.Level{{Kind: cgroup.LevelContainer, System: a.lister.Engine(), ID: id}},
		}
	}
}

// inPod says that a container is in a Kubernetes pod: the kubelet knows what
// that was given.
func inPod(container Container) bool {
	return container.Labels["io.kubernetes.pod.uid"] != "" || container.Labels["io.kubernetes.pod.name"] != ""
}

// publish makes what is known now the answer.
func (a *Assigned) publish() {
	a.mutex.Lock()
	defer a.mutex.Unlock()
	grants := make([]Grant, 0, len(a.given))
	for _, grant := range a.given {
		grants = append(grants, grant)
	}
	id := func(grant Grant) string { return grant.Levels[0].ID }
	slices.SortFunc(grants, func(x, y Grant) int { return strings.Compare(id(x), id(y)) })
	same := slices.EqualFunc(grants, a.grants, func(x, y Grant) bool {
		return id(x) == id(y) && x.PID == y.PID && x.Since.Equal(y.Since) && slices.Equal(x.Devices, y.Devices)
	})
	if !same {
		a.grants = grants
		a.generation.Add(1)
	}
}
