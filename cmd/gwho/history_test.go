package main

import (
	"context"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"gpuledger/exporter/history"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/usage"
)

// pastOf is the history of a journal in which this test's user and alice held
// cards in the last hours, and in which some time is missing.
func pastOf(ts *testscript.TestScript) http.Handler {
	dir := ts.MkAbs("journal")
	j, err := journal.Open(context.Background(), journal.Options{Dir: dir, LockPath: filepath.Join(dir, "lock"), Node: "gpu01"})
	ts.Check(err)
	ts.Defer(func() { ts.Check(j.Close(context.Background(), journal.Batch{})) })
	now := time.Now().UTC()
	newest := now.Truncate(usage.BucketLength)
	var rows, open []usage.Row
	for back := range 12 {
		bucket := newest.Add(-time.Duration(back) * usage.BucketLength)
		us := min(usage.BucketLength, now.Sub(bucket)).Microseconds()
		add := func(index int, user string, uid int64, workload string) {
			row := usage.Row{
				Key:  usage.Key{Run: "r1", Device: []string{"GPU-00000000", "GPU-11111111"}[index], Slices: 1, Of: 1, Bucket: bucket, State: usage.StateIdle, UID: -1},
				Node: "gpu01", Index: index, Model: "NVIDIA H200", Amounts: usage.Amounts{GPUUS: us, ShareUS: us, EnergyMJ: 3_600_000},
			}
			row.Card = row.Device
			if user != "" {
				row.State, row.User, row.UID, row.Kind, row.Workload, row.AttributedBy = usage.StateHeld, user, uid, "docker", workload, "label"
				row.HeldUS, row.ActiveUS, row.ActiveKnownUS, row.MemoryKnownUS, row.PeakMemoryBytes = us, us/2, us, us, 4<<30
			}
			if back == 0 {
				open = append(open, row)
			} else {
				rows = append(rows, row)
			}
		}
		switch {
		case back < 4:
			add(0, "me", int64(os.Getuid()), "training")
		case back < 6:
			add(0, "", 0, "")
		default:
			add(0, "alice", 424242, "secret")
		}
		if back != 2 { // nothing is known of card 1 there
			add(1, "", 0, "")
		}
	}
	ts.Check(j.Write(context.Background(), journal.Batch{Final: rows, Open: open, InstantUS: now.UnixMicro(), OpenFrom: newest}))
	handler := history.Handler(j.Back, "gpu01", nil, slog.New(slog.DiscardHandler))
	if os.Geteuid() != 0 {
		return handler
	}
	// Root would be told all; what others see is what is to be tried.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		handler.ServeHTTP(w, r.WithContext(history.WithReader(r.Context(), history.Reader{UID: 0, Known: true})))
	})
}

func TestHistoryTableGolden(t *testing.T) {
	zone := time.FixedZone("CST", 8*60*60)
	at := func(text string) time.Time {
		parsed, err := time.Parse("2006-01-02 15:04:05", text)
		if err != nil {
			t.Fatal(err)
		}
		return parsed
	}
	uid := int64(1001)
	hours := func(h float64) int64 { return int64(h * 3600e6) }
	begins := at("2026-10-01 00:00:00")
	a := history.Answer{
		Version: 1, Node: "gpu01", AnsweredAt: at("2026-11-03 08:20:12"), From: at("2026-10-28 08:15:00"), To: at("2026-11-03 08:20:07"), JournalBegins: &begins,
		BucketSeconds: 900, Missing: []history.Missing{},
		Cards: []history.Card{
			{Index: 0, UUID: "GPU-aaaa", Model: "NVIDIA H200", Stretches: []history.Stretch{
				{Device: "GPU-aaaa", State: "held", User: "alice", UID: &uid, Kind: "docker", From: at("2026-11-03 06:00:00"), To: at("2026-11-03 08:20:07"), Detail: &history.Detail{
					Workload: "train\x1b[31m", Project: "vision", AttributedBy: "label", Estimated: true, PeakMemoryBytes: 9 << 30,
					Amounts: usage.Amounts{ShareUS: hours(1.2), HeldUS: hours(2.1), ActiveUS: hours(1.5), ActiveKnownUS: hours(2.1), IdleUS: hours(0.2), MemoryKnownUS: 1, EnergyMJ: 3_000_000_000}}},
				{Device: "GPU-aaaa", State: "held", User: "张伟", Kind: "host", From: at("2026-11-03 07:00:00"), To: at("2026-11-03 08:20:07")},
				{Device: "GPU-aaaa", State: "unobserved", From: at("2026-11-01 05:45:00"), To: at("2026-11-01 06:15:00"), Detail: &history.Detail{Amounts: usage.Amounts{ShareUS: hours(0.3)}}},
				{Device: "GPU-aaaa", State: "unobserved", From: at("2026-11-01 04:45:00"), To: at("2026-11-01 05:00:00"), Detail: &history.Detail{Amounts: usage.Amounts{ShareUS: 900_000}}},
				{Device: "GPU-aaaa", State: "idle", From: at("2026-10-28 08:15:00"), To: at("2026-11-03 06:15:00"), Detail: &history.Detail{Amounts: usage.Amounts{ShareUS: hours(140), EnergyMJ: 50_000_000_000}}},
			}},
			{Index: 1, UUID: "GPU-bbbb", Model: "NVIDIA H200", Stretches: []history.Stretch{
				{Device: "MIG-cccc", Profile: "3g.71gb", Slices: 3, Of: 7, State: "held", User: "bob", Kind: "slurm", From: at("2026-11-03 06:00:00"), To: at("2026-11-03 08:20:07"), Detail: &history.Detail{
					Workload: "4711", Amounts: usage.Amounts{ShareUS: hours(0.1), HeldUS: hours(0.1)}}},
				{Device: "GPU-bbbb", Slices: 4, Of: 7, State: "idle", From: at("2026-10-28 08:15:00"), To: at("2026-11-03 08:20:07"), Detail: &history.Detail{Amounts: usage.Amounts{ShareUS: hours(144)}}},
				{Device: "GPU-bbbb", Slices: 1, Of: 1, State: "down", From: at("2026-10-28 08:15:00"), To: at("2026-10-28 08:30:00"), Detail: &history.Detail{Amounts: usage.Amounts{ShareUS: hours(0.25)}}},
			}},
		},
	}
	for variant, o := range map[string]tableOptions{
		"piped": {Zone: zone}, "verbose": {Zone: zone, Verbose: true}, "narrow": {Zone: zone, Width: 72, Colour: true},
	} {
		got := historyTable(a, o)
		path := filepath.Join("testdata", "tables", "history."+variant)
		if *update {
			if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err, "; make it with -update")
		}
		if diff := cmp.Diff(string(want), got); diff != "" {
			t.Errorf("%s: %s", variant, diff)
		}
	}
	lagging := a
	lagging.Missing = []history.Missing{{What: history.MissingNewer, Message: "an hour is missing"}}
	if text := historyTable(lagging, tableOptions{Zone: zone}); !strings.Contains(text, "\n! an hour is missing\n") || strings.Contains(text, "now") {
		t.Errorf("a journal that lags:\n%s", text)
	}
	if text := historyTable(history.Answer{Node: "gpu01", BucketSeconds: 900}, tableOptions{Zone: zone}); !strings.Contains(text, "nothing is written down yet") {
		t.Errorf("an empty journal:\n%s", text)
	}
}
