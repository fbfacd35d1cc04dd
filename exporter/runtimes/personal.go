package runtimes

import (
	"context"
	"log/slog"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/procfs"
)

// userRuntimeDir holds one directory a person, with the sockets of what they
// run.
const userRuntimeDir = "/run/user"

const (
	maxPersonal = 64
	// maxPersonalContainers is how many containers of one person's engine are kept.
	maxPersonalContainers = 256
	personalUnused        = 10 * time.Minute
)

// Personal are the engines that people run themselves, rootless Docker and
// Podman. One is asked only once a container was seen in that person's slice.
type Personal struct {
	dir    string
	proc   *procfs.FS
	logger *slog.Logger

	wake    chan struct{}
	stopped atomic.Uint64 // generations of those that were let go

	mutex   sync.Mutex
	engines map[uint32]*personal
	starts  []*personal
}

// personal are the engines of one person.
type personal struct {
	directories []*Directory
	usedAt      time.Time
	ctx         context.Context
	stop        context.CancelFunc
}

// NewPersonal knows nobody's engines until Of is called. proc tells whose
// containers they are while no service of Podman's runs; it may be nil.
func NewPersonal(proc *procfs.FS, logger *slog.Logger) *Personal {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &Personal{dir: userRuntimeDir, proc: proc, logger: logger, wake: make(chan struct{}, 1), engines: map[uint32]*personal{}}
}

// Of are the engines that a person may run; none while too many others' are in
// use. It answers at once.
func (p *Personal) Of(uid uint32) []*Directory {
	now := time.Now()
	p.mutex.Lock()
	defer p.mutex.Unlock()
	known := p.engines[uid]
	if known == nil {
		if len(p.engines) >= maxPersonal && !p.letGo(now) {
			return nil
		}
		known = &personal{directories: p.directories(uid)}
		known.ctx, known.stop = context.WithCancel(context.Background())
		p.engines[uid] = known
		p.starts = append(p.starts, known)
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
	known.usedAt = now
	return known.directories
}

// directories are asked as that person's: a socket that somebody else listens
// at is not believed.
func (p *Personal) directories(uid uint32) []*Directory {
	home := filepath.Join(p.dir, strconv.FormatUint(uint64(uid), 10))
	docker := newDockerClient("docker", filepath.Join(home, "docker.sock"), int64(uid))
	podman := newDockerClient("podman", filepath.Join(home, "podman", "podman.sock"), int64(uid))
	files := NewPodmanFiles(filepath.Join(home, "containers"), "", p.proc)
	return []*Directory{
		newDirectory(docker, p.logger, maxPersonalContainers),
		newDirectory(WithFiles(podman, files), p.logger, maxPersonalContainers),
	}
}

// letGo stops asking the engines that were used longest ago.
func (p *Personal) letGo(now time.Time) bool {
	for uid, each := range p.engines {
		if now.Sub(each.usedAt) > personalUnused {
			each.stop()
			for _, directory := range each.directories {
				p.stopped.Add(directory.Generation() + 1) // a sum of generations must not fall
			}
			delete(p.engines, uid)
		}
	}
	return len(p.engines) < maxPersonal
}

// Generation grows whenever an answer of one of the engines may have changed.
func (p *Personal) Generation() uint64 {
	sum := p.stopped.Load()
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for _, each := range p.engines {
		for _, directory := range each.directories {
			sum += directory.Generation()
		}
	}
	return sum
}

// Run asks the engines until ctx ends.
func (p *Personal) Run(ctx context.Context) error {
	var group sync.WaitGroup
	for {
		select {
		case <-ctx.Done():
			p.mutex.Lock()
			for _, each := range p.engines {
				each.stop()
			}
			p.mutex.Unlock()
			group.Wait()
			return ctx.Err()
		case <-p.wake:
		}
		p.mutex.Lock()
		starts := p.starts
		p.starts = nil
		p.mutex.Unlock()
		for _, each := range starts {
			for _, directory := range each.directories {
				group.Go(func() { _ = directory.Run(each.ctx) }) // the context's error only
			}
		}
	}
}
