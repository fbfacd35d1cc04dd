package metrics

import (
	"cmp"
	"slices"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/usage"
)

// Overflow is the value of label workload into which a user's further
// workloads of one kind fold.
const Overflow = "(overflow)"

// DefaultMaxWorkloads is the default of --metrics.max-workloads.
const DefaultMaxWorkloads = 1000

// Positions in counters.
const (
	shareUS = iota
	heldUS
	reservedUS
	activeUS
	activeKnownUS
	idleUS
	memoryKiBSeconds
	memoryKnownUS
	energyMJ
	// Of the node, not of a device.
	cpuUS
	readBytes
	writtenBytes
	countersLength
)

// counters are the amounts of a workload that are exposed.
type counters [countersLength]int64

func countersOf(a usage.Amounts) counters {
	return counters{
		shareUS:          a.ShareUS,
		heldUS:           a.HeldUS,
		reservedUS:       a.ReservedUS,
		activeUS:         a.ActiveUS,
		activeKnownUS:    a.ActiveKnownUS,
		idleUS:           a.IdleUS,
		memoryKiBSeconds: a.MemoryKiBSeconds,
		memoryKnownUS:    a.MemoryKnownUS,
		energyMJ:         a.EnergyMJ,
	}
}

func (c *counters) add(other counters) {
	for i, n := range other {
		c[i] += n
	}
}

// advance adds what a member counted between two of its totals. A total that
// fell began anew, so all of it is new; that is how Prometheus reads a reset.
func (c *counters) advance(before, after counters) {
	for i, n := range after {
		if n >= before[i] {
			n -= before[i]
		}
		c[i] += n
	}
}

// workloadName is a workload as labels name it, its texts clean.
type workloadName struct{ user, kind, workload string }

func (a workloadName) compare(b workloadName) int {
	return cmp.Or(cmp.Compare(a.user, b.user), cmp.Compare(a.kind, b.kind), cmp.Compare(a.workload, b.workload))
}

// seriesKey is a label set: one workload on one device.
type seriesKey struct {
	device string
	workloadName
}

// memberKey tells the workloads apart that share a label set.
type memberKey struct {
	user, kind, name, project, class string
	uid                              int64
}

func memberOf(w *meter.Workload) memberKey {
	return memberKey{w.User, w.Kind, w.Name, w.Project, w.Class, w.UID}
}

type member struct {
	before, after counters
	firstSeen     time.Time
	pass          uint64
}

// account sums up the counters of the workloads of one label set. They outlive
// the members they came from, so that they never fall.
type account struct {
	born    uint64                 // pass in which it began
	created *timestamppb.Timestamp // earliest start of those it began with
	members map[memberKey]*member
	totals  counters
	pass    uint64
}

// take adds what one member has counted so far, and reports whether it is new.
func (a *account) take(id memberKey, totals counters, firstSeen time.Time, pass uint64, previous time.Time) bool {
	if a.born == pass && !firstSeen.IsZero() && (a.created == nil || firstSeen.Before(a.created.AsTime())) {
		a.created = timestamppb.New(firstSeen)
	}
	a.pass = pass
	m := a.members[id]
	known := m != nil
	if !known {
		m = &member{}
		a.members[id] = m
	}
	if m.pass == pass {
		m.after.add(totals)
		return !known
	}
	// Totals begun since the previous pass are not the ones seen then,
	// even where they are higher.
	if firstSeen.After(previous) && !firstSeen.Equal(m.firstSeen) {
		m.before = counters{}
	}
	m.after, m.pass, m.firstSeen = totals, pass, firstSeen
	return !known
}

// settle adds up what the members counted in the newest pass.
func (a *account) settle() {
	for key, m := range a.members {
		if m.pass != a.pass {
			delete(a.members, key)
			continue
		}
		a.totals.advance(m.before, m.after)
		m.before = m.after
	}
}

// series is one label set and what is shown under it in the newest pass.
type series struct {
	account
	key      seriesKey
	index    int
	instance bool // the device is a MIG instance
	card     string
	labels   []*dto.LabelPair
	present
}

// present is what a series shows of the newest pass alone.
type present struct {
	assigned        bool
	processes       int
	zombies         int
	memoryBytes     total
	activityPercent total
	powerMW         total
	temperatureC    gpu.Optional[int64]
	heldSince       time.Time
	lastActive      time.Time
}

// total is a sum that is known only if all of its parts are.
type total struct {
	sum     float64
	parts   int
	unknown bool
}

func (t *total) add(value float64, known bool) {
	t.sum += value
	t.parts++
	t.unknown = t.unknown || !known
}

func (t *total) get() (float64, bool) { return t.sum, t.parts > 0 && !t.unknown }

// folder turns a snapshot's workloads into series: at most limit workloads of
// a node under their own names, the rest summed under Overflow by user and
// kind. It remembers its decisions, because a workload once shown must not
// fold and a folded one must not appear, or its past would count twice. It is
// not safe for concurrent use.
type folder struct {
	limit    int
	pass     uint64
	at       time.Time               // when the newest pass's snapshot was taken
	previous time.Time               // and the one before
	shown    map[workloadName]uint64 // pass in which it was last there
	folded   map[workloadName]uint64
	series   map[seriesKey]*series
	onNode   map[workloadName]*nodeSeries
	// dropped counts workloads on a device that folded.
	dropped int64
}

