package resources

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

func workload(user string) meter.Workload {
	return meter.Workload{User: user, Kind: meter.KindHost}
}

// life is one process of a random world: what it has used by now.
type life struct {
	source
	begun    uint64
	workload meter.Workload
	used     int64
	// counting is what of used is not the workload's: from before it was seen.
	seen, hidden bool
}

// TestCountersUnderChurn lets processes come, work, go, hide, and change whose
// they are, and holds the book to a count that is kept beside: every µs goes to
// whoever's the process was, once; no counter ever falls.
func TestCountersUnderChurn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newBook()
		at, ticks := time.Unix(1_000_000, 0), uint64(1000)
		users := []meter.Workload{workload("alice"), workload("bob"), {User: "alice", Kind: meter.KindDocker, Name: "train"}}
		var alive []*life
		want, before := map[meter.Workload]int64{}, map[meter.Workload]int64{}
		pid := uint32(0)
		for round := range rapid.IntRange(2, 30).Draw(t, "rounds") {
			last := ticks
			at, ticks = at.Add(5*time.Second), ticks+500
			for range rapid.IntRange(0, 3).Draw(t, "come") {
				pid++
				one := &life{source: source{pid: pid % 5, id: ticks + uint64(pid)}, workload: rapid.SampledFrom(users).Draw(t, "user")}
				// Since the round before, or long ago.
				one.begun = rapid.SampledFrom([]uint64{last + 1, 3}).Draw(t, "begun")
				alive = append(alive, one)
			}
			var samples []sample
			holding := map[meter.Workload]bool{}
			for _, one := range alive {
				work := int64(rapid.IntRange(0, 5_000_000).Draw(t, "work"))
				one.used += work
				if rapid.IntRange(0, 9).Draw(t, "moves") == 0 {
					one.workload = rapid.SampledFrom(users).Draw(t, "to")
				}
				if one.hidden = rapid.IntRange(0, 9).Draw(t, "hides") == 0; one.hidden {
					one.seen = false
					continue
				}
				holding[one.workload] = true
				switch {
				case one.seen:
					want[one.workload] += work
				case round > 0 && one.begun > last:
					want[one.workload] += one.used
				}
				one.seen = true
				s := sample{workload: one.workload, source: one.source, begun: one.begun}
				s.counted[cpuUS] = gpu.Some(one.used)
				samples = append(samples, s, s) // listed twice counts once
			}
			alive = slices.DeleteFunc(alive, func(*life) bool { return rapid.IntRange(0, 9).Draw(t, "ends") == 0 })
			b.add(at, ticks, append(slices.Collect(maps.Keys(holding)), slices.Collect(maps.Keys(holding))...), samples)
			for _, one := range b.workloads() {
				if one.CPUUS.Value != want[one.Key] {
					t.Fatalf("round %d: %v has %d µs, want %d", round, one.Key, one.CPUUS.Value, want[one.Key])
				}
				if one.CPUUS.Value < before[one.Key] {
					t.Fatalf("round %d: %v fell", round, one.Key)
				}
				before[one.Key] = one.CPUUS.Value
				if one.ReadBytes.Known || one.ResidentBytes.Known {
					t.Fatalf("what no source told is known: %+v", one)
				}
			}
		}
	})
}

// rounds adds samples five seconds apart and returns the last state.
func rounds(b *book, all ...[]sample) map[string]snapshot.Resources {
	at := time.Unix(2_000_000, 0)
	for i, samples := range all {
		var holding []meter.Workload
		for _, s := range samples {
			holding = append(holding, s.workload)
		}
		b.add(at.Add(time.Duration(i)*5*time.Second), uint64(10_000+500*i), holding, samples)
	}
	found := map[string]snapshot.Resources{}
	for _, one := range b.workloads() {
		found[one.Key.User] = one
	}
	return found
}

func reading(user string, inode uint64, begun uint64, read int64) []sample {
	s := sample{workload: workload(user), source: source{device: 1, id: inode}, begun: begun, resident: gpu.Some(uint64(read))}
	s.counted[readBytes] = gpu.Some(read)
	return []sample{s}
}

func TestBook(t *testing.T) {
	const long, justNow = 5, 10_600 // began before everything; between the second and the third round
	for name, test := range map[string]struct {
		rounds [][]sample
		want   string // total, a second, resident
	}{
		"from when it was first seen":         {[][]sample{reading("a", 1, long, 1000)}, "0 unknown 1000"},
		"what it did since":                   {[][]sample{reading("a", 1, long, 1000), reading("a", 1, long, 1500)}, "500 100 1500"},
		"made anew while we looked on":        {[][]sample{reading("a", 1, long, 1000), reading("a", 1, long, 1500), reading("a", 2, justNow, 200)}, "700 40 200"},
		"an older one than the last look":     {[][]sample{reading("a", 1, long, 1000), reading("a", 1, long, 1500), reading("a", 2, long, 90_000)}, "500 0 90000"},
		"set back":                            {[][]sample{reading("a", 1, long, 1000), reading("a", 1, long, 300)}, "300 60 300"},
		"ended: counters stay, gauges do not": {[][]sample{reading("a", 1, long, 1000), reading("a", 1, long, 1500), nil}, "500 unknown unknown"},
		"a pause does not count":              {[][]sample{reading("a", 1, long, 1000), reading("b", 9, long, 0), reading("a", 1, long, 7000), reading("a", 1, long, 7005)}, "5 1 7005"},
	} {
		got := rounds(newBook(), test.rounds...)["a"]
		text := func(value int64, known bool) string {
			if !known {
				return "unknown"
			}
			return fmt.Sprint(value)
		}
		is := text(got.ReadBytes.Get()) + " " + text(got.ReadBytesPerSecond.Get()) + " " +
			text(int64(got.ResidentBytes.Value), got.ResidentBytes.Known)
		if is != test.want {
			t.Errorf("%s: %s, want %s", name, is, test.want)
		}
	}
}

func TestEndedWorkloadsAreForgotten(t *testing.T) {
	b := newBook()
	at := time.Unix(3_000_000, 0)
	b.add(at, 1, []meter.Workload{workload("a")}, nil)
	b.add(at.Add(keptFor), 2, nil, nil)
	if len(b.workloads()) != 1 {
		t.Error("forgotten too early")
	}
	b.add(at.Add(keptFor+time.Second), 3, nil, nil)
	if len(b.workloads()) != 0 || len(b.sources) != 0 {
		t.Error("still there")
	}
}
