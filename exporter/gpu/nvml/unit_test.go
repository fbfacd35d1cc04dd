package nvml

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
)

func TestTakeSymbols(t *testing.T) {
	lacking := func(missing ...string) func(string) bool {
		return func(symbol string) bool { return !slices.Contains(missing, symbol) }
	}
	const v1, v2, v3 = "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"
	const f = fnGetComputeRunningProcesses
	all := takeSymbols(lacking(), nil)
	for _, test := range []struct {
		name    string
		missing []string
		before  *symbols
		want    bool
	}{
		{"all there", nil, nil, true},
		{"newest missing", []string{v3}, nil, true},
		{"oldest missing: it is not called", []string{v1}, nil, true},
		{"only the oldest there", []string{v2, v3}, nil, true},
		{"none there", []string{v1, v2, v3}, nil, false},
		{"newest went away: go-nvml would still call it", []string{v3}, all, false},
		{"nothing went away", []string{v1, v2}, all, true},
	} {
		if got := takeSymbols(lacking(test.missing...), test.before).callable[f]; got != test.want {
			t.Errorf("%s: callable %v, want %v", test.name, got, test.want)
		}
	}
}

func TestNothingIsCallableBeforeLoading(t *testing.T) {
	l := newLibrary("/nonexistent")
	if ret := l.init(); ret != gonvml.ERROR_FUNCTION_NOT_FOUND {
		t.Errorf("init without a library: %d", ret)
	}
	if err := l.open(); err == nil || !strings.Contains(err.Error(), "/nonexistent") {
		t.Errorf("open: %v", err)
	}
}

func TestBrokenProcessLists(t *testing.T) {
	v3 := &symbols{processesV3: true}
	details := &symbols{processesV3: true, processDetails: true}
	for _, test := range []struct {
		have         *symbols
		driver, nvml string
		broken       bool
	}{
		{v3, "535.54.03", "", true}, {v3, "535.86.10", "", true}, {&symbols{}, "535.98", "", false}, {details, "535.104.05", "", false},
		{v3, "510.39", "", false}, {v3, "530.30.02", "", false}, {details, "550.54", "", false}, {&symbols{}, "470.1", "", false},
		{v3, "", "12.535.54.03", true}, {v3, "", "11.510.39", false}, {v3, "", "", true},
	} {
		if got := brokenProcessLists(test.have, test.driver, test.nvml); (got != "") != test.broken {
			t.Errorf("%+v %q %q: %q, want broken %v", *test.have, test.driver, test.nvml, got, test.broken)
		}
	}
}

// Whatever is listed, each PID comes out once, in order, on every list it was
// on, and with no more memory than it had on one of them.
func TestMerge(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		listed := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) listedProcess {
			p := listedProcess{
				pid: rapid.Uint32Range(1, 6).Draw(t, "pid"), compute: rapid.Bool().Draw(t, "c"), graphics: rapid.Bool().Draw(t, "g"), mps: rapid.Bool().Draw(t, "m"),
			}
			if rapid.Bool().Draw(t, "known") {
				p.memory = gpu.Some(rapid.Uint64Range(0, 9).Draw(t, "memory"))
			}
			return p
		}), 0, 12).Draw(t, "listed")
		merged := merge(slices.Clone(listed))
		if !slices.IsSortedFunc(merged, func(a, b gpu.Process) int { return cmp.Compare(a.PID, b.PID) }) {
			t.Fatalf("not in order: %v", merged)
		}
		for pid := uint32(1); pid <= 6; pid++ {
			var want gpu.Process
			for _, p := range listed {
				if p.pid != pid {
					continue
				}
				want.PID = pid
				want.Compute = want.Compute || p.compute
				want.Graphics = want.Graphics || p.graphics
				want.MPS = want.MPS || p.mps
				if p.memory.Known {
					want.MemoryBytes = gpu.Some(max(want.MemoryBytes.Value, p.memory.Value))
				}
			}
			count := 0
			for _, got := range merged {
				if got.PID == pid {
					count++
					if got != want {
						t.Fatalf("%+v, want %+v", got, want)
					}
				}
			}
			if count > 1 || (count == 1) != (want.PID != 0) {
				t.Fatalf("PID %d is there %d times", pid, count)
			}
		}
	})
}

