package nvml

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// Starting NVML and counting cards can hang like any other call, so they are
// done beside Run and never waited for longer than a reading would be.

// controlResult is what came of starting NVML or counting cards.
type controlResult struct {
	started bool // NVML was started, not only counted
	// trouble says why it can't be used, empty if it can.
	trouble string
	ret     gonvml.Return
	driver  gpu.Driver
	traits  driverTraits
	count   int
	found   []foundCard
}

// foundCard is what a card's index led to.
type foundCard struct {
	index  int
	device gonvml.Device
	uuid   string
	f      function // the call that failed, if ret is not SUCCESS
	ret    gonvml.Return
	hung   bool // the lookup has not come back
}

// steer brings NVML up, or counts its cards anew, as far as either is due.
func (r *Reader) steer(ctx context.Context) error {
	now := time.Now()
	if r.controlSince.IsZero() {
		switch {
		case !r.ready && !now.Before(r.retryAt):
			r.launch("starting NVML", r.starter())
		case r.ready && !now.Before(r.recountAt):
			r.launch("counting cards", r.recount)
		}
	}
	if r.controlSince.IsZero() {
		return nil
	}
	if r.ready {
		select {
		case done := <-r.control:
			return r.apply(done)
		default:
			return nil
		}
	}
	// Without NVML there is nothing better to do than wait a little.
	patience := time.NewTimer(r.deadline)
	defer patience.Stop()
	select {
	case done := <-r.control:
		return r.apply(done)
	case <-ctx.Done():
	case <-patience.C:
		r.trouble = fmt.Sprintf("%s has not come back for %v: look for NVRM in dmesg (without persistence mode, waking cards takes seconds)",
			r.controlWhat, time.Since(r.controlSince).Round(100*time.Millisecond))
	}
	return nil
}

func (r *Reader) launch(what string, operation func() controlResult) {
	r.controlSince, r.controlWhat = time.Now(), what
	go func() { r.control <- operation() }()
}

// apply takes the outcome of a control operation over.
func (r *Reader) apply(done controlResult) error {
	r.controlSince = time.Time{}
	if done.trouble != "" {
		r.lose(done.trouble, done.ret)
		return r.fatal
	}
	if done.started {
		r.session++
		r.driver, r.traits = done.driver, done.traits
		r.ready, r.trouble, r.failures = true, "", 0
		r.logged = map[string]string{}
		r.logger.Info("NVML started", "driver", done.driver.DriverVersion, "cuda", done.driver.CUDAVersion, "cards", done.count)
		if reason := done.traits.brokenProcessLists; reason != "" {
			r.logger.Error(reason)
		}
	}
	r.expected = done.count
	r.adopt(done.found)
	return nil
}

// lose notes that NVML as a whole can't be used, and when to try again.
func (r *Reader) lose(trouble string, ret gonvml.Return) {
	if ret == gonvml.ERROR_LIB_RM_VERSION_MISMATCH {
		r.fatal = fmt.Errorf("%w: %s", ErrLibraryMismatch, trouble)
	}
	r.ready, r.trouble = false, trouble
	r.retryAt = time.Now().Add(r.retry)
	r.retry = min(r.retry*2, mostRetry)
	r.say("", slog.LevelError, "NVML can't be used", "error", trouble)
}

// recountSoon has the cards counted anew with the next pass, though not in
// every pass.
func (r *Reader) recountSoon() {
	r.recountAt = earlier(r.recountAt, r.countedAt.Add(recountStale))
	// Handles that went stale are worth nothing to what hangs on them.
	r.renew = true
}

// starter is the operation that starts NVML. Before it starts it again it shuts
// it down, which NVML does not survive while a call is running, so not then.
func (r *Reader) starter() func() controlResult {
	shutdown := r.session > 0
	for _, c := range r.cards {
		shutdown = shutdown && c.outstanding == 0
	}
	watch := r.watch
	r.watch = nil
	if watch != nil {
		watch.stop()
	}
	return func() controlResult {
		if watch != nil && !watch.ended(2*eventTimeout) {
			shutdown = false
		}
		if shutdown {
			// Its answer is of no interest: what counts is whether NVML starts.
			r.library.shutdown()
		}
		return r.start()
	}
}

