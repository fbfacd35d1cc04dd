// Package passthrough sees the GPUs that are given to virtual machines.
//
// The driver on the node does not have them, so NVML knows nothing of them:
// only that they are bound to vfio-pci, and which process, the virtual machine
// monitor, has their IOMMU group open. That process holds the card.
package passthrough

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/devicewalk"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/procfs"
)

const (
	// lookEvery is how often the cards and those known to have them are looked
	// at, walkEvery how often everybody is.
	lookEvery = 2 * time.Second
	walkEvery = 10 * time.Second
	// staleAfter is the age from which what was seen says nothing of now.
	staleAfter = 30 * time.Second
)

// Options of a Source.
type Options struct {
	// Source delivers the passes that are added to.
	Source gpu.Source
	FS     *procfs.FS
	// SysFS is where sysfs is mounted; "" for /sys.
	SysFS  string
	Logger *slog.Logger
}

// Source is another source's passes with the passed-through cards added. It
// implements gpu.Source.
type Source struct {
	options Options
	logger  *slog.Logger
	seen    atomic.Pointer[seen]
	known   map[string]gpu.Card // cards that NVML had, by bus id; belongs to Run's deliver
	watcher watcher
}

// seen is what the newest look saw. It is never changed.
type seen struct {
	at    time.Time
	cards []seenCard
}

type seenCard struct {
	busID, name string
	holders     []uint32
	// unknown is why it is not known who has the card; empty if it is.
	unknown string
}

// New makes a Source.
func New(options Options) *Source {
	if options.SysFS == "" {
		options.SysFS = "/sys"
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	return &Source{
		options: options, logger: options.Logger, known: map[string]gpu.Card{},
		watcher: watcher{fs: options.FS, sysfs: options.SysFS, names: map[string]string{}},
	}
}

// Run delivers the other source's passes. The looks go on beside it: a pass
// takes what the newest one saw.
func (s *Source) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	looking, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { s.watch(looking) })
	return s.options.Source.Run(ctx, func(pass gpu.Pass) {
		deliver(merge(pass, s.seen.Load(), s.known, time.Now()))
	})
}

// Add is a pass with the passed-through cards as they are now added, for who
// asks once.
func Add(ctx context.Context, fs *procfs.FS, sysfs string, pass gpu.Pass) gpu.Pass {
	s := New(Options{FS: fs, SysFS: sysfs})
	now, err := s.watcher.look(ctx)
	if err != nil {
		return pass
	}
	return merge(pass, now, s.known, now.at)
}

