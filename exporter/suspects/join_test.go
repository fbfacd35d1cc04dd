package suspects

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

func TestFindingsJoined(t *testing.T) {
	fs, pid := realProc(t), grandchild(t)
	handle, err := fs.Process(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	stat, err := handle.Stat()
	if err != nil {
		t.Fatal(err)
	}
	key := meter.ProcessKey{PID: pid, StartTicks: stat.StartTicks}
	open := Suspect{Key: key, Reason: ReasonDeviceOpen, Strength: Strong, Why: "has it"}
	watches := Suspect{Key: meter.ProcessKey{PID: 1, StartTicks: 1}, Reason: ReasonMonitor, Strength: None}
	table := holders.New(holders.Options{FS: fs})
	defer table.Close()
	of := func(f *Findings, listed ...uint32) ([]snapshot.Suspect, snapshot.Search, bool) {
		return f.Of("GPU-a", card(0, listed...).Listed, table)
	}
	found := &Findings{Whole: true, Cards: map[string]Finding{"GPU-a": {Suspects: []Suspect{open, watches}}}}

	joined, search, _ := of(found)
	if search.Verdict != snapshot.SearchFound || len(joined) != 2 || !joined[0].Pending || joined[0].Monitor || !joined[1].Monitor {
		t.Errorf("before it was read: %+v, %+v", joined, search)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); table.Run(ctx) }()
	defer func() { cancel(); <-done }()
	table.Ask(found.Keys())
	var ended bool
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		table.Refresh(t.Context(), gpu.Pass{})
		if joined, search, ended = of(found); !joined[0].Pending || time.Now().After(deadline) {
			break
		}
	}
	if search.Verdict != snapshot.SearchFound || ended || joined[0].Pending || joined[0].Command != "sleep" || joined[0].PID != pid || joined[0].Why != "has it" {
		t.Errorf("%+v, %+v", joined, search)
	}
	if joined, search, _ = of(found, pid); search.Verdict != snapshot.SearchNobody || len(joined) != 1 {
		t.Errorf("NVML lists it by now: %+v, %+v", joined, search)
	}
	for name, test := range map[string]struct {
		findings *Findings
		want     string
	}{
		"before the first":  {nil, snapshot.SearchLooking},
		"of other cards":    {&Findings{Whole: true}, snapshot.SearchLooking},
		"not whole":         {&Findings{Cards: map[string]Finding{"GPU-a": {}}}, snapshot.SearchLooking},
		"nobody":            {&Findings{Whole: true, Cards: map[string]Finding{"GPU-a": {}}}, snapshot.SearchNobody},
		"nobody to be seen": {&Findings{Whole: true, Hidden: 1, Cards: map[string]Finding{"GPU-a": {}}}, snapshot.SearchHidden},
		"hidepid":           {&Findings{Whole: true, HidePID: true, Cards: map[string]Finding{"GPU-a": {}}}, snapshot.SearchHidden},
		"no walk":           {Unable([]Card{card(1)}, unix.EIO), snapshot.SearchFailed},
	} {
		if joined, search, ended := of(test.findings); search.Verdict != test.want || len(joined) != 0 || ended {
			t.Errorf("%s: %+v, %+v, want %q", name, joined, search, test.want)
		}
	}

	if err := unix.Kill(int(pid), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); ; {
		table.Refresh(t.Context(), gpu.Pass{})
		joined, search, ended = of(found)
		if ended {
			break // its shell has reaped it
		}
		if time.Now().After(deadline) {
			t.Fatal("its end is not noticed")
		}
	}
	if search.Verdict != snapshot.SearchLooking || len(joined) != 1 {
		t.Errorf("after its end: %+v, %+v", joined, search)
	}
}
