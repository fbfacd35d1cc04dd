package suspects

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/devicewalk"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
)

const (
	// DefaultThreshold is from how much unexplained memory on a card is looked
	// into: contexts and the driver keep a little for themselves.
	DefaultThreshold = 256 << 20
	// passesFirst is for how many passes the memory must be unexplained: what a
	// process has just taken or left is not listed at the same instant.
	passesFirst = 2
	// walkEvery is the least time between two walks, walkAtMost the most while
	// nothing changes.
	walkEvery  = 10 * time.Second
	walkAtMost = 2 * time.Minute
	// heldFor is how long it is remembered that a process held a card, and
	// mostHeld how many such are.
	heldFor  = 10 * time.Minute
	mostHeld = 1 << 13
)

// Options of a Watcher.
type Options struct {
	FS *procfs.FS
	// ThresholdBytes is from how much unexplained memory on a card is looked
	// into; 0 means never.
	ThresholdBytes uint64
	Logger         *slog.Logger
}

// Finding is what a walk found of one card.
type Finding struct {
	Suspects []Suspect
}

// Findings are what the newest walk found. They are never changed.
type Findings struct {
	At    time.Time
	Cards map[string]Finding // by UUID
	// Hidden counts processes that could not be looked into; with HidePID there
	// may be more.
	Hidden  int
	HidePID bool
	// Whole says that every process was looked at.
	Whole bool
	// Error is why there was no walk; empty if there was.
	Error string
}

// Needs reports whether the findings are about a card, or would be if there
// had been a walk.
func (f *Findings) Needs(uuid string) bool {
	_, is := f.Cards[uuid]
	return is
}

// Watcher looks for suspects when a card has unexplained memory. Note and
// Findings never wait for a walk.
type Watcher struct {
	options  Options
	walker   *devicewalk.Walker // of Run, with numbers
	numbers  Numbers
	logger   *slog.Logger
	wake     chan struct{}
	findings atomic.Pointer[Findings]
	every    time.Duration // the least time between two walks

	mutex   sync.Mutex
	passes  map[string]int // for how many passes a card's memory has been unexplained
	cards   []Card         // of the newest pass
	needy   []Card
	changed bool // since the last walk: who is listed, or which cards are needy
	held    map[holding]time.Time
}

// holding is a process on a card.
type holding struct {
	key  meter.ProcessKey
	uuid string
}

// New makes a Watcher. Nothing is looked at before Run.
func New(options Options) *Watcher {
	w := &Watcher{
		options: options, logger: options.Logger, wake: make(chan struct{}, 1), every: walkEvery,
		passes: map[string]int{}, held: map[holding]time.Time{},
	}
	if w.logger == nil {
		w.logger = slog.New(slog.DiscardHandler)
	}
	return w
}

func numbersNow(fs *procfs.FS) Numbers {
	majors, err := fs.CharacterMajors()
	if err != nil {
		return Numbers{} // the cards' own number is known without
	}
	return NumbersOf(majors)
}

func newWalker(fs *procfs.FS, numbers Numbers, budget time.Duration) *devicewalk.Walker {
	self := uint32(os.Getpid())
	return devicewalk.New(devicewalk.Options{
		FS: fs, Wanted: numbers.wanted, ByName: byName, Privileged: os.Geteuid() == 0, Budget: budget,
		// Our own child has every card open, to read it.
		Skip: func(pid, parent uint32) bool { return pid == self || parent == self },
	})
}

// Note takes in what a pass says of the cards. The maps in it must not be
// changed afterwards.
func (w *Watcher) Note(cards []Card) {
	if w.options.ThresholdBytes == 0 {
		return
	}
	now := time.Now()
	w.mutex.Lock()
	defer w.mutex.Unlock()
	passes := make(map[string]int, len(cards))
	needy := make([]Card, 0, len(cards))
	for _, card := range cards {
		for _, key := range card.Listed {
			w.held[holding{key, card.UUID}] = now
		}
		if bytes, known := card.UnexplainedBytes.Get(); known && bytes >= w.options.ThresholdBytes {
			passes[card.UUID] = w.passes[card.UUID] + 1
		}
		if passes[card.UUID] >= passesFirst {
			needy = append(needy, card)
		}
	}
	w.changed = w.changed || !sameCards(needy, w.needy) || len(needy) > 0 && !sameCards(cards, w.cards)
	w.passes, w.needy, w.cards = passes, needy, cards
	if len(w.held) > mostHeld {
		w.forget(now)
	}
	if len(needy) > 0 {
		w.hurry()
	}
}

// Needy reports whether a card's memory is unexplained for long enough to be
// looked into.
func (w *Watcher) Needy(uuid string) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return slices.ContainsFunc(w.needy, func(c Card) bool { return c.UUID == uuid })
}

// Ended says that a suspect has ended: the next walk needs no other occasion.
func (w *Watcher) Ended() {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	w.changed = true
}

func (w *Watcher) hurry() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// forget drops who held a card long ago, and everybody if these are too many.
func (w *Watcher) forget(now time.Time) {
	for held, last := range w.held {
		if now.Sub(last) > heldFor {
			delete(w.held, held)
		}
	}
	if len(w.held) > mostHeld {
		clear(w.held)
	}
}