func (s *Source) watch(ctx context.Context) {
	ticker := time.NewTicker(lookEvery)
	defer ticker.Stop()
	told := ""
	for {
		now, err := s.watcher.look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil && told != err.Error():
			told = err.Error()
			s.logger.Warn("can't look for GPUs given to virtual machines", "err", err)
		case err == nil:
			told = ""
			s.seen.Store(now)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// watcher looks at the cards and at who has them open.
type watcher struct {
	fs    *procfs.FS
	sysfs string
	names map[string]string // by device id

	wanted   []procfs.DeviceNumber
	walker   *devicewalk.Walker
	walkedAt time.Time
	result   devicewalk.Result
	walked   bool // a walk was whole since wanted last changed
}

func (w *watcher) look(ctx context.Context) (*seen, error) {
	begun := time.Now()
	cards, err := scan(w.sysfs)
	if err != nil {
		return nil, err
	}
	now := &seen{at: begun}
	if len(cards) == 0 {
		return now, nil
	}
	var wanted []procfs.DeviceNumber
	for _, c := range cards {
		wanted = append(wanted, c.devices...)
	}
	if w.walker == nil || !slices.Equal(wanted, w.wanted) {
		w.wanted, w.walked, w.walkedAt, w.result = wanted, false, time.Time{}, devicewalk.Result{}
		w.walker = devicewalk.New(devicewalk.Options{
			FS: w.fs, Wanted: func(d procfs.DeviceNumber) bool { return slices.Contains(wanted, d) }, Privileged: os.Geteuid() == 0,
		})
	}
	// Whoever had a card and closed it makes another look at everybody due.
	if begun.Sub(w.walkedAt) >= walkEvery || !w.walked || !w.stillOpen() {
		if w.result, err = w.walker.Walk(ctx, false); err != nil {
			return nil, err
		}
		w.walkedAt, w.walked = begun, w.walked || w.result.Whole
	}
	for _, c := range cards {
		now.cards = append(now.cards, w.seenCard(c))
	}
	return now, nil
}

// stillOpen reports whether everybody found by the last walk has the device
// open now.
func (w *watcher) stillOpen() bool {
	for _, p := range w.result.Processes {
		if len(p.Devices) == 0 {
			continue
		}
		h, err := w.fs.Process(p.PID)
		if err != nil {
			return false
		}
		stat, statErr := h.Stat()
		devices, err := h.OpenDevices()
		h.Close()
		if statErr != nil || err != nil || stat.StartTicks != p.Stat.StartTicks {
			return false
		}
		for _, had := range p.Devices {
			if !slices.ContainsFunc(devices, func(d procfs.OpenDevice) bool { return d.Number == had.Number }) {
				return false
			}
		}
	}
	return true
}

func (w *watcher) seenCard(c card) seenCard {
	name, known := w.names[c.deviceID]
	if !known {
		name = nameOf(c.deviceID, PCIIDs)
		w.names[c.deviceID] = name
	}
	out := seenCard{busID: c.busID, name: name}
	for _, p := range w.result.Processes {
		if slices.ContainsFunc(p.Devices, func(d procfs.OpenDevice) bool { return slices.Contains(c.devices, d.Number) }) {
			out.holders = append(out.holders, p.PID)
		}
	}
	if len(out.holders) > 0 {
		return out
	}
	// That nobody has it is only known if everybody was looked at.
	switch {
	case len(c.devices) == 0:
		out.unknown = "passed through, and the kernel shows no VFIO device for it: is " + w.sysfs + " the node's own sysfs?"
	case !w.walked:
		out.unknown = "passed through, and not all processes have been looked at yet for who has it"
	case w.result.HidePID || w.result.Hidden > 0:
		out.unknown = fmt.Sprintf("passed through, and %d processes may not be looked into for who has it: run as root with CAP_SYS_PTRACE", w.result.Hidden)
	case len(w.result.Stuck) > 0:
		out.unknown = fmt.Sprintf("passed through, and PID %d can't be looked at for whether it has it", w.result.Stuck[0])
	}
	return out
}

// merge adds the cards seen to a pass. A card that NVML can read is NVML's; one
// that it could not, because the card was taken away, is ours. Known are the
// cards that NVML has had, by bus id: they keep their UUIDs.
func merge(pass gpu.Pass, now *seen, known map[string]gpu.Card, at time.Time) gpu.Pass {
	read := map[string]bool{}
	for _, reading := range pass.Readings {
		if id := normal(reading.Card.PCIBusID); id != "" && reading.Card.UUID != "" {
			known[id] = reading.Card
			read[id] = read[id] || reading.State == gpu.StateGood
		}
	}
	if now == nil {
		return pass
	}
	readings := slices.Clone(pass.Readings)
	for _, c := range now.cards {
		id := normal(c.busID)
		if read[id] {
			continue // bound back a moment ago
		}
		identity, had := known[id]
		if !had {
			identity = gpu.Card{UUID: "PCI-" + id, Name: c.name, PCIBusID: c.busID, Index: pass.Expected}
		}
		identity.PassedThrough, identity.Minor, identity.MIGMode = true, gpu.Optional[int64]{}, gpu.Optional[bool]{}
		before := len(readings)
		readings = slices.DeleteFunc(readings, func(r gpu.Reading) bool { return r.Card.UUID == identity.UUID })
		if len(readings) == before {
			pass.Expected++
		}
		pass.Hung = slices.DeleteFunc(slices.Clone(pass.Hung), func(uuid string) bool { return uuid == identity.UUID })
		reading := gpu.Reading{Card: identity, At: pass.At, State: gpu.StateGood}
		switch {
		case at.Sub(now.at) > staleAfter:
			reading.State, reading.Reason = gpu.StateFailed, "passed through, and looking for who has it takes too long"
		case c.unknown != "":
			reading.State, reading.Reason = gpu.StateFailed, c.unknown
		default:
			for _, pid := range c.holders {
				// It has the whole card to itself, as a compute context would.
				reading.Processes = append(reading.Processes, gpu.Process{PID: pid, Compute: true})
			}
		}
		readings = append(readings, reading)
	}
	pass.Readings = readings
	return pass
}

// normal is a bus id with a domain of four digits where that suffices, in
// lower case: NVML prints eight, the kernel four.
func normal(busID string) string {
	id := strings.ToLower(busID)
	if domain, rest, ok := strings.Cut(id, ":"); ok && len(domain) == 8 && strings.HasPrefix(domain, "0000") {
		return domain[4:] + ":" + rest
	}
	return id
}