// No sample is believed twice, and none that can't be at all.
func TestFilterSamples(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := &cardReader{}
		lastSeen := rapid.Uint64Range(0, 50).Draw(t, "last seen")
		raw := rapid.SliceOf(rapid.Custom(func(t *rapid.T) gonvml.ProcessUtilizationSample {
			return gonvml.ProcessUtilizationSample{
				Pid: rapid.Uint32Range(0, 5).Draw(t, "pid"), TimeStamp: rapid.Uint64Range(0, 200).Draw(t, "time"), SmUtil: rapid.Uint32Range(0, 120).Draw(t, "sm"),
			}
		})).Draw(t, "raw")
		kept, newest := c.filterSamples(raw, lastSeen, 100)
		want := lastSeen
		for _, s := range kept {
			if s.SM > 100 || s.PID == 0 || s.TimestampUS <= lastSeen || s.TimestampUS > 100 {
				t.Fatalf("kept %+v", s)
			}
			want = max(want, s.TimestampUS)
		}
		if newest != want {
			t.Fatalf("newest %d, want %d", newest, want)
		}
		unused := 0
		for _, s := range raw {
			if s.Pid == 0 && s.TimeStamp == 0 {
				unused++
			}
		}
		dropped := c.dropping["process_utilization"] + c.dropping["process_utilization_old"]
		if int64(len(kept)+unused)+dropped != int64(len(raw)) {
			t.Fatalf("%d kept, %d dropped, %d unused of %d", len(kept), dropped, unused, len(raw))
		}
		if again, _ := c.filterSamples(raw, newest, 100); len(again) != 0 {
			t.Fatalf("taken twice: %v", again)
		}
	})
}

// A clock put back must not make every new sample look old.
func TestClockPutBackForgetsSamples(t *testing.T) {
	r, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	seen := sampleMark{lastSeen: 1_000_000, taken: true}
	r.cards["GPU-1"] = &card{samples: seen}
	at := gpu.Instant{MonotonicUS: 5_000_000, WallUS: 50_000_000}
	r.watchClock(at)
	at.MonotonicUS, at.WallUS = at.MonotonicUS+1_000_000, at.WallUS+999_000
	r.watchClock(at) // the clock is slewed
	if r.cards["GPU-1"].samples != seen {
		t.Error("forgotten without reason")
	}
	at.MonotonicUS, at.WallUS = at.MonotonicUS+1_000_000, at.WallUS-10_000_000
	r.watchClock(at)
	if r.cards["GPU-1"].samples != (sampleMark{}) {
		t.Error("remembered though the clock was put back")
	}
}

func TestProfileNames(t *testing.T) {
	attributes := gonvml.DeviceAttributes{GpuInstanceSliceCount: 3, ComputeInstanceSliceCount: 3, MemorySizeMB: 40192}
	part := attributes
	part.ComputeInstanceSliceCount = 1
	for _, test := range []struct {
		name       string
		attributes gonvml.DeviceAttributes
		want       string
	}{
		{"NVIDIA A100-SXM4-80GB MIG 3g.40gb", attributes, "3g.40gb"}, {"NVIDIA H100 MIG 1c.3g.40gb", part, "1c.3g.40gb"}, {"", attributes, "3g.39gb"},
		{"NVIDIA A100", part, "1c.3g.39gb"},
	} {
		if got := profile(test.name, test.attributes); got != test.want {
			t.Errorf("%q: %q, want %q", test.name, got, test.want)
		}
	}
}

func TestFieldInt(t *testing.T) {
	field := func(kind gonvml.ValueType, value uint64) gonvml.FieldValue {
		f := gonvml.FieldValue{ValueType: uint32(kind)}
		binary.NativeEndian.PutUint64(f.Value[:], value)
		return f
	}
	for _, test := range []struct {
		field gonvml.FieldValue
		want  int64
		known bool
	}{
		{field(gonvml.VALUE_TYPE_UNSIGNED_INT, 77), 77, true}, {field(gonvml.VALUE_TYPE_SIGNED_INT, 0xFFFFFFFB), -5, true},
		{field(gonvml.VALUE_TYPE_UNSIGNED_LONG_LONG, 1<<40), 1 << 40, true}, {field(gonvml.VALUE_TYPE_DOUBLE, 0x4053400000000000), 77, true},
		{field(gonvml.VALUE_TYPE_DOUBLE, 0x7FF8000000000000), 0, false}, {field(99, 1), 0, false},
	} {
		if got, known := fieldInt(test.field); got != test.want || known != test.known {
			t.Errorf("%+v: %d %v, want %d %v", test.field, got, known, test.want, test.known)
		}
	}
}

func TestPrintable(t *testing.T) {
	if got := printable("NVIDIA \xff\x00H200\n\x1b[31m"); got != "NVIDIA \uFFFD H200  [31m" {
		t.Errorf("%q", got)
	}
}

func TestOpenRefusesBadOptions(t *testing.T) {
	for _, options := range []Options{{Interval: -1}, {Interval: time.Microsecond}, {Deadline: -1}} {
		if _, err := Open(options); err == nil {
			t.Errorf("%+v: no error", options)
		}
	}
}
