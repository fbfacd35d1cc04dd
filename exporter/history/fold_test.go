package history

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gpuledger/exporter/usage"
)

var begin = time.Date(2026, 11, 3, 8, 0, 0, 0, time.UTC)

func bucketAt(n int) time.Time { return begin.Add(time.Duration(n) * usage.BucketLength) }

const bucketUS = int64(usage.BucketLength / time.Microsecond)

// row is a row of a whole card; the rest is set by change.
func row(bucket int, state, user string, uid, us int64, change func(*usage.Row)) usage.Row {
	r := usage.Row{
		Key:  usage.Key{Run: "r1", Device: "GPU-0", Slices: 1, Of: 1, Bucket: bucketAt(bucket), State: state, User: user, UID: uid},
		Node: "gpu01", Card: "GPU-0", Model: "NVIDIA H200", Amounts: usage.Amounts{GPUUS: us, ShareUS: us},
	}
	if state == usage.StateHeld {
		r.Kind, r.HeldUS, r.AttributedBy = "host", us, "user_slice"
	}
	if change != nil {
		change(&r)
	}
	return r
}

// answerOf folds rows as the journal gives them, and answers at the end of the
// last bucket.
func answerOf(rows []usage.Row, reader Reader, from, to time.Time) Answer {
	rows = slices.Clone(rows)
	slices.SortStableFunc(rows, func(a, b usage.Row) int { return b.Bucket.Compare(a.Bucket) })
	f := newFold(reader)
	for i := range rows {
		if !f.add(&rows[i]) {
			break
		}
	}
	return f.answer(span{from: from, begins: from, committed: to, now: to, node: "gpu01"})
}

func TestStretches(t *testing.T) {
	job := func(name string) func(*usage.Row) {
		return func(r *usage.Row) { r.Kind, r.Workload, r.EnergyMJ = "docker", name, 1000 }
	}
	rows := []usage.Row{
		// alice's two jobs follow each other; bob shares the card for one bucket.
		row(0, "held", "alice", 1001, bucketUS, job("first")),
		row(1, "held", "alice", 1001, bucketUS/2, job("first")),
		row(1, "held", "bob", 1002, bucketUS/2, job("secret")),
		row(2, "held", "alice", 1001, bucketUS, job("second")),
		// The exporter restarts in the middle of bucket 3, and is away in 4.
		row(3, "idle", "", -1, bucketUS/3, nil),
		row(3, "idle", "", -1, bucketUS/3, func(r *usage.Row) { r.Run = "r2" }),
		row(5, "down", "", -1, bucketUS, nil),
		row(6, "idle", "", -1, bucketUS/4, nil),
	}
	// The newest bucket is written up to a third of it, less some seconds that
	// are on their way.
	to := bucketAt(6).Add(usage.BucketLength/4 + 10*time.Second)
	lines := func(reader Reader) string {
		var b strings.Builder
		a := answerOf(rows, reader, begin, to)
		for _, s := range a.Cards[0].Stretches {
			fmt.Fprintf(&b, "%s-%s %s", s.From.Format("15:04"), s.To.Format("15:04:05"), s.State)
			if s.User != "" {
				fmt.Fprintf(&b, " %s %s", s.User, s.Kind)
			}
			if s.Detail == nil {
				b.WriteString(" ?\n")
				continue
			}
			fmt.Fprintf(&b, " %s%ds %dmJ\n", cmp.Or(s.Detail.Workload+" ", ""), s.Detail.ShareUS/1e6, s.Detail.EnergyMJ)
		}
		return strings.ReplaceAll(b.String(), "  ", " ")
	}
	nobodys := "09:30-09:33:55 idle 225s 0mJ\n" + "09:15-09:30:00 down 900s 0mJ\n" + "08:45-09:15:00 unobserved 1200s 0mJ\n" + "08:45-09:00:00 idle 600s 0mJ\n"
	for name, c := range map[string]struct {
		reader Reader
		want   string
	}{
		"all": {Reader{All: true}, nobodys +
			"08:30-08:45:00 held alice docker second 900s 1000mJ\n" +
			"08:00-08:30:00 held alice docker first 1350s 2000mJ\n" +
			"08:15-08:30:00 held bob docker secret 450s 1000mJ\n"},
		"bob": {Reader{UID: 1002, Known: true}, nobodys +
			"08:00-08:45:00 held alice docker ?\n" + // that there were two is not his to know
			"08:15-08:30:00 held bob docker secret 450s 1000mJ\n"},
		"a stranger": {Reader{UID: 7, Known: true}, nobodys +
			"08:00-08:45:00 held alice docker ?\n" +
			"08:15-08:30:00 held bob docker ?\n"},
		// Uid 0 of an unknown peer is nobody.
		"nobody": {Reader{}, nobodys +
			"08:00-08:45:00 held alice docker ?\n" +
			"08:15-08:30:00 held bob docker ?\n"},
	} {
		got := lines(c.reader)
		if sorted(got) != sorted(c.want) {
			t.Errorf("%s: got\n%swant\n%s", name, got, c.want)
		}
	}
	a := answerOf(rows, Reader{}, begin, to)
	if !slices.IsSortedFunc(a.Cards[0].Stretches, newestFirst) {
		t.Error("not newest first")
	}
}

