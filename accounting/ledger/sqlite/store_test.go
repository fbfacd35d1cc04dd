package sqlite_test

import (
	"context"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

var (
	start = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	later = time.Date(2026, 12, 5, 0, 0, 0, 0, time.UTC)
)

func open(t testing.TB, path string) *sqlite.Store {
	t.Helper()
	store, err := sqlite.Open(context.Background(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return store
}

func openNew(t testing.TB) *sqlite.Store {
	t.Helper()
	return open(t, filepath.Join(t.TempDir(), "ledger ?%.db"))
}

func insert(t testing.TB, store *sqlite.Store, rows ...usage.Row) ledger.Result {
	t.Helper()
	result, err := store.Insert(context.Background(), ledger.Batch{Source: "test", Rows: rows}, later)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func audit(t testing.TB, store *sqlite.Store) ledger.Audit {
	t.Helper()
	result, err := store.Audit(context.Background(), ledger.Span{}, later)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

func period(t testing.TB, store *sqlite.Store, month, zone string, now time.Time) (billing.Period, ledger.Period) {
	t.Helper()
	location, err := time.LoadLocation(zone)
	if err != nil {
		t.Fatal(err)
	}
	p, err := billing.ParsePeriod(month, location)
	if err != nil {
		t.Fatal(err)
	}
	result, err := store.Period(context.Background(), p, now)
	if err != nil {
		t.Fatal(err)
	}
	return p, result
}

// row is one idle row that fills a bucket.
func row(node, run, card string, bucket time.Time, seconds int64) usage.Row {
	return usage.Row{
		Key: usage.Key{Run: run, Device: card, Slices: 1, Of: 1, Bucket: bucket, State: usage.StateIdle, UID: -1},
		Seq: 1, Node: node, Card: card, Model: "NVIDIA H200",
		Amounts: usage.Amounts{GPUUS: seconds * 1e6, ShareUS: seconds * 1e6, IdleUS: seconds * 1e6},
	}
}

func at(quarters int) time.Time { return start.Add(time.Duration(quarters) * usage.BucketLength) }

var small = ledgertest.Site{Start: start, Buckets: 5, Nodes: 2, CardsPerNode: 2, HoldersPerCard: 2}

// Whatever order rows come in, however they are cut into batches, however often
// and through whichever replica: the ledger says the same.
func TestOrderAndRepetitionMakeNoDifference(t *testing.T) {
	rows := slices.Collect(small.Rows())
	reference := openNew(t)
	insert(t, reference, rows...)
	want := audit(t, reference)
	_, wantPeriod := period(t, reference, "2026-11", "Asia/Shanghai", later)
	if want.Rows != int64(len(rows)) || len(want.Findings) > 0 {
		t.Fatalf("reference ledger: %d rows, findings %v", want.Rows, want.Findings)
	}
	rapid.Check(t, func(r *rapid.T) {
		dir := t.TempDir()
		path := filepath.Join(dir, "ledger.db")
		replicas := []*sqlite.Store{open(t, path), open(t, path)}
		shuffled := slices.Clone(rows)
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(r, "seed"), 0))
		for range rapid.IntRange(0, len(rows)).Draw(r, "repeated") {
			again := rows[random.IntN(len(rows))]
			again.Seq = random.Int64N(1e6) + 1 // a journal begun anew numbers afresh
			shuffled = append(shuffled, again)
		}
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		var total ledger.Result
		for i := 0; len(shuffled) > 0; i++ {
			n := min(len(shuffled), rapid.IntRange(1, 40).Draw(r, "batch"))
			total = total.Plus(insert(t, replicas[i%2], shuffled[:n]...))
			shuffled = shuffled[n:]
		}
		if total.Inserted != int64(len(rows)) || total.Quarantined != 0 {
			r.Fatalf("%+v of %d rows", total, len(rows))
		}
		if diff := cmp.Diff(want, audit(t, replicas[0])); diff != "" {
			r.Fatalf("audit (-want +got):\n%s", diff)
		}
		_, got := period(t, replicas[1], "2026-11", "Asia/Shanghai", later)
		if diff := cmp.Diff(wantPeriod, got); diff != "" {
			r.Fatalf("period (-want +got):\n%s", diff)
		}
	})
}

func TestContentHashSeesEveryField(t *testing.T) {
	base := row("gpu01", "r", "GPU-a", start, 900)
	base.State, base.User, base.UID, base.Kind = usage.StateHeld, "alice", 1000, "host"
	changes := map[string]func(*usage.Row){
		"run": func(r *usage.Row) { r.Run += "x" }, "device": func(r *usage.Row) { r.Device += "x" },
		"of": func(r *usage.Row) { r.Of++ }, "user": func(r *usage.Row) { r.User += "x" },
		"uid": func(r *usage.Row) { r.UID++ }, "kind": func(r *usage.Row) { r.Kind += "x" },
		"workload": func(r *usage.Row) { r.Workload += "x" }, "project": func(r *usage.Row) { r.Project += "x" },
		"class": func(r *usage.Row) { r.Class += "x" }, "node": func(r *usage.Row) { r.Node += "x" },
		"card": func(r *usage.Row) { r.Card += "x" }, "index": func(r *usage.Row) { r.Index++ },
		"model": func(r *usage.Row) { r.Model += "x" }, "profile": func(r *usage.Row) { r.Profile += "x" },
		"gpu": func(r *usage.Row) { r.GPUUS-- }, "share": func(r *usage.Row) { r.ShareUS-- },
		"held": func(r *usage.Row) { r.HeldUS++ }, "energy": func(r *usage.Row) { r.EnergyMJ++ },
		"peak": func(r *usage.Row) { r.PeakMemoryBytes++ }, "temperature": func(r *usage.Row) { r.PeakTemperatureC++ },
		"estimated": func(r *usage.Row) { r.Estimated = true }, "attributed_by": func(r *usage.Row) { r.AttributedBy = "uid" }, "review": func(r *usage.Row) { r.Review = true },
		"text borders": func(r *usage.Row) { r.Workload, r.Project = "ab", "c" }, "text borders too": func(r *usage.Row) { r.Workload, r.Project = "a", "bc" },
	}
	seen := map[string]string{}
	for name, change := range changes {
		changed := base
		change(&changed)
		hash := ledger.NewContentHash()
		hash.Bucket([]usage.Row{changed})
		if other, ok := seen[hash.String()]; ok {
			t.Errorf("%s and %s have one hash", name, other)
		}
		seen[hash.String()] = name
	}
}

func TestQuarantine(t *testing.T) {
	good := row("gpu01", "r1", "GPU-a", start, 900)
	with := func(change func(*usage.Row)) usage.Row {
		changed := good
		changed.Bucket = at(1)
		change(&changed)
		return changed
	}
	cases := map[string]struct {
		row    usage.Row
		reason string
	}{
		"other content":  {with(func(r *usage.Row) { r.Bucket = start; r.GPUUS--; r.EnergyMJ++ }), ledger.ReasonConflict},
		"other node":     {with(func(r *usage.Row) { r.Node = "gpu02" }), ledger.ReasonNode},
		"future":         {with(func(r *usage.Row) { r.Bucket = later.Add(75 * time.Minute) }), ledger.ReasonFuture},
		"no clock":       {with(func(r *usage.Row) { r.Bucket = time.Unix(900, 0) }), ledger.ReasonPast},
		"off the grid":   {with(func(r *usage.Row) { r.Bucket = r.Bucket.Add(time.Minute) }), ledger.ReasonInvalid},
		"too long":       {with(func(r *usage.Row) { r.GPUUS = 900_000_001 }), ledger.ReasonAmounts},
		"negative":       {with(func(r *usage.Row) { r.EnergyMJ = -1 }), ledger.ReasonInvalid},
		"more than held": {with(func(r *usage.Row) { r.ReservedUS = 5000 }), ledger.ReasonAmounts},
		"idle user":      {with(func(r *usage.Row) { r.User = "mallory" }), ledger.ReasonInvalid},
		"not text":       {with(func(r *usage.Row) { r.Model = "a\xff\x00" }), ledger.ReasonInvalid},
	}
	for name, test := range cases {
		t.Run(name, func(t *testing.T) {
			store := openNew(t)
			ctx := context.Background()
			page := ledger.Page{Batch: ledger.Batch{Source: "http://gpu01", Rows: []usage.Row{good, test.row}}, Cursor: "c"}
			result, err := store.InsertPage(ctx, page, later)
			if err != nil {
				t.Fatal(err)
			}
			if want := (ledger.Result{Inserted: 1, Quarantined: 1}); result != want {
				t.Errorf("first time: %+v", result)
			}
			if result, err = store.InsertPage(ctx, page, later.Add(time.Minute)); err != nil || result != (ledger.Result{Duplicate: 1}) {
				t.Errorf("second time: %+v, %v", result, err)
			}
			list, count, err := store.Quarantined(ctx, ledger.Span{}, 10)
			if err != nil || count != 1 || len(list) != 1 {
				t.Fatalf("quarantined: %d %v %v", count, list, err)
			}
			if list[0].Reason != test.reason || list[0].Detail == "" || !strings.Contains(list[0].Line, `"run":"r1"`) {
				t.Errorf("quarantined: %+v", list[0])
			}
			if got := audit(t, store); got.Rows != 1 {
				t.Errorf("%d rows are counted", got.Rows)
			}
		})
	}
}

// TestTheLaterStateStands: a journal restored from a copy made in mid-run ends
// its rows early. Whichever state comes first, the larger one is counted.
func TestTheLaterStateStands(t *testing.T) {
	early := row("gpu01", "r1", "GPU-a", start, 300)
	late := row("gpu01", "r1", "GPU-a", start, 900)
	late.PeakTemperatureC++
	want := ""
	for _, order := range [][]usage.Row{{late}, {late, early}, {early, late}, {early, late, early}} {
		store := openNew(t)
		for _, one := range order {
			if result := insert(t, store, one); result.Quarantined != 0 {
				t.Errorf("quarantined: %+v", result)
			}
		}
		got := audit(t, store)
		if got.Rows != 1 {
			t.Errorf("%d rows", got.Rows)
		}
		if want == "" {
			want = got.ContentHash
		}
		if got.ContentHash != want {
			t.Errorf("order %d gives another ledger", len(order))
		}
	}
}

func TestAtTheFutureLimit(t *testing.T) {
	store := openNew(t)
	if got := insert(t, store, row("gpu01", "r", "GPU-a", later.Add(time.Hour), 900)); got.Inserted != 1 {
		t.Errorf("a bucket that starts in an hour: %+v", got)
	}
}

func TestOverlapsAreNamed(t *testing.T) {
	store := openNew(t)
	for q := range 4 {
		insert(t, store, row("gpu01", "run-a", "GPU-a", at(q), 900))
	}
	insert(t, store, row("gpu02", "run-b", "GPU-a", at(1), 100), row("gpu02", "run-b", "GPU-a", at(2), 200))
	// A restart in mid-bucket, and one more in the same bucket: all well.
	insert(t, store, row("gpu03", "run-c", "GPU-c", at(0), 900), row("gpu03", "run-c", "GPU-c", at(1), 300),
		row("gpu03", "run-d", "GPU-c", at(1), 300), row("gpu03", "run-e", "GPU-c", at(1), 200), row("gpu03", "run-e", "GPU-c", at(2), 900))
	got := audit(t, store)
	want := []ledger.Finding{
		{
			Kind: ledger.FindingOverFull, Card: "GPU-a", Devices: []string{"GPU-a"}, From: at(1), To: at(3), Buckets: 2, ExcessUS: 300e6,
			Runs: []ledger.RunUse{{Run: "run-a", Node: "gpu01", GPUUS: 1800e6}, {Run: "run-b", Node: "gpu02", GPUUS: 300e6}},
		},
		{
			Kind: ledger.FindingOverlap, Card: "GPU-a", Devices: []string{"GPU-a"}, From: at(1), To: at(3), Buckets: 2,
			Runs: []ledger.RunUse{{Run: "run-a", Node: "gpu01", GPUUS: 3600e6}, {Run: "run-b", Node: "gpu02", GPUUS: 300e6}},
		},
	}
	if diff := cmp.Diff(want, got.Findings); diff != "" {
		t.Errorf("findings (-want +got):\n%s", diff)
	}
	if got.HeldUS+got.IdleUS+got.DownUS+got.UnobservedUS != got.CapacityUS+got.OverFullUS || got.OverFullUS != 300e6 {
		t.Errorf("sums: %+v", got)
	}
}

func TestInService(t *testing.T) {
	utc := "UTC"
	t.Run("silent until now", func(t *testing.T) {
		store := openNew(t)
		insert(t, store, row("gpu01", "r", "GPU-a", at(4), 900))
		_, got := period(t, store, "2026-11", utc, at(10).Add(7*time.Minute))
		want := []billing.Capacity{{Day: "2026-11-01", Node: "gpu01", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 6 * 900e6}}
		if diff := cmp.Diff(want, got.Capacity); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("a last row after now counts to its end", func(t *testing.T) {
		store := openNew(t)
		insert(t, store, row("gpu01", "r", "GPU-a", at(4), 100))
		_, got := period(t, store, "2026-11", utc, at(4).Add(time.Minute))
		if got.Capacity[0].InServiceUS != 900e6 {
			t.Errorf("%+v", got.Capacity)
		}
	})
	t.Run("silent through whole months, over a change of clocks", func(t *testing.T) {
		store := openNew(t)
		insert(t, store, row("gpu01", "r", "GPU-a", time.Date(2026, 1, 5, 0, 0, 0, 0, time.UTC), 900))
		p, got := period(t, store, "2026-10", "Europe/Berlin", later)
		var sum int64
		for _, c := range got.Capacity {
			sum += c.InServiceUS
		}
		if len(got.Capacity) != 31 || sum != p.LengthUS() || sum != (31*24+1)*3600e6 {
			t.Errorf("%d days, %d µs of %d", len(got.Capacity), sum, p.LengthUS())
		}
	})
	t.Run("retired, and back", func(t *testing.T) {
		store := openNew(t)
		ctx := context.Background()
		insert(t, store, row("gpu01", "r", "GPU-a", at(0), 900), row("gpu01", "r", "GPU-b", at(0), 900))
		if _, err := store.RetireDevice(ctx, "GPU-a", at(2).Add(time.Second), later); err != nil {
			t.Fatal(err)
		}
		if when, err := store.RetireNode(ctx, "gpu01", at(5), later); err != nil || !when.Equal(at(5)) {
			t.Fatal(when, err)
		}
		insert(t, store, row("gpu02", "r2", "GPU-a", at(95), 900))
		_, got := period(t, store, "2026-11", utc, at(97))
		want := []billing.Capacity{
			{Day: "2026-11-01", Node: "gpu01", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 3 * 900e6},
			{Day: "2026-11-01", Node: "gpu02", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 900e6},
			{Day: "2026-11-01", Node: "gpu01", Card: "GPU-b", Model: "NVIDIA H200", InServiceUS: 5 * 900e6},
			{Day: "2026-11-02", Node: "gpu02", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 900e6},
		}
		if diff := cmp.Diff(want, got.Capacity); diff != "" {
			t.Error(diff)
		}
		if _, err := store.RetireNode(ctx, "gpu99", at(5), later); err == nil {
			t.Error("an unknown node was retired")
		}
	})
	t.Run("moved in mid-bucket", func(t *testing.T) {
		store := openNew(t)
		insert(t, store, row("b", "r", "GPU-a", at(0), 900), row("b", "r", "GPU-a", at(1), 200), row("a", "r2", "GPU-a", at(1), 300), row("a", "r2", "GPU-a", at(2), 900))
		_, got := period(t, store, "2026-11", utc, at(3))
		want := []billing.Capacity{
			{Day: "2026-11-01", Node: "a", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 1600e6},
			{Day: "2026-11-01", Node: "b", Card: "GPU-a", Model: "NVIDIA H200", InServiceUS: 1100e6},
		}
		if diff := cmp.Diff(want, got.Capacity); diff != "" {
			t.Error(diff)
		}
		if found := audit(t, store).Findings; len(found) > 0 {
			t.Error(found)
		}
	})
}

func TestReplicasAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "ledger.db")
	rows := slices.Collect(small.Rows())
	var wait sync.WaitGroup
	for range 4 {
		wait.Go(func() {
			store, err := sqlite.Open(context.Background(), path)
			if err != nil {
				t.Error(err)
				return
			}
			defer store.Close()
			for batch := range slices.Chunk(rows, 7) {
				page := ledger.Page{Batch: ledger.Batch{Source: "http://x", Rows: batch[:1]}, Cursor: "c"}
				if _, err := store.Insert(context.Background(), ledger.Batch{Source: "x", Rows: batch}, later); err != nil {
					t.Error(err)
				}
				if _, err := store.InsertPage(context.Background(), page, later); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wait.Wait()
	if got := audit(t, open(t, path)); got.Rows != int64(len(rows)) || len(got.Findings) > 0 {
		t.Errorf("%d rows of %d, %v", got.Rows, len(rows), got.Findings)
	}
}

func TestCompleteThroughNeverFalls(t *testing.T) {
	store := openNew(t)
	ctx := context.Background()
	page := ledger.Page{Batch: ledger.Batch{Source: "u", Rows: []usage.Row{row("gpu01", "r", "GPU-a", start, 900)}}, Cursor: "1", CompleteThrough: at(3)}
	if _, err := store.InsertPage(ctx, page, later); err != nil {
		t.Fatal(err)
	}
	if err := store.RecordFailure(ctx, "u", "refused\x00\xff", later); err != nil {
		t.Fatal(err)
	}
	page.CompleteThrough, page.Cursor = at(1), "2"
	if _, err := store.InsertPage(ctx, page, later); err != nil {
		t.Fatal(err)
	}
	got, err := store.Target(ctx, "u")
	want := ledger.Target{URL: "u", Node: "gpu01", Cursor: "2", LastSuccess: later, CompleteThrough: at(3)}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(diff, err)
	}
}

// BenchmarkMonth is a month of 100 cards, over a million rows.
func BenchmarkMonth(b *testing.B) {
	rows := slices.Collect(ledgertest.Month(start, start.AddDate(0, 1, 0)).Rows())
	ctx := context.Background()
	for b.Loop() {
		store := openNew(b)
		began := time.Now()
		for batch := range slices.Chunk(rows, 10_000) {
			if _, err := store.Insert(ctx, ledger.Batch{Source: "bench", Rows: batch}, later); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(time.Since(began).Seconds(), "insert-s")
		began = time.Now()
		got := audit(b, store)
		b.ReportMetric(time.Since(began).Seconds(), "audit-s")
		if got.Rows != int64(len(rows)) || len(got.Findings) > 0 {
			b.Fatal(got.Rows, got.Findings)
		}
		began = time.Now()
		period(b, store, "2026-11", "UTC", later)
		b.ReportMetric(time.Since(began).Seconds(), "period-s")
		b.ReportMetric(float64(got.Rows), "rows")
		size, _ := store.Size()
		b.ReportMetric(float64(size), "bytes")
	}
}

// Time that needs review is counted, in a period and in a proof of it.
func TestReview(t *testing.T) {
	store := openNew(t)
	doubtful := row("gpu01", "r1", "GPU-a", start, 300)
	doubtful.State, doubtful.User, doubtful.UID, doubtful.Kind, doubtful.Review = usage.StateHeld, "alice", 1001, "docker", true
	trusted := doubtful
	trusted.User, trusted.UID, trusted.Review = "bob", 1002, false
	insert(t, store, doubtful, trusted)
	if got := audit(t, store); got.ReviewUS != doubtful.GPUUS || got.HeldUS != 2*doubtful.GPUUS {
		t.Errorf("%d µs of %d need review, want %d", got.ReviewUS, got.HeldUS, doubtful.GPUUS)
	}
	month, err := billing.ParsePeriod("2026-11", time.UTC)
	if err != nil {
		t.Fatal(err)
	}
	data, err := store.Period(context.Background(), month, later)
	if err != nil || data.ReviewUS != doubtful.GPUUS {
		t.Errorf("%d µs of the month need review, want %d (%v)", data.ReviewUS, doubtful.GPUUS, err)
	}
	// What a version from before dropped is taken in when the row comes again.
	trusted.Review = true
	if result := insert(t, store, trusted); result.Quarantined != 0 || result.Inserted != 1 {
		t.Errorf("%+v", result)
	}
	if got := audit(t, store); got.ReviewUS != 2*doubtful.GPUUS {
		t.Errorf("%d µs need review", got.ReviewUS)
	}
}
