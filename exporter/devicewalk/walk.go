// Package devicewalk finds the processes that have certain device files open:
// it looks at everybody's descriptors under /proc.
//
// Such a look can take long, and can hang in the kernel where the process
// itself does. So each walk has a bound, each process its own patience, and
// one that hangs is left alone until it lets go.
package devicewalk

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"gpuledger/exporter/procfs"
)

const (
	// defaultPatience is how long one process may take to be looked at.
	defaultPatience = 2 * time.Second
	// maxStuck is how many looks may hang before no further process is tried.
	maxStuck = 4
	// DefaultBudget bounds one walk.
	DefaultBudget = 5 * time.Second
)

// Process is a process that has a wanted device, or that is ending and does
// not get there.
type Process struct {
	PID     uint32
	Stat    procfs.Stat
	Devices []procfs.OpenDevice // the wanted ones
	// KernelStack says where a process that sleeps uninterruptibly, or one
	// whose first thread has ended, waits in the kernel; empty if that may not
	// be read.
	KernelStack string
	// UID is the effective one.
	UID uint32
	// Executable is the program's path, empty if unknown, and ExecutableUID who
	// owns its file, -1 if unknown.
	Executable    string
	ExecutableUID int64
	// NamespacePID is the process's number in a PID namespace of its own; 0 if
	// it is in none.
	NamespacePID uint32
}

// Result is what a walk found.
type Result struct {
	At   time.Time
	Took time.Duration
	// Processes are in the order of PIDs.
	Processes []Process
	// Looked counts the processes that could be looked into, Hidden those that
	// could not be, for want of a privilege.
	Looked, Hidden int
	// HidePID says that there may be more that are not even counted.
	HidePID bool
	// Stuck are processes that don't let themselves be looked at: the look
	// hangs in the kernel.
	Stuck []uint32
	// Whole says that the time sufficed for all; otherwise the next walk goes on
	// where this one ended.
	Whole bool
}

// Options of a Walker.
type Options struct {
	FS *procfs.FS
	// Wanted says which devices are looked for.
	Wanted func(procfs.DeviceNumber) bool
	// ByName knows wanted devices by the name of a mapped file, where its
	// number may not be read; nil for none.
	ByName func(path string) (procfs.DeviceNumber, bool)
	// Skip are processes that are not looked at: our own.
	Skip func(pid, parent uint32) bool
	// Budget bounds a walk; 0 for DefaultBudget.
	Budget time.Duration
	// Privileged says that hidepid hides nothing from us.
	Privileged bool
}

// Walker walks. One walk may run at a time.
type Walker struct {
	options Options
	next    uint32 // where the last walk ran out of time
	found   map[uint32]Process

	mutex sync.Mutex
	stuck map[uint32]bool // looks that have not come back

	patience time.Duration
	examine  func(pid uint32, mapped bool) (look, error) // replaced by tests
}

// look is what one look at a process gave.
type look struct {
	process Process
	of      bool // it is one to report
}

// New makes a Walker.
func New(options Options) *Walker {
	if options.Budget == 0 {
		options.Budget = DefaultBudget
	}
	if options.ByName == nil {
		options.ByName = func(string) (procfs.DeviceNumber, bool) { return procfs.DeviceNumber{}, false }
	}
	w := &Walker{options: options, found: map[uint32]Process{}, stuck: map[uint32]bool{}}
	w.examine, w.patience = w.examineProcess, defaultPatience
	return w
}

// Walk looks at all processes; with mapped at their mappings too, which costs
// several times as much. The error is that there is no list of processes, or
// ctx's.
func (w *Walker) Walk(ctx context.Context, mapped bool) (Result, error) {
	begun := time.Now()
	result := Result{At: begun}
	pids, err := w.options.FS.PIDs()
	if err != nil {
		return result, err
	}
	result.HidePID = !w.options.Privileged && w.options.FS.HidesProcesses()
	w.forget(pids)
	order := rotate(pids, w.next)
	w.next = 0
	for _, pid := range order {
		if err := ctx.Err(); err != nil {
			return result, err
		}
		if time.Since(begun) > w.options.Budget || w.stuckCount() >= maxStuck {
			w.next = pid
			break
		}
		found, err := w.lookAt(ctx, pid, mapped)
		switch {
		case errors.Is(err, errStuck):
			continue // what was found earlier stands
		case errors.Is(err, procfs.ErrHidden):
			result.Hidden++
		case err == nil:
			result.Looked++
		}
		delete(w.found, pid)
		if err == nil && found.of {
			w.found[pid] = found.process
		}
	}
	result.Whole = w.next == 0
	for _, pid := range slices.Sorted(maps.Keys(w.found)) {
		result.Processes = append(result.Processes, w.found[pid])
	}
	result.Stuck = w.stuckNow()
	result.Took = time.Since(begun)
	return result, nil
}