func sorted(text string) string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// drawRows are rows of some cards, whole and cut, in which no bucket of a card
// has more time than there is.
func drawRows(t *rapid.T, buckets int) []usage.Row {
	var rows []usage.Row
	for c := range rapid.IntRange(1, 3).Draw(t, "cards") {
		uuid := fmt.Sprintf("GPU-%d", c)
		instances := rapid.SampledFrom([]int{0, 0, 2}).Draw(t, "instances")
		for b := range buckets {
			left := bucketUS
			taken := map[usage.Key]bool{}
			for range rapid.IntRange(0, 5).Draw(t, "rows") {
				us := rapid.Int64Range(0, left).Draw(t, "us")
				state := rapid.SampledFrom([]string{"held", "held", "held", "idle", "down"}).Draw(t, "state")
				user, uid := "", int64(-1)
				if state == "held" {
					uid = rapid.SampledFrom([]int64{1001, 1002, -1}).Draw(t, "uid")
					user = rapid.SampledFrom([]string{"alice", "bob"}).Draw(t, "user")
				}
				r := row(b, state, user, uid, us, func(r *usage.Row) {
					r.Card, r.Device, r.Index = uuid, uuid, c
					r.Run = rapid.SampledFrom([]string{"r1", "r2"}).Draw(t, "run")
					if instances > 0 {
						r.Device = fmt.Sprintf("MIG-%d-%d", c, rapid.IntRange(0, instances-1).Draw(t, "instance"))
						r.Slices, r.Of, r.Profile = 3, 7, "3g.71gb"
						r.ShareUS = us * 2
					}
					if state == "held" {
						r.Workload = rapid.SampledFrom([]string{"", "train", "eval"}).Draw(t, "workload")
						r.Project = rapid.SampledFrom([]string{"", "vision"}).Draw(t, "project")
						r.HeldUS, r.ActiveUS, r.IdleUS = us*2, us/3, us/5
						r.PeakMemoryBytes = us
					}
					r.EnergyMJ = us / 7
				})
				if taken[r.Key] {
					continue
				}
				taken[r.Key] = true
				left -= us
				rows = append(rows, r)
			}
		}
	}
	return rows
}

// summed is what all rows, or all stretches, of one party add up to.
type summed struct {
	usage.Amounts
	peak int64
}

// TestMergingConservesRows holds the stretches to a count that merges nothing:
// each party's amounts are its rows', and it is in exactly the buckets in which
// it has rows; each card's time is all accounted for.
func TestMergingConservesRows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		buckets := rapid.IntRange(1, 8).Draw(t, "buckets")
		rows := drawRows(t, buckets)
		a := answerOf(rows, Reader{All: true}, begin, bucketAt(buckets))

		name := func(parts ...any) string { return fmt.Sprintf("%q", parts) }
		wantIn, want := map[string]map[int]bool{}, map[string]summed{}
		metered := map[string]int64{}
		for _, r := range rows {
			k := name(r.Card, r.Device, r.Profile, r.Slices, r.Of, r.State, r.User, r.UID, r.Kind, r.Workload, r.Project, r.Class)
			s := want[k]
			s.Amounts, s.peak = s.Plus(r.Amounts), max(s.peak, r.PeakMemoryBytes)
			want[k] = s
			if wantIn[k] == nil {
				wantIn[k] = map[int]bool{}
			}
			wantIn[k][int(r.Bucket.Sub(begin)/usage.BucketLength)] = true
			metered[r.Card] += r.GPUUS
		}
		gotIn, got := map[string]map[int]bool{}, map[string]summed{}
		for _, c := range a.Cards {
			total := int64(0)
			for _, s := range c.Stretches {
				total += s.Detail.GPUUS
				if s.State == StateUnobserved {
					continue
				}
				uid := int64(-1)
				if s.UID != nil {
					uid = *s.UID
				}
				k := name(c.UUID, s.Device, s.Profile, s.Slices, s.Of, s.State, s.User, uid, s.Kind, s.Detail.Workload, s.Detail.Project, s.Detail.Class)
				sum := got[k]
				sum.Amounts, sum.peak = sum.Plus(s.Detail.Amounts), max(sum.peak, s.Detail.PeakMemoryBytes)
				got[k] = sum
				if gotIn[k] == nil {
					gotIn[k] = map[int]bool{}
				}
				for at := s.From; at.Before(s.To); at = at.Add(usage.BucketLength) {
					bucket := int(at.Sub(begin) / usage.BucketLength)
					if gotIn[k][bucket] || gotIn[k][bucket-1] && at.Equal(s.From) {
						t.Fatalf("%s is in bucket %d twice, or in two stretches that touch", k, bucket)
					}
					gotIn[k][bucket] = true
				}
			}
			if all := int64(buckets) * bucketUS; total != all {
				t.Fatalf("card %s: stretches of %d µs, there were %d", c.UUID, total, all)
			}
		}
		if len(want) != len(got) {
			t.Fatalf("%d parties, want %d", len(got), len(want))
		}
		for k := range want {
			if got[k].Amounts != want[k].Amounts || got[k].peak != want[k].peak || fmt.Sprint(gotIn[k]) != fmt.Sprint(wantIn[k]) {
				t.Fatalf("%s: got %+v in %v, want %+v in %v", k, got[k], gotIn[k], want[k], wantIn[k])
			}
		}
	})
}

