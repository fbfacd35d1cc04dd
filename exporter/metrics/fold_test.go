package metrics

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/usage"
)

// fleet is a random node whose workloads come, count, end and leave.
type fleet struct {
	at        time.Time
	workloads []snapshot.Workload
	// counted is all that was ever counted, by user and kind: what the sums
	// over series, gone ones included, have to come to.
	counted map[workloadName]counters
	// onNode is what workloads use of the node, and usedOnNode all that they
	// ever did, by user and kind.
	onNode     map[meter.Workload]*snapshot.Resources
	usedOnNode map[workloadName]counters
}

// use lets the workloads that are there use the node. Some are measured anew,
// from 0.
func (f *fleet) use(t *rapid.T) []snapshot.Resources {
	if f.onNode == nil {
		f.onNode, f.usedOnNode = map[meter.Workload]*snapshot.Resources{}, map[workloadName]counters{}
	}
	there := map[meter.Workload]bool{}
	for i := range f.workloads {
		key := f.workloads[i].Key
		if there[key] {
			continue
		}
		there[key] = true
		r := f.onNode[key]
		if r == nil || rapid.IntRange(0, 9).Draw(t, "anew") == 0 {
			r = &snapshot.Resources{Key: key, FirstSeen: f.at}
			f.onNode[key] = r
		}
		cpu, read := int64(rapid.IntRange(0, 5000).Draw(t, "cpu")), int64(rapid.IntRange(0, 5000).Draw(t, "read"))
		r.CPUUS, r.ReadBytes = gpu.Some(r.CPUUS.Value+cpu), gpu.Some(r.ReadBytes.Value+read)
		owner := workloadName{cleanLabel(key.User), key.Kind, ""}
		sum := f.usedOnNode[owner]
		sum.add(counters{cpuUS: cpu, readBytes: read})
		f.usedOnNode[owner] = sum
	}
	var all []snapshot.Resources
	for key, r := range f.onNode {
		if !there[key] {
			delete(f.onNode, key)
			continue
		}
		all = append(all, *r)
	}
	return all
}

func (f *fleet) step(t *rapid.T) *snapshot.Snapshot {
	f.at = f.at.Add(time.Second)
	var kept []snapshot.Workload
	for _, w := range f.workloads {
		if rapid.IntRange(0, 9).Draw(t, "leaves") > 0 {
			kept = append(kept, w)
		}
	}
	f.workloads = kept
	for range rapid.IntRange(0, 4).Draw(t, "come") {
		device := rapid.SampledFrom([]string{"GPU-0", "MIG-1"}).Draw(t, "device")
		w := snapshot.Workload{
			Card: "GPU-0", Device: device, Present: true, FirstSeen: f.at,
			Key: meter.Workload{
				User: rapid.SampledFrom([]string{"alice", "bob", "c\xff"}).Draw(t, "user"),
				Kind: rapid.SampledFrom([]string{meter.KindDocker, meter.KindHost}).Draw(t, "kind"),
				// The two bad ones become one label value.
				Name:    rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e\xfe", "e\xff"}).Draw(t, "name"),
				Project: rapid.SampledFrom([]string{"", "p"}).Draw(t, "project"),
			},
		}
		known := false
		for _, other := range f.workloads {
			known = known || other.Device == w.Device && other.Key == w.Key
		}
		if !known {
			f.workloads = append(f.workloads, w)
		}
	}
	for i := range f.workloads {
		w := &f.workloads[i]
		more := usage.Amounts{
			ShareUS:  int64(rapid.IntRange(0, 5000).Draw(t, "share")),
			HeldUS:   int64(rapid.IntRange(0, 5000).Draw(t, "held")),
			EnergyMJ: int64(rapid.IntRange(0, 5000).Draw(t, "energy")),
		}
		w.Totals.ShareUS += more.ShareUS
		w.Totals.HeldUS += more.HeldUS
		w.Totals.EnergyMJ += more.EnergyMJ
		owner := workloadName{cleanLabel(w.Key.User), w.Key.Kind, ""}
		sum := f.counted[owner]
		sum.add(countersOf(more))
		f.counted[owner] = sum
	}
	shuffled := rapid.Permutation(f.workloads).Draw(t, "order")
	return &snapshot.Snapshot{At: f.at, Started: started, Workloads: shuffled, Resources: f.use(t)}
}

