package resources

import (
	"cmp"
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

// Positions in amounts.
const (
	cpuUS = iota
	readBytes
	writtenBytes
	amountsLength
)

// amounts are counters of one source, or of a workload.
type amounts [amountsLength]gpu.Optional[int64]

// source is one thing that counts: a process, or a cgroup in one hierarchy.
// Neither ever comes to mean another one.
type source struct {
	pid        uint32 // 0 for a cgroup
	device, id uint64 // cgroup: device and inode of its directory; process: 0 and its start
}

// sample is what one source says at one time.
type sample struct {
	workload meter.Workload
	source   source
	// begun is when the source began, in ticks since boot, or any later time
	// at which it is known to have been there.
	begun    uint64
	counted  amounts
	resident gpu.Optional[uint64] // bytes
}

// account is one workload's.
type account struct {
	since    time.Time // when it was first seen with a GPU
	heldAt   time.Time // when it was last
	round    uint64    // in which it was last
	totals   amounts
	rates    amounts // a second; cpuUS in µs
	resident gpu.Optional[uint64]
}

// book adds samples up to counters that belong to workloads: they never fall,
// whoever exits.
type book struct {
	round    uint64
	at       time.Time
	ticks    uint64 // at the newest round
	accounts map[meter.Workload]*account
	sources  map[source]amounts // of the newest round
}

func newBook() *book {
	return &book{accounts: map[meter.Workload]*account{}, sources: map[source]amounts{}}
}

// add takes one round: who holds, and what their sources say. What a source
// counted since the round before goes to the workload that it is of now. A
// source that is new counts from its start if it began since the round
// before, and from now on if it is older: its past was not the workload's.
func (b *book) add(at time.Time, ticks uint64, holding []meter.Workload, samples []sample) {
	elapsed := at.Sub(b.at)
	b.round++
	for _, workload := range holding {
		a := b.accounts[workload]
		if a == nil {
			a = &account{since: at}
			b.accounts[workload] = a
		}
		// Only two rounds in a row make a rate.
		measured := a.round == b.round-1 && b.round > 1 && elapsed > 0
		if a.round == b.round {
			continue // listed twice
		}
		a.heldAt, a.round, a.rates, a.resident = at, b.round, amounts{}, gpu.Optional[uint64]{}
		if measured {
			for i := range a.rates {
				a.rates[i].Known = a.totals[i].Known
			}
		}
	}
	seen := make(map[source]amounts, len(samples))
	for i := range samples {
		s := &samples[i]
		a := b.accounts[s.workload]
		if _, twice := seen[s.source]; twice || a == nil || a.round != b.round {
			continue
		}
		seen[s.source] = s.counted
		last, known := b.sources[s.source]
		whole := !known && b.round > 1 && s.begun >= b.ticks
		for i, value := range s.counted {
			if !value.Known {
				continue
			}
			a.totals[i].Known = true
			switch {
			case known && last[i].Known && value.Value >= last[i].Value:
				value.Value -= last[i].Value
			case known && last[i].Known, whole:
				// Fallen: it was set back, and all of it is new.
			default:
				continue
			}
			a.totals[i].Value += value.Value
			a.rates[i].Value += value.Value
		}
		if bytes, ok := s.resident.Get(); ok {
			a.resident = gpu.Some(a.resident.Value + bytes)
		}
	}
	for workload, a := range b.accounts {
		switch {
		case a.round != b.round:
			a.rates, a.resident = amounts{}, gpu.Optional[uint64]{}
			if at.Sub(a.heldAt) > keptFor {
				delete(b.accounts, workload)
			}
		case elapsed > 0:
			for i := range a.rates {
				a.rates[i].Value = int64(float64(a.rates[i].Value) / elapsed.Seconds())
				if !a.rates[i].Known {
					a.rates[i] = gpu.Optional[int64]{}
				}
			}
		}
	}
	b.at, b.ticks, b.sources = at, ticks, seen
}

// workloads are the accounts as they are shown, sorted.
func (b *book) workloads() []snapshot.Resources {
	all := make([]snapshot.Resources, 0, len(b.accounts))
	for workload, a := range b.accounts {
		one := snapshot.Resources{
			Key: workload, FirstSeen: a.since,
			CPUUS: a.totals[cpuUS], ReadBytes: a.totals[readBytes], WrittenBytes: a.totals[writtenBytes],
			ResidentBytes: a.resident, ReadBytesPerSecond: a.rates[readBytes], WrittenBytesPerSecond: a.rates[writtenBytes],
		}
		if perSecond, known := a.rates[cpuUS].Get(); known {
			one.CPUPercent = gpu.Some(perSecond / 10_000)
		}
		all = append(all, one)
	}
	slices.SortFunc(all, func(a, b snapshot.Resources) int { return compare(a.Key, b.Key) })
	return all
}

func compare(a, b meter.Workload) int {
	return cmp.Or(cmp.Compare(a.User, b.User), cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name),
		cmp.Compare(a.UID, b.UID), cmp.Compare(a.Project, b.Project), cmp.Compare(a.Class, b.Class))
}