// rotate begins the order at the first PID that is not below next.
func rotate(pids []uint32, next uint32) []uint32 {
	at, _ := slices.BinarySearch(pids, next)
	return slices.Concat(pids[at:], pids[:at])
}

// forget drops what was found of processes that are no more.
func (w *Walker) forget(pids []uint32) {
	for pid := range w.found {
		if _, there := slices.BinarySearch(pids, pid); !there {
			delete(w.found, pid)
		}
	}
}

var errStuck = errors.New("the look at the process hangs")

// lookAt looks at a process in a goroutine of its own, which is left behind if
// it takes too long.
func (w *Walker) lookAt(ctx context.Context, pid uint32, mapped bool) (look, error) {
	type answer struct {
		look
		err error
	}
	w.mutex.Lock()
	if w.stuck[pid] {
		w.mutex.Unlock()
		return look{}, errStuck
	}
	w.mutex.Unlock()
	answers, examine := make(chan answer, 1), w.examine
	go func() {
		found, err := examine(pid, mapped)
		w.mutex.Lock()
		defer w.mutex.Unlock()
		delete(w.stuck, pid)
		answers <- answer{found, err} // there is room for it
	}()
	timer := time.NewTimer(w.patience)
	defer timer.Stop()
	select {
	case a := <-answers:
		return a.look, a.err
	case <-timer.C:
	case <-ctx.Done():
	}
	w.mutex.Lock()
	defer w.mutex.Unlock()
	select {
	case a := <-answers: // after all
		return a.look, a.err
	default:
		w.stuck[pid] = true
		return look{}, errStuck
	}
}

func (w *Walker) stuckCount() int {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return len(w.stuck)
}

func (w *Walker) stuckNow() []uint32 {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.Sorted(maps.Keys(w.stuck))
}

// examineProcess looks at one process.
func (w *Walker) examineProcess(pid uint32, mapped bool) (look, error) {
	h, err := w.options.FS.Process(pid)
	if err != nil {
		return look{}, err
	}
	defer h.Close()
	stat, err := h.Stat()
	if err != nil {
		return look{}, err
	}
	if stat.KernelThread() || w.options.Skip != nil && w.options.Skip(pid, stat.ParentPID) {
		return look{}, nil
	}
	p := Process{PID: pid, Stat: stat, ExecutableUID: -1}
	// One that is ending has nothing open any more, and is told by where it is.
	ending := stat.Exiting()
	devices, err := h.OpenDevices()
	p.Devices = w.wanted(devices)
	if err == nil && len(p.Devices) == 0 && mapped {
		// Some kernels refuse a mapping where they show the descriptors, which
		// are what counts: hardly anybody maps a device and closes it.
		if devices, err = h.MappedDevices(w.options.ByName); errors.Is(err, procfs.ErrHidden) {
			err = nil
		}
		p.Devices = w.wanted(devices)
	}
	if err != nil && !ending {
		// It may have begun to end under our eyes: then all that it has is
		// refused, to root too.
		now, statErr := h.Stat()
		if statErr != nil || !now.Exiting() {
			return look{}, err
		}
		p.Stat, ending = now, true
	}
	if len(p.Devices) == 0 && !ending {
		return look{}, nil
	}
	if stat.State == 'D' || ending {
		p.KernelStack = h.KernelStack()
	}
	if facts, err := h.Read(); err == nil {
		p.UID, p.Executable, p.ExecutableUID = facts.EffectiveUID, facts.Executable, facts.ExecutableUID
		if len(facts.NSPID) > 1 {
			p.NamespacePID = facts.NSPID[len(facts.NSPID)-1]
		}
	}
	return look{process: p, of: true}, nil
}

func (w *Walker) wanted(devices []procfs.OpenDevice) []procfs.OpenDevice {
	return slices.DeleteFunc(devices, func(d procfs.OpenDevice) bool { return !w.options.Wanted(d.Number) })
}
