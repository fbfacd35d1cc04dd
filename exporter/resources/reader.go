// Package resources measures what workloads that hold a GPU use of the node
// beside it: CPU time, memory, and bytes that storage read and wrote. It tells
// a job that waits for its data from one that was left running.
//
// A workload with a cgroup of its own is read there; another one, and what its
// cgroup does not tell, is the sum over its processes on GPUs and their
// descendants. All of it happens in a goroutine of its own: whoever shows the
// figures takes the last ones from memory.
package resources

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/snapshot"
)

const (
	// DefaultInterval is the time between two rounds.
	DefaultInterval = 5 * time.Second
	// restFactor keeps rounds, whatever they take, below half a percent of the
	// time: where there is more to read, it is read less often.
	restFactor  = 200
	longestRest = 5 * time.Minute
	// keptFor is how long an ended workload's counters stay: not longer than
	// its name is shown, which is an hour. Were they still there when it comes
	// back, their past would count again where it folds.
	keptFor = 59 * time.Minute
)

// Holder is one process that holds a GPU, and whose it is.
type Holder struct {
	PID        uint32
	StartTicks uint64
	Workload   meter.Workload // AttributedBy empty
	// Cgroup is the text of its /proc/PID/cgroup.
	Cgroup string
}

// Options of a Reader.
type Options struct {
	FS       *procfs.FS
	Interval time.Duration // 0 for DefaultInterval
	Logger   *slog.Logger  // nil for none
}

// Reader measures. Hold and Latest never wait for it.
type Reader struct {
	options Options
	holding atomic.Pointer[[]Holder]
	latest  atomic.Pointer[report]

	// All below belongs to the round.
	book      *book
	tree      tree
	mounted   []hierarchy
	mountedAt time.Time
	devices   stackedDevices
	failure   string
}

// report is the result of one round.
type report struct {
	workloads []snapshot.Resources
	until     time.Time // what is true only for a moment is not told after that
}

// New returns a Reader that has measured nothing yet.
func New(options Options) *Reader {
	if options.Interval <= 0 {
		options.Interval = DefaultInterval
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	return &Reader{options: options, book: newBook(), devices: stackedDevices{sysfs: "/sys", known: map[string]bool{}}}
}

// Hold says who holds GPUs now. The slice must not be changed afterwards; a
// process on several GPUs may be in it more than once.
func (r *Reader) Hold(holders []Holder) { r.holding.Store(&holders) }

// Latest is what was measured last, counters of workloads that ended within
// the last hour included. Where the newest round is too old only counters are
// known. The slice must not be changed.
func (r *Reader) Latest(now time.Time) []snapshot.Resources {
	newest := r.latest.Load()
	if newest == nil {
		return nil
	}
	if now.Before(newest.until) {
		return newest.workloads
	}
	old := slices.Clone(newest.workloads)
	for i := range old {
		one := &old[i]
		*one = snapshot.Resources{Key: one.Key, FirstSeen: one.FirstSeen, CPUUS: one.CPUUS, ReadBytes: one.ReadBytes, WrittenBytes: one.WrittenBytes}
	}
	return old
}

// Run measures until ctx ends. It doesn't wait for a round that hangs then.
func (r *Reader) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		begun := time.Now()
		done := make(chan struct{})
		go func() { defer close(done); r.round(begun) }()
		select {
		case <-ctx.Done():
			return
		case <-done:
		}
		took := time.Since(begun)
		rest := min(max(r.options.Interval-took, took*restFactor), longestRest)
		r.latest.Store(&report{workloads: r.book.workloads(), until: time.Now().Add(3*rest + r.options.Interval)})
		timer.Reset(rest)
	}
}