// start loads the library, starts NVML and counts the cards.
func (r *Reader) start() controlResult {
	l := r.library
	if err := l.open(); err != nil {
		return controlResult{
			ret: gonvml.ERROR_LIBRARY_NOT_FOUND,
			trouble: printable(err.Error()) +
				": install the NVIDIA driver's libraries on this node, or name the file with --nvml.library-path; trying again",
		}
	}
	if ret := l.init(); ret != gonvml.SUCCESS {
		return controlResult{ret: ret, trouble: failure(fnInit, ret) + ": " + remedy(ret)}
	}
	l.snapshot()
	var driver gpu.Driver
	if version, ret := l.driverVersion(); ret == gonvml.SUCCESS {
		driver.DriverVersion = printable(version)
	}
	if version, ret := l.nvmlVersion(); ret == gonvml.SUCCESS {
		driver.NVMLVersion = printable(version)
	}
	cuda, ret := l.cudaVersionV2()
	if ret != gonvml.SUCCESS {
		cuda, ret = l.cudaVersion()
	}
	if ret == gonvml.SUCCESS && cuda > 0 {
		driver.CUDAVersion = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	done := r.recount()
	done.started, done.driver = true, driver
	done.traits.brokenProcessLists = brokenProcessLists(l.symbols.Load(), driver.DriverVersion, driver.NVMLVersion)
	return done
}

// recount counts the cards and looks each one up, all at once, so that one
// whose lookup hangs does not hide the others.
func (r *Reader) recount() controlResult {
	count, ret := r.library.deviceCount()
	if ret != gonvml.SUCCESS {
		return controlResult{ret: ret, trouble: failure(fnDeviceGetCount, ret) + ": " + remedy(ret)}
	}
	const mostCards = 1024
	if count < 0 || count > mostCards {
		return controlResult{ret: gonvml.ERROR_UNKNOWN, trouble: fmt.Sprintf("DeviceGetCount: %d cards can't be: look for NVRM in dmesg", count)}
	}
	return controlResult{count: count, found: r.lookups.all(count, r.deadline, r.lookUp)}
}

func (r *Reader) lookUp(index int) foundCard {
	found := foundCard{index: index, f: fnDeviceGetHandleByIndex}
	if found.device, found.ret = r.library.deviceByIndex(index); found.ret != gonvml.SUCCESS {
		return found
	}
	uuid, ret := r.library.uuid(found.device)
	found.uuid, found.f, found.ret = printable(uuid), fnGetUUID, ret
	if ret == gonvml.SUCCESS && found.uuid == "" {
		found.ret = gonvml.ERROR_UNKNOWN
	}
	return found
}

// lookups keeps a card's lookup from being done again while one hangs.
type lookups struct {
	sync.Mutex
	running map[int]bool
}

func newLookups() *lookups { return &lookups{running: map[int]bool{}} }

func (l *lookups) all(count int, patience time.Duration, lookUp func(int) foundCard) []foundCard {
	found := make([]foundCard, count)
	done := make(chan foundCard, count)
	waiting := 0
	for index := range count {
		found[index] = foundCard{index: index, hung: true}
		l.Lock()
		running := l.running[index]
		l.running[index] = true
		l.Unlock()
		if running {
			continue
		}
		waiting++
		go func() {
			card := lookUp(index)
			l.Lock()
			delete(l.running, index)
			l.Unlock()
			done <- card
		}()
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	for ; waiting > 0; waiting-- {
		select {
		case card := <-done:
			found[card.index] = card
		case <-timer.C:
			return found
		}
	}
	return found
}

// adopt takes over the cards of a count.
func (r *Reader) adopt(found []foundCard) {
	if r.renew {
		r.renew = false
		r.session++
	}
	r.countedAt = time.Now()
	r.recountAt = r.countedAt.Add(recountAll)
	here := map[string]bool{}
	var missing []foundCard
	for _, f := range found {
		switch {
		case f.hung || f.ret != gonvml.SUCCESS:
			missing = append(missing, f)
		case here[f.uuid]:
			// Two cards of one identity can't be told apart later on.
			r.say("index "+fmt.Sprint(f.index), slog.LevelError, "card left out: another has the same UUID", "index", f.index, "uuid", f.uuid)
		default:
			here[f.uuid] = true
			r.welcome(f)
		}
	}
	if len(missing) > 0 {
		r.recountAt = r.countedAt.Add(recountRefused)
	}
	// A card that gives no handle gives no UUID either; it must be one of those
	// known from before, and most likely the one that had its index.
	var gone []*card
	for uuid, c := range r.cards {
		if !here[uuid] {
			gone = append(gone, c)
		}
	}
	slices.SortFunc(gone, func(a, b *card) int { return cmp.Compare(a.index, b.index) })
	for _, f := range missing {
		at := slices.IndexFunc(gone, func(c *card) bool { return c.index == f.index })
		if at < 0 && len(gone) > 0 && len(gone) == len(missing) {
			at = 0
		}
		if at < 0 {
			r.say("index "+fmt.Sprint(f.index), slog.LevelWarn, "card can't be had", "index", f.index, "error", missingReason(f))
			continue
		}
		r.bar(gone[at], f)
		gone = slices.Delete(gone, at, at+1)
	}
	for _, c := range gone {
		r.logger.Warn("card is gone", "uuid", c.uuid, "index", c.index)
		r.dismiss(c)
	}
	r.watchEvents()
}

func missingReason(f foundCard) string {
	if f.hung {
		return "DeviceGetHandleByIndex: no answer"
	}
	return failure(f.f, f.ret)
}

// welcome gives a card its worker, or its new handle.
func (r *Reader) welcome(f foundCard) {
	c := r.cards[f.uuid]
	if c == nil {
		c = &card{uuid: f.uuid, orders: make(chan request, 1), last: gpu.Card{UUID: f.uuid}}
		r.cards[f.uuid] = c
		reader := &cardReader{library: r.library, now: r.now, uuid: f.uuid, firstSamples: r.firstSamples}
		go func() {
			for order := range c.orders {
				select {
				case r.results <- reader.read(order):
				case <-r.stopped:
				}
			}
		}()
	}
	c.index, c.device, c.barred, c.leaving = f.index, f.device, false, false
}

// bar keeps a card that NVML counts and gives no handle for, with the reason.
func (r *Reader) bar(c *card, f foundCard) {
	if f.hung {
		return // it is not known to be down; its worker will show it as hung
	}
	c.barred = true
	identity := c.last
	identity.UUID, identity.Index = c.uuid, c.index
	c.refused = gpu.Reading{Card: identity, State: gpu.StateFailed, Reason: failure(f.f, f.ret)}
	if reason, down := downReason(f.ret, true); down {
		c.refused.State, c.refused.Reason = gpu.StateDown, reason
	}
	r.say(c.uuid, slog.LevelWarn, "card can't be had", "uuid", c.uuid, "index", c.index, "error", failure(f.f, f.ret))
}

// dismiss lets a card's worker go, once it is in no call.
func (r *Reader) dismiss(c *card) {
	if c.leaving = c.outstanding != 0; c.leaving {
		return
	}
	delete(r.cards, c.uuid)
	delete(r.logged, c.uuid)
	close(c.orders)
}

func sortStrings(texts []string) { slices.Sort(texts) }

func sortReadings(readings []gpu.Reading) {
	slices.SortFunc(readings, func(a, b gpu.Reading) int {
		return cmp.Or(cmp.Compare(a.Card.Index, b.Card.Index), cmp.Compare(a.Card.UUID, b.Card.UUID))
	})
}
