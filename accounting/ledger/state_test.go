package ledger_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

func state(gpu, energy, peak int64) usage.Row {
	return usage.Row{
		Key: usage.Key{
			Run: "r", Device: "GPU-a", Slices: 1, Of: 1, Bucket: time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC),
			State: usage.StateHeld, User: "alice", UID: 1001, Kind: "host",
		},
		Seq: 1, Node: "gpu01", Card: "GPU-a", Model: "NVIDIA H200", AttributedBy: "user_slice",
		Amounts: usage.Amounts{GPUUS: gpu, EnergyMJ: energy}, PeakMemoryBytes: peak,
	}
}

func TestEarlierState(t *testing.T) {
	with := func(row usage.Row, change func(*usage.Row)) usage.Row {
		change(&row)
		return row
	}
	base := state(300, 30, 5)
	for name, test := range map[string]struct {
		later usage.Row
		want  bool
	}{
		"all grew":                 {state(900, 90, 9), true},
		"one grew":                 {state(300, 31, 5), true},
		"a peak grew":              {state(300, 30, 6), true},
		"the same":                 {base, false},
		"elsewhere in the journal": {with(base, func(r *usage.Row) { r.Seq = 9 }), false},
		"one shrank":               {state(900, 29, 9), false},
		"grew, estimated":          {with(state(900, 90, 9), func(r *usage.Row) { r.Estimated = true }), true},
		"grew, another step":       {with(state(900, 90, 9), func(r *usage.Row) { r.AttributedBy = "label" }), true},
		"review only":              {with(base, func(r *usage.Row) { r.Review = true }), true},
		"review, another step":     {with(base, func(r *usage.Row) { r.Review, r.AttributedBy = true, "label" }), false},
		"grew, review":             {with(state(900, 90, 9), func(r *usage.Row) { r.Review = true }), true},
		"another step only":        {with(base, func(r *usage.Row) { r.AttributedBy = "label" }), false},
		"another node":             {with(state(900, 90, 9), func(r *usage.Row) { r.Node = "gpu02" }), false},
		"another card":             {with(state(900, 90, 9), func(r *usage.Row) { r.Card = "GPU-b" }), false},
		"another index":            {with(state(900, 90, 9), func(r *usage.Row) { r.Index = 1 }), false},
		"another model":            {with(state(900, 90, 9), func(r *usage.Row) { r.Model = "x" }), false},
		"another profile":          {with(state(900, 90, 9), func(r *usage.Row) { r.Profile = "x" }), false},
	} {
		if got := ledger.EarlierState(&base, &test.later); got != test.want {
			t.Errorf("%s: %v", name, got)
		}
		if ledger.EarlierState(&test.later, &base) {
			t.Errorf("%s: the other way round too", name)
		}
	}
	estimated := with(base, func(r *usage.Row) { r.Estimated = true })
	if later := state(900, 90, 9); ledger.EarlierState(&estimated, &later) {
		t.Error("what was estimated is so no more")
	}
	reviewed := with(base, func(r *usage.Row) { r.Review = true })
	if later := state(900, 90, 9); ledger.EarlierState(&reviewed, &later) {
		t.Error("what needed review does so no more")
	}
}

// drawStates are rows of one key, from so few values that many are states of
// each other and many contradict each other.
func drawStates(t *rapid.T) []usage.Row {
	number := rapid.Int64Range(0, 3)
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) usage.Row {
		row := state(number.Draw(t, "gpu"), number.Draw(t, "energy"), number.Draw(t, "peak"))
		row.Estimated = rapid.Bool().Draw(t, "estimated")
		row.Review = rapid.Bool().Draw(t, "review")
		row.AttributedBy = rapid.SampledFrom([]string{"label", "user_slice"}).Draw(t, "attributed_by")
		row.Node = rapid.SampledFrom([]string{"gpu01", "gpu01", "gpu01", "gpu02"}).Draw(t, "node")
		return row
	}), 1, 8).Draw(t, "rows")
}