// round measures once.
func (r *Reader) round(now time.Time) {
	ticks := r.options.FS.NowTicks()
	roots, holding := map[uint32]*root{}, []meter.Workload{}
	if holders := r.holding.Load(); holders != nil {
		for _, holder := range *holders {
			holding = append(holding, holder.Workload)
			if roots[holder.PID] == nil && holder.StartTicks > 0 {
				roots[holder.PID] = &root{Holder: holder}
			}
		}
	}
	samples := r.sampleCgroups(now, roots)
	incomplete := false
	for _, one := range roots {
		incomplete = incomplete || !one.complete()
	}
	if incomplete {
		if err := r.tree.refresh(r.options.FS); err != nil {
			r.fail("which processes are whose children is not known", err)
		}
		samples = append(samples, r.tree.sample(r.options.FS, roots)...)
	}
	r.book.add(now, ticks, holding, samples)
}

// ownCgroup is a cgroup that holds one workload, and its processes on GPUs.
type ownCgroup struct {
	places  []cgroup.Place
	roots   []*root
	shared  bool
	started uint64
}

// sampleCgroups reads the cgroups that are a workload's own, and notes at the
// roots in them what is known.
func (r *Reader) sampleCgroups(now time.Time, roots map[uint32]*root) []sample {
	cgroups := map[string]*ownCgroup{}
	for _, one := range roots {
		if one.Workload.Kind == meter.KindHost {
			continue
		}
		places := cgroup.Own(one.Cgroup)
		if len(places) == 0 {
			continue
		}
		key := fmt.Sprint(places)
		own := cgroups[key]
		if own == nil {
			own = &ownCgroup{places: places, started: one.StartTicks}
			cgroups[key] = own
		}
		// What belongs to several (a notebook server's unit) is nobody's own.
		own.shared = own.shared || len(own.roots) > 0 && own.roots[0].Workload != one.Workload
		own.roots = append(own.roots, one)
		own.started = min(own.started, one.StartTicks)
	}
	if len(cgroups) > 0 && (r.mountedAt.IsZero() || now.Sub(r.mountedAt) > mountsLife) {
		mounted, err := mountedHierarchies()
		if err != nil {
			r.fail("where cgroups are mounted is not known", err)
		} else {
			r.mounted, r.mountedAt = mounted, now
		}
	}
	var samples []sample
	for _, own := range cgroups {
		if !own.shared {
			samples = append(samples, r.sampleCgroup(own)...)
		}
	}
	return samples
}

// sampleCgroup reads one cgroup in every hierarchy. Where a controller is in
// use on v1 its figure goes before that of the unified hierarchy.
func (r *Reader) sampleCgroup(own *ownCgroup) []sample {
	places := slices.Clone(own.places)
	slices.SortStableFunc(places, func(a, b cgroup.Place) int { return strings.Compare(b.Controllers, a.Controllers) })
	first := own.roots[0]
	var samples []sample
	for _, place := range places {
		path := directory(r.mounted, place)
		if path == "" {
			continue
		}
		c, err := openControl(path)
		if err != nil {
			continue // gone: so will its processes be
		}
		var s sample
		if place.Controllers == "" {
			s = c.unifiedSample(r.devices.has)
		} else {
			s = c.versionOneSample(place.Controllers, r.devices.has)
		}
		c.Close()
		s.workload, s.begun = first.Workload, own.started
		for i := range s.counted {
			if first.has[i] {
				s.counted[i] = gpu.Optional[int64]{}
			}
			first.has[i] = first.has[i] || s.counted[i].Known
		}
		if first.hasSize {
			s.resident = gpu.Optional[uint64]{}
		}
		first.hasSize = first.hasSize || s.resident.Known
		samples = append(samples, s)
	}
	for _, one := range own.roots[1:] {
		one.has, one.hasSize = first.has, first.hasSize
	}
	return samples
}

// fail logs a failure once, until another comes.
func (r *Reader) fail(what string, err error) {
	if text := err.Error(); text != r.failure {
		r.failure = text
		r.options.Logger.Warn(what, "err", err)
	}
}