// TestOthersAreWhoAndWhen: an answer depends on nothing of others' rows but
// who, kind and when; and one's own rows are told as those are who see all.
func TestOthersAreWhoAndWhen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		buckets := rapid.IntRange(1, 6).Draw(t, "buckets")
		rows := drawRows(t, buckets)
		me := Reader{UID: 1001, Known: true}
		// What idles and is unobserved is what others leave: with those amounts
		// unchanged, nothing else of theirs may make a difference.
		changed := slices.Clone(rows)
		for i := range changed {
			if r := &changed[i]; r.State == usage.StateHeld && r.UID != 1001 {
				r.Workload, r.Project, r.Class, r.AttributedBy = "else", "else", "else", "else"
				r.ShareUS, r.HeldUS, r.ActiveUS, r.EnergyMJ, r.PeakMemoryBytes, r.Estimated = 1, 2, 3, 4, 5, true
			}
		}
		before, after := answerOf(rows, me, begin, bucketAt(buckets)), answerOf(changed, me, begin, bucketAt(buckets))
		if a, b := text(t, before), text(t, after); a != b {
			t.Fatalf("others' rows show:\n%s\n%s", a, b)
		}
		mine := func(a Answer) string {
			var list []Stretch
			for _, c := range a.Cards {
				list = append(list, kept(c.Stretches, func(s Stretch) bool { return s.State != usage.StateHeld || s.UID != nil && *s.UID == 1001 })...)
			}
			return text(t, list)
		}
		if a, b := mine(before), mine(answerOf(rows, Reader{All: true}, begin, bucketAt(buckets))); a != b {
			t.Fatalf("own rows:\n%s\nwho sees all has\n%s", a, b)
		}
	})
}

