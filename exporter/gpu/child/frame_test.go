package child

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/exporter/gpu"
)

// somePass draws a pass with all the shapes a pass may have.
func somePass(t *rapid.T) gpu.Pass {
	text := rapid.StringN(0, 8, 32)
	optional := func(name string) gpu.Optional[uint64] {
		if rapid.Bool().Draw(t, name+" known") {
			return gpu.Some(rapid.Uint64().Draw(t, name))
		}
		return gpu.Optional[uint64]{}
	}
	pass := gpu.Pass{
		At:    gpu.Instant{MonotonicUS: rapid.Int64().Draw(t, "monotonic"), WallUS: rapid.Int64().Draw(t, "wall")},
		Error: text.Draw(t, "error"), Expected: rapid.IntRange(0, 16).Draw(t, "expected"),
	}
	for range rapid.IntRange(0, 3).Draw(t, "cards") {
		reading := gpu.Reading{
			Card: gpu.Card{UUID: text.Draw(t, "uuid"), Index: rapid.IntRange(0, 7).Draw(t, "index"), MIGMode: gpu.Some(rapid.Bool().Draw(t, "mig"))},
			At:   pass.At, State: gpu.State(rapid.IntRange(0, 2).Draw(t, "state")), Reason: text.Draw(t, "reason"),
			SamplesKnown: rapid.Bool().Draw(t, "samples known"), TemperatureC: gpu.Some(rapid.Int64Range(-50, 200).Draw(t, "temperature")),
			MemoryTotalBytes: optional("memory"),
		}
		for range rapid.IntRange(0, 3).Draw(t, "processes") {
			reading.Processes = append(reading.Processes, gpu.Process{PID: rapid.Uint32().Draw(t, "pid"), Compute: rapid.Bool().Draw(t, "compute"), MemoryBytes: optional("used")})
		}
		if rapid.Bool().Draw(t, "instance") {
			reading.Instances = []gpu.Instance{{UUID: text.Draw(t, "mig uuid"), Slices: 2, Processes: reading.Processes}}
		}
		if rapid.Bool().Draw(t, "ecc") {
			reading.ECCErrors = map[string]int64{"corrected": 0, "uncorrected": rapid.Int64().Draw(t, "errors")}
		}
		pass.Readings = append(pass.Readings, reading)
	}
	return pass
}

func TestPassesComeOutAsTheyWentIn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		passes := rapid.SliceOfN(rapid.Custom(somePass), 0, 4).Draw(t, "passes")
		var wire bytes.Buffer
		out := newEncoder(&wire)
		for i := range passes {
			if err := out.encode(&passes[i]); err != nil {
				t.Fatal(err)
			}
		}
		in := newDecoder(&wire)
		for i := range passes {
			got, err := in.decode()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(passes[i], got); diff != "" {
				t.Fatal(diff)
			}
		}
		if _, err := in.decode(); err != io.EOF {
			t.Fatalf("after the last: %v", err)
		}
	})
}

func oneFrame(t testing.TB) []byte {
	var wire bytes.Buffer
	pass := gpu.Pass{Error: "x", Readings: []gpu.Reading{{Card: gpu.Card{UUID: "GPU-1"}, Processes: []gpu.Process{{PID: 1}}}}}
	if err := newEncoder(&wire).encode(&pass); err != nil {
		t.Fatal(err)
	}
	return wire.Bytes()
}

// Any change of any byte is an error, and any cut is one, but for the cut at
// the end or the beginning.
func TestDamageIsAnError(t *testing.T) {
	frame := oneFrame(t)
	for at := range frame {
		damaged := bytes.Clone(frame)
		damaged[at] ^= 0x10
		if _, err := newDecoder(bytes.NewReader(damaged)).decode(); err == nil {
			t.Errorf("byte %d changed, and no error", at)
		}
		_, err := newDecoder(bytes.NewReader(frame[:at])).decode()
		if err == nil || at > headerBytes && err == io.EOF {
			t.Errorf("cut at %d: %v", at, err)
		}
	}
}

func TestGarbageCostsNoMemory(t *testing.T) {
	header := func(length uint32) []byte {
		h := make([]byte, headerBytes)
		binary.LittleEndian.PutUint32(h, magic)
		binary.LittleEndian.PutUint32(h[4:], length)
		return h
	}
	for name, garbage := range map[string]io.Reader{
		"text":           strings.NewReader(strings.Repeat("no such device\n", 100)),
		"too long":       bytes.NewReader(header(MaxPassBytes + 1)),
		"longest":        bytes.NewReader(header(1<<32 - 1)),
		"promise broken": bytes.NewReader(header(MaxPassBytes)),
		"empty frame":    bytes.NewReader(header(0)),
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := newDecoder(garbage).decode()
		runtime.ReadMemStats(&after)
		if err == nil || err == io.EOF {
			t.Errorf("%s: %v", name, err)
		}
		if name != "promise broken" && !errors.Is(err, ErrGarbage) {
			t.Errorf("%s: %v is not ErrGarbage", name, err)
		}
		if took := after.TotalAlloc - before.TotalAlloc; took > 1<<20 {
			t.Errorf("%s: took %d bytes", name, took)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(oneFrame(f))
	f.Fuzz(func(t *testing.T, wire []byte) {
		in := newDecoder(bytes.NewReader(wire))
		for {
			if _, err := in.decode(); err != nil {
				return
			}
		}
	})
}

func TestTooLargeAPassIsAnError(t *testing.T) {
	pass := gpu.Pass{Error: strings.Repeat("x", MaxPassBytes+1)}
	if err := newEncoder(io.Discard).encode(&pass); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("%v", err)
	}
}

// BenchmarkWire is the cost of a pass on its way through the pipe.
func BenchmarkWire(b *testing.B) {
	for _, processes := range []int{25, 200} {
		pass := gpu.Pass{Expected: 8}
		for card := range 8 {
			reading := gpu.Reading{Card: gpu.Card{UUID: fmt.Sprintf("GPU-%036d", card), Index: card, Name: "NVIDIA H200"}, SamplesKnown: true}
			for pid := range processes {
				reading.Processes = append(reading.Processes, gpu.Process{PID: uint32(100_000 + pid), Compute: true, MemoryBytes: gpu.Some[uint64](1 << 30)})
				reading.Samples = append(reading.Samples, gpu.Sample{PID: uint32(100_000 + pid), SM: 1, TimestampUS: 1 << 50})
			}
			pass.Readings = append(pass.Readings, reading)
		}
		b.Run(fmt.Sprintf("encode 8x%d", processes), func(b *testing.B) {
			out := newEncoder(io.Discard)
			for b.Loop() {
				if err := out.encode(&pass); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(out.frame.Len()), "wire-bytes")
		})
		b.Run(fmt.Sprintf("decode 8x%d", processes), func(b *testing.B) {
			r, w := io.Pipe()
			go func() {
				out := newEncoder(w)
				for out.encode(&pass) == nil {
				}
			}()
			defer r.Close()
			in := newDecoder(r)
			for b.Loop() {
				if _, err := in.decode(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