// However rows are ordered, and however many times the question is put on the
// way: the same row is counted and the same ones contradict it, and each row
// that is neither is an earlier state of one that is.
func TestSettleInAnyOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := drawStates(t)
		counted, aside := ledger.Settle(rows)
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		shuffled := slices.Clone(rows)
		random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
		got, gotAside := ledger.Settle(shuffled[:1])
		for _, row := range shuffled[1:] {
			got, gotAside = ledger.Settle(append([]usage.Row{row, got}, gotAside...))
		}
		if diff := cmp.Diff(counted, got); diff != "" {
			t.Fatalf("counted (-all at once +one by one):\n%s", diff)
		}
		if diff := cmp.Diff(aside, gotAside); diff != "" {
			t.Fatalf("aside (-all at once +one by one):\n%s", diff)
		}
		stand := append([]usage.Row{counted}, aside...)
		for _, row := range rows {
			if !slices.ContainsFunc(stand, func(s usage.Row) bool { return s == row || ledger.EarlierState(&row, &s) }) {
				t.Fatalf("%+v vanished", row)
			}
		}
		for i := range stand {
			for j := range stand {
				if i != j && (stand[i] == stand[j] || ledger.EarlierState(&stand[i], &stand[j])) {
					t.Fatalf("%+v and %+v both stand", stand[i], stand[j])
				}
			}
		}
	})
}

// A row of a run only grows: whichever states of it come, in whatever order,
// the last one is counted and nothing is in the way.
func TestSettleStatesOfOneRow(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		row := state(0, 0, 0)
		states := []usage.Row{row}
		for range rapid.IntRange(1, 6).Draw(t, "steps") {
			row.GPUUS += rapid.Int64Range(1, 5).Draw(t, "gpu")
			row.EnergyMJ += rapid.Int64Range(0, 5).Draw(t, "energy")
			row.PeakMemoryBytes = max(row.PeakMemoryBytes, rapid.Int64Range(0, 5).Draw(t, "peak"))
			row.Estimated = row.Estimated || rapid.Bool().Draw(t, "estimated")
			row.Review = row.Review || rapid.Bool().Draw(t, "review")
			row.AttributedBy = rapid.SampledFrom([]string{"label", "user_slice"}).Draw(t, "attributed_by")
			states = append(states, row)
		}
		counted, aside := ledger.Settle(rapid.Permutation(states).Draw(t, "order"))
		if counted != row || len(aside) > 0 {
			t.Fatalf("counted %+v, aside %v, want %+v", counted, aside, row)
		}
	})
}

// Rows that need no review have the hash that they had before there was such a
// mark, whatever stands beside them, and a mark is seen.
func TestReviewInTheContentHash(t *testing.T) {
	marked := state(2, 2, 2)
	marked.Run = "s"
	hash := func(rows ...usage.Row) string {
		h := ledger.NewContentHash()
		h.Bucket(rows)
		return h.String()
	}
	before := hash(state(1, 1, 1), marked)
	const was = "sha256:60fc0daf98e84eea036d42dc4ce2ab0cd52631a8116ca8c406e5cf7f5ebe3bd7"
	if before != was {
		t.Errorf("the hash of rows without a mark is %s, was %s", before, was)
	}
	marked.Review = true
	if hash(state(1, 1, 1), marked) == before {
		t.Error("the mark is not in the hash")
	}
}

func TestKeyDigestSeesEveryField(t *testing.T) {
	base := state(1, 1, 1).Key
	seen := map[[32]byte]string{ledger.KeyDigest(&base): "the key itself"}
	for name, change := range map[string]func(*usage.Key){
		"run": func(k *usage.Key) { k.Run += "x" }, "device": func(k *usage.Key) { k.Device += "x" },
		"slices": func(k *usage.Key) { k.Slices++ }, "of": func(k *usage.Key) { k.Of++ },
		"bucket": func(k *usage.Key) { k.Bucket = k.Bucket.Add(usage.BucketLength) }, "state": func(k *usage.Key) { k.State += "x" },
		"user": func(k *usage.Key) { k.User += "x" }, "uid": func(k *usage.Key) { k.UID++ }, "kind": func(k *usage.Key) { k.Kind += "x" },
		"workload": func(k *usage.Key) { k.Workload += "x" }, "project": func(k *usage.Key) { k.Project += "x" }, "class": func(k *usage.Key) { k.Class += "x" },
		"text borders": func(k *usage.Key) { k.Workload, k.Project = "ab", "c" }, "text borders too": func(k *usage.Key) { k.Workload, k.Project = "a", "bc" },
	} {
		changed := base
		change(&changed)
		digest := ledger.KeyDigest(&changed)
		if other, ok := seen[digest]; ok {
			t.Errorf("%s and %s have one digest", name, other)
		}
		seen[digest] = name
	}
	elsewhere := base
	elsewhere.Bucket = base.Bucket.In(time.FixedZone("east", 8*3600))
	if ledger.KeyDigest(&elsewhere) != ledger.KeyDigest(&base) {
		t.Error("the same instant in another zone has another digest")
	}
}