// TestFolding holds folding to its promises over random lives of workloads.
func TestFolding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(0, 6).Draw(t, "limit")
		f := newFolder(limit)
		world := &fleet{at: started, counted: map[workloadName]counters{}}
		last := map[seriesKey]counters{}
		gone := map[workloadName]counters{}
		overflows := map[seriesKey]counters{}
		shownBefore := map[workloadName]bool{}
		dropped := int64(0)
		for range rapid.IntRange(1, 30).Draw(t, "passes") {
			s := world.step(t)
			current := f.fold(s.At, s.Workloads)

			shown := map[seriesKey]counters{}
			names := map[workloadName]bool{}
			users := map[string]bool{}
			for _, one := range current {
				if _, twice := shown[one.key]; twice {
					t.Fatalf("label set twice: %v", one.key)
				}
				shown[one.key] = one.totals
				users[one.key.user] = true
				if one.key.workload != Overflow {
					names[one.key.workloadName] = true
				}
				before := last[one.key]
				if one.key.workload == Overflow {
					before = overflows[one.key]
					overflows[one.key] = one.totals
				}
				for i := range before {
					if one.totals[i] < before[i] {
						t.Fatalf("%v: counter %d fell from %d to %d", one.key, i, before[i], one.totals[i])
					}
				}
			}
			if len(names) > limit {
				t.Fatalf("%d workloads shown, limit %d", len(names), limit)
			}
			present := map[workloadName]bool{}
			for i := range s.Workloads {
				key := &s.Workloads[i].Key
				if !users[cleanLabel(key.User)] {
					t.Fatalf("user %q is not shown", key.User)
				}
				name := workloadName{cleanLabel(key.User), cleanLabel(key.Kind), cleanLabel(key.Name)}
				present[name] = true
				if shownBefore[name] && !names[name] {
					t.Fatalf("%v was shown and is folded", name)
				}
			}
			for name := range shownBefore {
				if !present[name] {
					delete(shownBefore, name)
				}
			}
			for name := range names {
				shownBefore[name] = true
			}

			for key, totals := range last {
				if _, ok := shown[key]; !ok {
					owner := workloadName{key.user, key.kind, ""}
					sum := gone[owner]
					sum.add(totals)
					gone[owner] = sum
				}
			}
			sums := map[workloadName]counters{}
			last = map[seriesKey]counters{}
			for key, totals := range shown {
				owner := workloadName{key.user, key.kind, ""}
				sum := sums[owner]
				sum.add(totals)
				sums[owner] = sum
				if key.workload != Overflow {
					last[key] = totals
				}
			}
			for key, totals := range overflows {
				if _, ok := shown[key]; !ok {
					owner := workloadName{key.user, key.kind, ""}
					sum := sums[owner]
					sum.add(totals)
					sums[owner] = sum
				}
			}
			for owner, want := range world.counted {
				got := sums[owner]
				got.add(gone[owner])
				if got != want {
					t.Fatalf("%v: series come to %v, counted were %v", owner, got, want)
				}
			}
			if f.dropped < dropped {
				t.Fatalf("dropped series fell from %d to %d", dropped, f.dropped)
			}
			dropped = f.dropped
		}
	})
}

// TestCountersNeverFall watches every exposed counter over random snapshots.
func TestCountersNeverFall(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := newFolder(rapid.IntRange(0, 6).Draw(t, "limit"))
		world := &fleet{at: started, counted: map[workloadName]counters{}}
		card := a100(0)
		before := map[string]float64{}
		for range rapid.IntRange(1, 20).Draw(t, "passes") {
			s := world.step(t)
			card.IdleUS += int64(rapid.IntRange(0, 5000).Draw(t, "idle"))
			card.MeteredUS += int64(rapid.IntRange(0, 5000).Draw(t, "metered"))
			card.EnergyMJ.Value += int64(rapid.IntRange(0, 5000).Draw(t, "energy"))
			s.Cards = []snapshot.Card{card}
			if rapid.Bool().Draw(t, "lost") {
				s.Cards[0].Reading, s.Cards[0].Up = nil, false
			}
			after := map[string]float64{}
			for _, family := range gather(newView(s, f)) {
				for _, m := range family.Metric {
					if m.Counter == nil {
						continue
					}
					key := family.GetName() + fmt.Sprint(m.Label)
					after[key] = m.Counter.GetValue()
					if last, ok := before[key]; ok && after[key] < last {
						t.Fatalf("%s fell from %v to %v", key, last, after[key])
					}
				}
			}
			before = after
		}
	})
}

// TestFoldingOnTheNode: nothing that workloads used of the node is shown twice
// or lost, however they fold.
func TestFoldingOnTheNode(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(0, 6).Draw(t, "limit")
		f := newFolder(limit)
		world := &fleet{at: started, counted: map[workloadName]counters{}}
		last, gone := map[workloadName]counters{}, map[workloadName]counters{}
		for range rapid.IntRange(1, 30).Draw(t, "passes") {
			v := newView(world.step(t), f)
			shown, sums := map[workloadName]counters{}, map[workloadName]counters{}
			for _, s := range v.onNode {
				if _, twice := shown[s.name]; twice {
					t.Fatalf("label set twice: %v", s.name)
				}
				shown[s.name] = s.totals
				for i, before := range last[s.name] {
					if s.totals[i] < before {
						t.Fatalf("%v: counter %d fell from %d to %d", s.name, i, before, s.totals[i])
					}
				}
			}
			for name, totals := range last {
				if _, ok := shown[name]; ok {
					continue
				}
				if name.workload == Overflow {
					shown[name] = totals // goes on from there
					continue
				}
				owner := workloadName{name.user, name.kind, ""}
				sum := gone[owner]
				sum.add(totals)
				gone[owner] = sum
			}
			last = shown
			for name, totals := range shown {
				owner := workloadName{name.user, name.kind, ""}
				sum := sums[owner]
				sum.add(totals)
				sums[owner] = sum
			}
			for owner, want := range world.usedOnNode {
				got := sums[owner]
				got.add(gone[owner])
				if got != want {
					t.Fatalf("%v: series come to %v, used were %v", owner, got, want)
				}
			}
		}
	})
}

