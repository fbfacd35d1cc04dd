package sqlite_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

// kept are the rows in quarantine, without where they stood in a journal.
func kept(t testing.TB, store *sqlite.Store) []string {
	t.Helper()
	list, count, err := store.Quarantined(context.Background(), ledger.Span{}, 10_000)
	if err != nil || count != int64(len(list)) {
		t.Fatal(count, err)
	}
	rows := []string{}
	for _, q := range list {
		row, err := usage.NewDecoder(strings.NewReader(q.Line + "\n")).Decode()
		if err != nil {
			t.Fatal(err)
		}
		row.Seq = 1
		rows = append(rows, fmt.Sprintf("%s %+v", q.Reason, row))
	}
	slices.Sort(rows)
	return rows
}

// Rows that are states of each other and rows that contradict each other, in
// any order and any batches, through two replicas: the same ledger and the same
// quarantine, and both are what Settle says of each key.
func TestAnyOrderGivesTheSameLedger(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		number := rapid.Int64Range(0, 3)
		rows := rapid.SliceOfN(rapid.Custom(func(r *rapid.T) usage.Row {
			one := row("gpu01", "r", "GPU-a", at(rapid.IntRange(0, 1).Draw(r, "bucket")), number.Draw(r, "seconds"))
			one.EnergyMJ = number.Draw(r, "energy")
			one.PeakTemperatureC = number.Draw(r, "temperature")
			one.Estimated = rapid.Bool().Draw(r, "estimated")
			one.Node = rapid.SampledFrom([]string{"gpu01", "gpu01", "gpu01", "gpu02"}).Draw(r, "node")
			one.AttributedBy = rapid.SampledFrom([]string{"", "label"}).Draw(r, "attributed_by")
			one.Seq = rapid.Int64Range(1, 100).Draw(r, "seq")
			return one
		}), 1, 12).Draw(r, "rows")

		byKey := map[usage.Key][]usage.Row{}
		for _, one := range rows {
			one.Seq = 1
			byKey[one.Key] = append(byKey[one.Key], one)
		}
		buckets := map[int64][]usage.Row{}
		aside := []string{}
		for key, list := range byKey {
			counted, contradicting := ledger.Settle(list)
			buckets[key.Bucket.Unix()] = append(buckets[key.Bucket.Unix()], counted)
			for _, one := range contradicting {
				aside = append(aside, fmt.Sprintf("%s %+v", ledger.ReasonConflict, one))
			}
		}
		slices.Sort(aside)
		want := ledger.NewContentHash()
		for q := range 2 {
			want.Bucket(buckets[at(q).Unix()])
		}

		path := filepath.Join(t.TempDir(), "ledger.db")
		var replicas []*sqlite.Store
		for range 2 {
			store, err := sqlite.Open(context.Background(), path)
			if err != nil {
				t.Fatal(err)
			}
			defer store.Close() // not at the test's end: looking for a smaller counterexample opens thousands
			replicas = append(replicas, store)
		}
		order := rapid.Permutation(append(slices.Clone(rows), rows[:len(rows)/2]...)).Draw(r, "order")
		var inserted int64
		for i := 0; len(order) > 0; i++ {
			n := rapid.IntRange(1, len(order)).Draw(r, "batch")
			inserted += insert(t, replicas[i%2], order[:n]...).Inserted
			order = order[n:]
		}
		if inserted < int64(len(byKey)) {
			r.Fatalf("%d rows were inserted of %d keys", inserted, len(byKey))
		}
		got := audit(t, replicas[0])
		if got.ContentHash != want.String() || got.Rows != int64(len(byKey)) {
			r.Fatalf("%d rows %s, want %d rows %s", got.Rows, got.ContentHash, len(byKey), want.String())
		}
		if diff := cmp.Diff(aside, kept(t, replicas[1])); diff != "" {
			r.Fatalf("quarantine (-want +got):\n%s", diff)
		}
	})
}

// A contradiction names what differs, and where each row came from.
func TestConflictNamesTheDifference(t *testing.T) {
	store := openNew(t)
	ctx := context.Background()
	small, large := row("gpu01", "r", "GPU-a", start, 300), row("gpu02", "r", "GPU-a", start, 900)
	for source, one := range map[string]usage.Row{"first": small, "second": large} {
		if _, err := store.Insert(ctx, ledger.Batch{Source: source, Rows: []usage.Row{one}}, later); err != nil {
			t.Fatal(err)
		}
	}
	list, _, err := store.Quarantined(ctx, ledger.Span{}, 10)
	if err != nil || len(list) != 1 {
		t.Fatal(list, err)
	}
	if q := list[0]; q.Source != "first" || q.Node != "gpu01" || !strings.HasSuffix(q.Detail, "in node, amounts") {
		t.Errorf("%+v", q)
	}
}

// A row that came too early, or from the wrong target, leaves the quarantine
// when it is let in later.
func TestLetInLater(t *testing.T) {
	store := openNew(t)
	ctx := context.Background()
	early := row("gpu01", "r", "GPU-a", at(20), 900)
	foreign := row("gpu02", "r2", "GPU-b", at(0), 900)
	page := ledger.Page{Batch: ledger.Batch{Source: "http://gpu01", Rows: []usage.Row{row("gpu01", "r", "GPU-a", at(0), 900), early, foreign}}, Cursor: "1"}
	if result, err := store.InsertPage(ctx, page, at(1)); err != nil || result != (ledger.Result{Inserted: 1, Quarantined: 2}) {
		t.Fatalf("%+v, %v", result, err)
	}
	for _, step := range []struct {
		row  usage.Row
		now  time.Time
		left int
	}{{early, at(2), 2}, {early, at(21), 1}, {foreign, at(21), 0}} {
		if _, err := store.Insert(ctx, ledger.Batch{Source: "file", Rows: []usage.Row{step.row}}, step.now); err != nil {
			t.Fatal(err)
		}
		if got := kept(t, store); len(got) != step.left {
			t.Errorf("%d rows in quarantine, want %d: %v", len(got), step.left, got)
		}
	}
	if got := audit(t, store); got.Rows != 3 {
		t.Errorf("%d rows", got.Rows)
	}
}
