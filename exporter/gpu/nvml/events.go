package nvml

import (
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

const (
	eventTimeout = time.Second
	// mostEvents bounds what waits for a card's next reading.
	mostEvents = 1000
	// mostEventErrors in a row end the watching of a session.
	mostEventErrors = 60
)

// eventQueue holds XIDs until the next reading of their card is delivered.
type eventQueue struct {
	sync.Mutex
	waiting map[string][]gpu.XIDEvent
}

func newEventQueue() *eventQueue { return &eventQueue{waiting: map[string][]gpu.XIDEvent{}} }

func (q *eventQueue) add(uuid string, event gpu.XIDEvent) {
	q.Lock()
	defer q.Unlock()
	if len(q.waiting[uuid]) < mostEvents {
		q.waiting[uuid] = append(q.waiting[uuid], event)
	}
}

func (q *eventQueue) take(uuid string) []gpu.XIDEvent {
	q.Lock()
	defer q.Unlock()
	events := q.waiting[uuid]
	delete(q.waiting, uuid)
	return events
}

// watcher waits for the XIDs of a set of cards.
type watcher struct {
	cards    map[gonvml.Device]string // handle to UUID
	session  uint64
	stopping atomic.Bool
	done     chan struct{}
}

func (w *watcher) stop() { w.stopping.Store(true) }

// ended says whether the watcher came to its end within a time.
func (w *watcher) ended(within time.Duration) bool {
	timer := time.NewTimer(within)
	defer timer.Stop()
	select {
	case <-w.done:
		return true
	case <-timer.C:
		return false
	}
}

// watchEvents sees to it that the XIDs of all cards at hand are waited for.
func (r *Reader) watchEvents() {
	cards := make(map[gonvml.Device]string, len(r.cards))
	for _, c := range r.cards {
		if !c.barred {
			cards[c.device] = c.uuid
		}
	}
	before := r.watch
	if before != nil && before.session == r.session && sameCards(before.cards, cards) {
		return
	}
	if before != nil {
		before.stop()
	}
	if len(cards) == 0 {
		r.watch = nil
		return
	}
	r.watch = &watcher{cards: cards, session: r.session, done: make(chan struct{})}
	go r.watch.run(before, r.library, r.events, r.now, r.logger)
}

func sameCards(a, b map[gonvml.Device]string) bool {
	if len(a) != len(b) {
		return false
	}
	for device, uuid := range a {
		if b[device] != uuid {
			return false
		}
	}
	return true
}

// run waits for events until it is stopped. It first lets its predecessor end,
// as an event goes to every set that waits for it.
func (w *watcher) run(before *watcher, l *library, queue *eventQueue, now func() gpu.Instant, logger *slog.Logger) {
	defer close(w.done)
	if before != nil {
		<-before.done
	}
	if w.stopping.Load() {
		return
	}
	set, ret := l.eventSet()
	if ret != gonvml.SUCCESS {
		logger.Info("XIDs can't be watched", "error", failure(fnEventSetCreate, ret))
		return
	}
	defer l.freeEventSet(set)
	registered := 0
	for device, uuid := range w.cards {
		switch ret := l.registerXID(device, set); ret {
		case gonvml.SUCCESS:
			registered++
		case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
			// An old card, not an unhealthy one.
		default:
			logger.Info("XIDs of a card can't be watched", "uuid", uuid, "error", failure(fnRegisterEvents, ret))
		}
	}
	errorsInRow := 0
	for registered > 0 && !w.stopping.Load() {
		began := time.Now()
		event, ret := l.waitForEvent(set, uint32(eventTimeout/time.Millisecond))
		switch ret {
		case gonvml.SUCCESS:
			errorsInRow = 0
			uuid, ours := w.cards[event.Device]
			if ours && event.EventType&gonvml.EventTypeXidCriticalError != 0 {
				queue.add(uuid, gpu.XIDEvent{XID: event.EventData, At: now()})
			}
			continue
		case gonvml.ERROR_TIMEOUT:
			errorsInRow = 0
		default:
			if errorsInRow++; errorsInRow >= mostEventErrors {
				logger.Warn("XIDs are watched no more", "error", failure(fnEventSetWait, ret))
				return
			}
		}
		// A library that comes back early must not make us spin.
		if early := eventTimeout - time.Since(began); early > 10*time.Millisecond {
			time.Sleep(early)
		}
	}
}