func newFolder(limit int) *folder {
	return &folder{
		limit:  max(limit, 0),
		shown:  map[workloadName]uint64{},
		folded: map[workloadName]uint64{},
		series: map[seriesKey]*series{},
		onNode: map[workloadName]*nodeSeries{},
	}
}

// fold takes the next snapshot's time and workloads and returns the series to show,
// sorted by device and name. They are valid until the next call.
func (f *folder) fold(at time.Time, workloads []snapshot.Workload) []*series {
	f.pass++
	f.previous, f.at = f.at, at
	names := make([]workloadName, len(workloads))
	for i := range workloads {
		key := &workloads[i].Key
		names[i] = workloadName{cleanLabel(key.User), cleanLabel(key.Kind), cleanLabel(key.Name)}
	}
	f.decide(workloads, names)
	for i := range workloads {
		f.take(&workloads[i], names[i])
	}
	var current []*series
	for key, s := range f.series {
		if s.pass != f.pass {
			// An overflow's totals are kept: its next member adds to them.
			if key.workload != Overflow {
				delete(f.series, key)
			}
			clear(s.members)
			continue
		}
		s.settle()
		current = append(current, s)
	}
	slices.SortFunc(current, func(a, b *series) int {
		return cmp.Or(cmp.Compare(a.index, b.index), cmp.Compare(a.key.device, b.key.device),
			a.key.workloadName.compare(b.key.workloadName))
	})
	return current
}

// decide gives the free places to those that came first.
func (f *folder) decide(workloads []snapshot.Workload, names []workloadName) {
	newcomers := map[workloadName]time.Time{}
	for i, name := range names {
		if _, ok := f.shown[name]; ok {
			f.shown[name] = f.pass
			continue
		}
		if _, ok := f.folded[name]; ok {
			f.folded[name] = f.pass
			continue
		}
		seen := workloads[i].FirstSeen
		if first, ok := newcomers[name]; !ok || seen.Before(first) {
			newcomers[name] = seen
		}
	}
	for _, known := range []map[workloadName]uint64{f.shown, f.folded} {
		for name, pass := range known {
			if pass != f.pass {
				delete(known, name)
			}
		}
	}
	order := make([]workloadName, 0, len(newcomers))
	for name := range newcomers {
		order = append(order, name)
	}
	slices.SortFunc(order, func(a, b workloadName) int {
		return cmp.Or(newcomers[a].Compare(newcomers[b]), a.compare(b))
	})
	for _, name := range order {
		if len(f.shown) < f.limit {
			f.shown[name] = f.pass
		} else {
			f.folded[name] = f.pass
		}
	}
}

// take adds one workload to the series it is shown under.
func (f *folder) take(w *snapshot.Workload, name workloadName) {
	_, folded := f.folded[name]
	if folded {
		name.workload = Overflow
	}
	key := seriesKey{cleanLabel(w.Device), name}
	s := f.series[key]
	if s == nil {
		s = &series{key: key, index: w.Index, instance: onInstance(w), card: w.Card}
		s.members, s.born = map[memberKey]*member{}, f.pass
		if s.instance {
			s.labels = labelPairs(migWorkloadLabels, key.device, w.Card, w.Profile, name.user, name.kind, name.workload)
		} else {
			s.labels = labelPairs(workloadLabels, strconv.Itoa(w.Index), key.device, name.user, name.kind, name.workload)
		}
		f.series[key] = s
	}
	if s.pass != f.pass {
		s.present = present{}
	}
	if s.take(memberOf(&w.Key), countersOf(w.Totals.Amounts), w.FirstSeen, f.pass, f.previous) && folded {
		f.dropped++
	}
	s.see(w)
}

// see adds what a workload is now.
func (s *present) see(w *snapshot.Workload) {
	if w.LastActive.After(s.lastActive) {
		s.lastActive = w.LastActive
	}
	if !w.Present {
		return
	}
	s.assigned = s.assigned || w.Assigned
	s.processes += w.Processes
	s.zombies += w.ZombieProcesses
	s.memoryBytes.add(float64(w.MemoryUsedBytes.Value), w.MemoryUsedBytes.Known)
	s.activityPercent.add(float64(w.ActivityPercent.Value), w.ActivityPercent.Known)
	s.powerMW.add(float64(w.PowerMW.Value), w.PowerMW.Known)
	if c, ok := w.TemperatureC.Get(); ok && (!s.temperatureC.Known || c > s.temperatureC.Value) {
		s.temperatureC = gpu.Some(c)
	}
	if !w.HeldSince.IsZero() && (s.heldSince.IsZero() || w.HeldSince.Before(s.heldSince)) {
		s.heldSince = w.HeldSince
	}
}

// onInstance reports whether a workload's device is a MIG instance.
func onInstance(w *snapshot.Workload) bool { return w.Card != "" && w.Device != w.Card }

// nameOf is the name a workload is shown under after the newest fold.
func (f *folder) nameOf(key *meter.Workload) workloadName {
	name := workloadName{cleanLabel(key.User), cleanLabel(key.Kind), cleanLabel(key.Name)}
	if _, folded := f.folded[name]; folded {
		name.workload = Overflow
	}
	return name
}