// sameCards reports whether the same processes are listed on the same cards.
func sameCards(a, b []Card) bool {
	return slices.EqualFunc(a, b, func(a, b Card) bool {
		if a.UUID != b.UUID || len(a.Listed) != len(b.Listed) {
			return false
		}
		for pid, key := range a.Listed {
			if other, ok := b.Listed[pid]; !ok || other != key {
				return false
			}
		}
		return true
	})
}

// Findings are those of the newest walk; nil before the first.
func (w *Watcher) Findings() *Findings { return w.findings.Load() }

// Run walks whenever there is a need, until ctx ends.
func (w *Watcher) Run(ctx context.Context) {
	var last time.Time
	wait := w.every
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.wake: // at every pass, while there is a need
		}
		w.mutex.Lock()
		needy, cards, changed := w.needy, w.cards, w.changed
		since := time.Since(last)
		due := len(needy) > 0 && (last.IsZero() || since >= wait || changed && since >= w.every)
		if due {
			w.changed = false
		}
		w.mutex.Unlock()
		if !due {
			continue
		}
		before := w.findings.Load()
		after := w.walk(ctx, needy, cards)
		if ctx.Err() != nil {
			return
		}
		w.findings.Store(after)
		last = time.Now()
		if wait = min(2*wait, max(walkAtMost, w.every)); changed || !after.Whole || !sameFindings(before, after) {
			wait = w.every
			w.tell(before, after)
		}
	}
}

func (w *Watcher) walk(ctx context.Context, needy, cards []Card) *Findings {
	// The numbers change when a module is loaded again; a walker knows what
	// hangs, and goes on where it ended.
	numbers := numbersNow(w.options.FS)
	if w.walker == nil || w.numbers != numbers {
		w.walker, w.numbers = newWalker(w.options.FS, numbers, devicewalk.DefaultBudget), numbers
	}
	return look(ctx, w.walker, numbers, needy, cards, w.had)
}

// look walks, and a second time through the mappings if some card's memory is
// not explained by who has it open.
func look(ctx context.Context, walker *devicewalk.Walker, numbers Numbers, needy, cards []Card, had func(meter.ProcessKey, string) bool) *Findings {
	var found devicewalk.Result
	var judged map[string][]Suspect
	for _, mapped := range []bool{false, true} {
		var err error
		if found, err = walker.Walk(ctx, mapped); err != nil {
			return Unable(needy, err)
		}
		judged = Judge(needy, cards, found, numbers, had)
		explained := true
		for _, card := range needy {
			explained = explained && slices.ContainsFunc(judged[card.UUID], func(s Suspect) bool { return s.Strength == Strong })
		}
		if explained {
			break
		}
	}
	findings := &Findings{At: found.At, Cards: map[string]Finding{}, Hidden: found.Hidden, HidePID: found.HidePID, Whole: found.Whole}
	for _, card := range needy {
		findings.Cards[card.UUID] = Finding{Suspects: judged[card.UUID]}
	}
	return findings
}

// Unable are the findings where nobody could be looked at.
func Unable(needy []Card, err error) *Findings {
	findings := &Findings{At: time.Now(), Error: err.Error(), Cards: map[string]Finding{}}
	for _, card := range needy {
		findings.Cards[card.UUID] = Finding{}
	}
	return findings
}

// Look walks once, for who asks once; budget bounds it. What the time did not
// suffice for is missing, and Findings says so.
func Look(ctx context.Context, fs *procfs.FS, needy, cards []Card, budget time.Duration) *Findings {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	numbers := numbersNow(fs)
	findings := look(ctx, newWalker(fs, numbers, budget/3), numbers, needy, cards, func(meter.ProcessKey, string) bool { return false })
	if ctx.Err() != nil && findings.Error != "" {
		findings.Error = "looking through /proc took longer than " + budget.String()
	}
	return findings
}

func (w *Watcher) had(key meter.ProcessKey, uuid string) bool {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	_, held := w.held[holding{key, uuid}]
	return held
}

// tell logs who is newly suspected; no command lines, and no names, which are
// still being looked up.
func (w *Watcher) tell(before, findings *Findings) {
	if findings.Error != "" {
		if before == nil || before.Error != findings.Error {
			w.logger.Warn("can't look for who has unexplained GPU memory", "err", findings.Error)
		}
		return
	}
	for uuid, finding := range findings.Cards {
		for _, s := range finding.Suspects {
			if s.Strength == Strong && (before == nil || !slices.Contains(before.Cards[uuid].Suspects, s)) {
				w.logger.Info("a process may be behind unexplained GPU memory", "gpu", uuid, "pid", s.Key.PID, "reason", s.Reason)
			}
		}
	}
}

func sameFindings(a, b *Findings) bool {
	if a == nil || len(a.Cards) != len(b.Cards) || a.Hidden != b.Hidden || a.Error != b.Error || a.Whole != b.Whole {
		return false
	}
	for uuid, finding := range a.Cards {
		other, ok := b.Cards[uuid]
		if !ok || !slices.Equal(finding.Suspects, other.Suspects) {
			return false
		}
	}
	return true
}
