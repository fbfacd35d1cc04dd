package nvml

import (
	"errors"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// sampleMark is how far the per-process samples of a card have been taken. It
// moves on only with readings that were delivered, so that the samples of a
// reading that came too late are in the next one.
type sampleMark struct {
	// lastSeen is the newest timestamp the driver has returned, on its own
	// clock, 0 while it has returned none.
	lastSeen uint64
	// taken is false until a reading has looked at the samples: what the first
	// one finds reaches back to before it.
	taken bool
}

const (
	// sampleAttempts bounds the retries when the set of samples grows between
	// the two calls that fetching them takes.
	sampleAttempts = 5
	// mostAheadUS is how far a sample may be ahead of the wall clock. Drivers
	// stamp samples with the wall clock or with the time since boot, so one
	// from the far future is garbage, and believing it would hide all others.
	mostAheadUS = 3600 * 1_000_000
)

// errNoSamples are samples that can't be had this time.
var errNoSamples = errors.New("no per-process samples")

// readSamples adds the samples newer than mark and moves mark on.
func (c *cardReader) readSamples(reading *gpu.Reading, mark *sampleMark) {
	if on, known := reading.Card.MIGMode.Get(); known && on {
		*mark = sampleMark{} // the driver samples no processes under MIG
		return
	}
	raw, err := c.askSamples(mark.lastSeen)
	if err != nil {
		// The window since the last good look is now wider than the next
		// reading's interval; the mark stays, so nothing is lost.
		return
	}
	kept, newest := c.filterSamples(raw, mark.lastSeen, uint64(max(reading.At.WallUS, 0))+mostAheadUS)
	if mark.taken || c.firstSamples {
		reading.Samples, reading.SamplesKnown = kept, true
	}
	mark.taken = true
	mark.lastSeen = newest
}

// askSamples gets the raw samples. An empty set has three spellings: NOT_FOUND,
// success with nothing, and INSUFFICIENT_SIZE with a size of 0.
func (c *cardReader) askSamples(lastSeen uint64) ([]gonvml.ProcessUtilizationSample, error) {
	m := metric{"process_utilization", fnGetProcessUtilization}
	for range sampleAttempts {
		empty, grew := false, false
		raw, known := ask(c, m, func() ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
			raw, ret := c.library.processUtilization(c.device, lastSeen)
			if ret == gonvml.ERROR_NOT_FOUND || ret == gonvml.ERROR_INSUFFICIENT_SIZE && raw != nil && len(raw) == 0 {
				empty = true
				return nil, gonvml.SUCCESS
			}
			grew = ret == gonvml.ERROR_INSUFFICIENT_SIZE || ret == returnPanicked
			return raw, ret
		})
		if known || empty {
			return raw, nil
		}
		if !grew {
			break
		}
	}
	return nil, errNoSamples
}

// filterSamples keeps what can be believed and returns the newest timestamp
// among it. Drivers were seen to return garbage when processes have died:
// thousands of percent, times out of nowhere, and rows of zeros.
func (c *cardReader) filterSamples(raw []gonvml.ProcessUtilizationSample, lastSeen, latest uint64) ([]gpu.Sample, uint64) {
	newest := lastSeen
	var kept []gpu.Sample
	var outOfRange, old int64
	for _, s := range raw {
		switch {
		case s.Pid == 0 && s.TimeStamp == 0:
			continue // an unused slot
		case s.SmUtil > 100 || s.MemUtil > 100 || s.EncUtil > 100 || s.DecUtil > 100 || s.TimeStamp > latest || s.Pid == 0:
			outOfRange++
			continue
		case s.TimeStamp <= lastSeen:
			old++
			continue
		}
		newest = max(newest, s.TimeStamp)
		if kept == nil {
			kept = make([]gpu.Sample, 0, len(raw))
		}
		kept = append(kept, gpu.Sample{
			PID: s.Pid, SM: s.SmUtil, Memory: s.MemUtil, Encoder: s.EncUtil, Decoder: s.DecUtil, TimestampUS: s.TimeStamp,
		})
	}
	if outOfRange > 0 {
		c.dropMany("process_utilization", outOfRange)
	}
	if old > 0 {
		c.dropMany("process_utilization_old", old)
	}
	return kept, newest
}
