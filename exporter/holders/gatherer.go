package holders

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
)

const (
	maxBinds = 64 // of one container
	// maxGathered bounds what is remembered of one sort.
	maxGathered = 8192
	// ownerLife is after how long a file's owner is asked for again.
	ownerLife = 5 * time.Minute
	// gatheredUnused is after how long what nobody asks for may be forgotten.
	gatheredUnused = time.Minute
	// gatherers read at once; those that hang stay behind.
	gatherers = 4
)

// gatherer reads what can hang, in goroutines of its own, and answers from
// memory: a process's environment lies in its own memory, and a directory may
// be a dead server's.
type gatherer struct {
	fs         *procfs.FS
	keys       []string // the variables that are looked for
	generation atomic.Uint64
	now        func() time.Time

	environments *gathered[environmentKey, map[string]string]
	owners       *gathered[string, int64]
}

// environmentKey is a process and the program that it runs: execve gives it
// another environment.
type environmentKey struct {
	process    meter.ProcessKey
	executable string
}

func newGatherer(fs *procfs.FS, keys []string, now func() time.Time) *gatherer {
	g := &gatherer{fs: fs, keys: keys, now: now}
	changed := func() { g.generation.Add(1) }
	g.environments = newGathered(0, g.readEnvironment, changed)
	g.owners = newGathered(ownerLife, readOwner, changed)
	return g
}

// run reads until ctx ends.
func (g *gatherer) run(ctx context.Context) {
	g.environments.start(ctx)
	g.owners.start(ctx)
	<-ctx.Done()
}

// environment is what the process has of the variables that are looked for;
// known is false while that is being read. One that may not be read has none.
func (g *gatherer) environment(key meter.ProcessKey, executable string) (values map[string]string, known bool) {
	return g.environments.get(environmentKey{key, executable}, g.now())
}

// ownerOf is who owns a file of the host; -1 if that can't be told.
func (g *gatherer) ownerOf(path string) (uid int64, known bool) {
	uid, known = g.owners.get(path, g.now())
	if !known {
		return -1, false
	}
	return uid, true
}

func (g *gatherer) readEnvironment(key environmentKey) map[string]string {
	if len(g.keys) == 0 {
		return nil
	}
	// A handle of our own: the table's may be closed meanwhile.
	handle, err := g.fs.Process(key.process.PID)
	if err != nil {
		return nil
	}
	defer handle.Close()
	values, err := handle.Environment(g.keys)
	if err != nil {
		return nil // hidden or gone: the step says that there is none or that it may not be read
	}
	if stat, err := handle.Stat(); err != nil || stat.StartTicks != key.process.StartTicks {
		return nil // the number is another's by now
	}
	return values
}

// readOwner asks the path itself and follows no link at its end: what that
// leads to is another's word.
func readOwner(path string) int64 {
	var stat unix.Statx_t
	for {
		err := unix.Statx(unix.AT_FDCWD, path, unix.AT_SYMLINK_NOFOLLOW|unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_UID, &stat)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || stat.Mask&unix.STATX_UID == 0 {
			return -1
		}
		return int64(stat.Uid)
	}
}

// gathered is one sort of what is read beside the passes.
type gathered[K comparable, V any] struct {
	life    time.Duration // 0 for ever
	read    func(K) V
	changed func()
	wanted  chan K

	mutex     sync.Mutex
	known     map[K]*gatheredValue[V]
	fullUntil time.Time
}

type gatheredValue[V any] struct {
	value         V
	read, asking  bool
	readAt, wants time.Time // wants is when it was asked for last
}

func newGathered[K comparable, V any](life time.Duration, read func(K) V, changed func()) *gathered[K, V] {
	return &gathered[K, V]{life: life, read: read, changed: changed, wanted: make(chan K, 1024), known: map[K]*gatheredValue[V]{}}
}

func (g *gathered[K, V]) get(key K, now time.Time) (value V, known bool) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	v := g.known[key]
	if v == nil {
		if len(g.known) >= maxGathered && !g.evict(now) {
			return value, false
		}
		v = &gatheredValue[V]{}
		g.known[key] = v
	}
	v.wants = now
	stale := !v.read || g.life > 0 && now.Sub(v.readAt) > g.life
	if stale && !v.asking {
		select {
		case g.wanted <- key:
			v.asking, v.readAt = true, now
		default: // asked for again at the next pass
		}
	}
	return v.value, v.read
}

// evict drops what nobody asks for any more. A look through all is worth it
// once a second.
func (g *gathered[K, V]) evict(now time.Time) bool {
	if now.Before(g.fullUntil) {
		return false
	}
	g.fullUntil = now.Add(time.Second)
	for key, v := range g.known {
		if !v.asking && now.Sub(v.wants) > gatheredUnused {
			delete(g.known, key)
		}
	}
	return len(g.known) < maxGathered
}

func (g *gathered[K, V]) start(ctx context.Context) {
	for range gatherers {
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case key := <-g.wanted:
					value := g.read(key)
					g.mutex.Lock()
					if v := g.known[key]; v != nil {
						v.value, v.read, v.asking = value, true, false
					}
					g.mutex.Unlock()
					g.changed()
				}
			}
		}()
	}
}