func text(t *rapid.T, value any) string {
	text, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// An answer that would be too large ends at the edge of a bucket, and says so.
func TestBoundsEndAtABucket(t *testing.T) {
	var rows []usage.Row
	for b := range 10 {
		for _, job := range []string{"a", "b", "c"} { // new ones in every bucket
			rows = append(rows, row(b, "held", "alice", 1001, bucketUS/3, func(r *usage.Row) { r.Workload = fmt.Sprint(job, b) }))
		}
	}
	for name, c := range map[string]struct {
		bound func(*fold)
		from  time.Time
		count int
	}{
		"no bound":                {func(*fold) {}, bucketAt(0), 30},
		"all rows are just taken": {func(f *fold) { f.rowsLeft = 30 }, bucketAt(0), 30},
		"a row too few":           {func(f *fold) { f.rowsLeft = 29 }, bucketAt(1), 27},
		"a bucket's rows":         {func(f *fold) { f.rowsLeft = 12 }, bucketAt(6), 12},
		"amid a bucket":           {func(f *fold) { f.rowsLeft = 14 }, bucketAt(6), 12},
		"no whole bucket":         {func(f *fold) { f.rowsLeft = 2 }, bucketAt(10), 0},
		"stretches":               {func(f *fold) { f.mostStretches = 13 }, bucketAt(6), 12},
		"stretches are just had":  {func(f *fold) { f.mostStretches = 30 }, bucketAt(0), 30},
	} {
		f := newFold(Reader{All: true})
		c.bound(f)
		for i := range rows {
			if !f.add(&rows[len(rows)-1-i]) {
				break
			}
		}
		a := f.answer(span{from: begin, begins: begin, committed: bucketAt(10), now: bucketAt(10)})
		count := 0
		for _, card := range a.Cards {
			count += len(card.Stretches)
		}
		if !a.From.Equal(c.from) || count != c.count || a.Complete() != (c.count == 30) {
			t.Errorf("%s: from %v with %d stretches, missing %v; want from %v with %d", name, a.From, count, a.Missing, c.from, c.count)
		}
	}
}

func TestWhatTheJournalLacks(t *testing.T) {
	rows := []usage.Row{row(2, "idle", "", -1, bucketUS, nil), row(3, "idle", "", -1, bucketUS/2, nil)}
	f := newFold(Reader{})
	f.add(&rows[1])
	f.add(&rows[0])
	// It begins after what was asked for: nothing before is called unobserved.
	// It ends an hour ago: what came since is missing, not unobserved either.
	a := f.answer(span{from: begin, begins: bucketAt(2), committed: bucketAt(3).Add(usage.BucketLength / 2), now: bucketAt(8)})
	if !a.From.Equal(bucketAt(2)) || !a.To.Equal(bucketAt(3).Add(usage.BucketLength/2)) || len(a.Cards[0].Stretches) != 1 {
		t.Errorf("%+v", a)
	}
	if len(a.Missing) != 1 || a.Missing[0].What != MissingNewer || !strings.Contains(a.Missing[0].Message, "1h7m30s ago") {
		t.Errorf("missing %+v", a.Missing)
	}
	empty := newFold(Reader{}).answer(span{from: begin, committed: time.Unix(0, 0), now: bucketAt(8)})
	if len(empty.Cards) != 0 || empty.JournalBegins != nil || !empty.Complete() {
		t.Errorf("an empty journal: %+v", empty)
	}
}

func TestParseLength(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"24h": 24 * time.Hour, "90m": 90 * time.Minute, "7d": 168 * time.Hour, "1d12h": 36 * time.Hour, "31d": MaxLength, "744h": MaxLength, "1s": time.Second,
		"32d": 0, "0": 0, "0d": 0, "-1h": 0, "": 0, "d": 0, "7": 0, "7d-1h": 0, "9999d": 0, "99999d": 0, "2w": 0, "1e3h": 0, "2562047h": 0, "1h 30m": 0,
	} {
		got, err := ParseLength(text)
		if got != want || (err == nil) != (want > 0) {
			t.Errorf("%q: %v, %v; want %v", text, got, err, want)
		}
		if err != nil {
			continue
		}
		if again, err := ParseLength(FormatLength(got)); err != nil || again != got {
			t.Errorf("%q is written %q", text, FormatLength(got))
		}
	}
}

func TestFilter(t *testing.T) {
	uid := int64(1001)
	a := Answer{Cards: []Card{
		{Index: 0, UUID: "GPU-aaaaaaaa", Stretches: []Stretch{{Device: "GPU-aaaaaaaa", User: "alice", UID: &uid}, {Device: "GPU-aaaaaaaa", State: "idle"}}},
		{Index: 1, UUID: "GPU-bbbbbbbb", Stretches: []Stretch{{Device: "MIG-cccccccc", User: "bob"}, {Device: "MIG-dddddddd", User: "alice"}}},
	}}
	for _, c := range []struct {
		filter  Filter
		want    string
		unknown string
	}{
		{Filter{}, "0:2 1:2", ""},
		{Filter{Cards: []string{"1"}}, "1:2", ""},
		{Filter{Cards: []string{"gpu-AAAA"}}, "0:2", ""},
		{Filter{Cards: []string{"MIG-dddd", "7", "GPU-"}}, "1:1", "7 GPU-"},
		{Filter{Users: []string{"alice"}}, "0:1 1:1", ""},
		{Filter{Users: []string{"1001"}}, "0:1", ""},
		{Filter{Users: []string{""}}, "", ""}, // nobody is not everybody who has no name
		{Filter{Users: []string{"bob"}, Cards: []string{"0"}}, "", ""},
	} {
		got, unknown := c.filter.Apply(a)
		var cards []string
		for _, card := range got.Cards {
			cards = append(cards, fmt.Sprintf("%d:%d", card.Index, len(card.Stretches)))
		}
		if strings.Join(cards, " ") != c.want || strings.Join(unknown, " ") != c.unknown {
			t.Errorf("%+v: %v, unknown %v; want %s, %s", c.filter, cards, unknown, c.want, c.unknown)
		}
	}
	if len(a.Cards[1].Stretches) != 2 || a.Cards[1].Stretches[0].User != "bob" {
		t.Error("the answer was changed")
	}
}