// TestFoldedWorkloadStaysFolded: were it shown once a place is free, its past
// would count under two names.
func TestFoldedWorkloadStaysFolded(t *testing.T) {
	card := a100(0)
	first, second, third := container(card, "alice", "1"), container(card, "alice", "2"), container(card, "alice", "3")
	second.FirstSeen = first.FirstSeen.Add(time.Second)
	third.FirstSeen = first.FirstSeen.Add(2 * time.Second)
	f := newFolder(1)
	shown := func(workloads ...snapshot.Workload) string {
		var names []string
		for _, s := range f.fold(now, workloads) {
			names = append(names, s.key.workload)
		}
		return strings.Join(names, " ")
	}
	for i, step := range []struct{ got, want string }{
		{shown(second, first), "(overflow) 1"},
		{shown(second), "(overflow)"},
		{shown(second, third), "(overflow) 3"},
		{shown(second, third, first), "(overflow) 3"},
	} {
		if step.got != step.want {
			t.Errorf("step %d shows %q, want %q", i, step.got, step.want)
		}
	}
	if f.dropped != 2 {
		t.Errorf("%d series dropped, want 2", f.dropped)
	}
}

// TestTotalsRestartedUnseen: totals that began anew since the previous pass add
// to their label set even if they have passed the old ones.
func TestTotalsRestartedUnseen(t *testing.T) {
	w := container(a100(0), "alice", "train")
	f := newFolder(1)
	w.Totals.ShareUS = 5_000_000
	f.fold(now, []snapshot.Workload{w})
	w.Totals.ShareUS, w.FirstSeen = 6_000_000, now.Add(time.Hour)
	got := f.fold(now.Add(3*time.Hour), []snapshot.Workload{w})[0].totals[shareUS]
	if got != 11_000_000 {
		t.Errorf("share %d µs, want 11 s", got)
	}
}

// TestRestartedTotals: a member whose totals begin anew adds to its label set.
func TestRestartedTotals(t *testing.T) {
	w := container(a100(0), "alice", "train")
	f := newFolder(0)
	w.Totals.ShareUS = 5_000_000
	f.fold(now, []snapshot.Workload{w})
	f.fold(now, nil)
	w.Totals.ShareUS = 2_000_000
	got := f.fold(now, []snapshot.Workload{w})[0].totals[shareUS]
	if got != 7_000_000 {
		t.Errorf("share %d µs, want 7 s", got)
	}
}

func TestUnknownPartsMakeSumsUnknown(t *testing.T) {
	card := a100(0)
	a, b := container(card, "alice", "1"), container(card, "alice", "2")
	f := newFolder(0)
	sum := func() (float64, bool) { return f.fold(now, []snapshot.Workload{a, b})[0].memoryBytes.get() }
	if got, ok := sum(); !ok || got != 40*gib {
		t.Errorf("memory %v, known %v, want 40 GiB", got, ok)
	}
	b.MemoryUsedBytes = gpu.Optional[uint64]{}
	if got, ok := sum(); ok {
		t.Errorf("memory is %v although one part is not known", got)
	}
	b.Present = false
	if got, ok := sum(); !ok || got != 20*gib {
		t.Errorf("memory %v, known %v, want 20 GiB: an ended workload has none", got, ok)
	}
}

func TestCleanLabel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text := string(rapid.SliceOf(rapid.Byte()).Draw(t, "text")) + strings.Repeat(rapid.String().Draw(t, "unit"), rapid.IntRange(0, 300).Draw(t, "times"))
		clean := cleanLabel(text)
		if !utf8.ValidString(clean) || strings.ContainsAny(clean, "\x00\r\x1b") || len(clean) > maxLabelBytes {
			t.Fatalf("%q became %q", text, clean)
		}
		if cleanLabel(clean) != clean {
			t.Fatalf("%q is not stable", clean)
		}
	})
	for _, same := range []string{"", "train", "模型训练", "say \"hi\"\n", "a\\b"} {
		if got := cleanLabel(same); got != same {
			t.Errorf("%q became %q", same, got)
		}
	}
}
