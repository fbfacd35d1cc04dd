package who

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
)

// StaleAfter is the age from which a snapshot is called stale: the longest
// interval that is still metered by default.
const StaleAfter = 10 * time.Second

// Build makes the answer for viewer from s. Now is by the clock of s.At;
// source is one of the Source… constants.
func Build(s *snapshot.Snapshot, viewer Viewer, source string, now time.Time) Answer {
	a := Answer{
		Version:    Version,
		Source:     source,
		Node:       s.Node,
		At:         s.At.UTC(),
		AnsweredAt: now.UTC(),
		Driver: Driver{
			DriverVersion: s.Driver.DriverVersion,
			CUDAVersion:   s.Driver.CUDAVersion,
			NVMLVersion:   s.Driver.NVMLVersion,
		},
		Expected: s.Expected,
		Missing:  []Missing{},
		Cards:    []Card{},
	}
	if uid, known := viewer.UID(); known {
		a.ViewerUID = new(int64(uid))
	}
	if !s.NVMLUp {
		a.Error = cmp.Or(s.NVMLError, "NVML is not available")
	}
	held, used := heldSince(s), resources(s)
	for i := range s.Cards {
		a.Cards = append(a.Cards, card(s, &s.Cards[i], viewer, held))
		taken(&a.Cards[i], &s.Cards[i], viewer, source)
		use(&a.Cards[i], used)
	}
	slices.SortStableFunc(a.Cards, func(x, y Card) int {
		return cmp.Or(cmp.Compare(x.Index, y.Index), cmp.Compare(x.UUID, y.UUID))
	})
	a.Missing = append(a.Missing, missing(s, a, now)...)
	return a
}

// workloadKey is one workload on one device.
type workloadKey struct {
	device   string
	workload meter.Workload
}

func keyOf(device string, w meter.Workload) workloadKey {
	return workloadKey{device, w.Key()}
}

func heldSince(s *snapshot.Snapshot) map[workloadKey]time.Time {
	since := make(map[workloadKey]time.Time, len(s.Workloads))
	for i := range s.Workloads {
		w := &s.Workloads[i]
		if w.Present {
			since[keyOf(w.Device, w.Key)] = w.HeldSince
		}
	}
	return since
}

// resources are what workloads use, by who they are. Nothing is said of one of
// which nothing is known at the moment.
func resources(s *snapshot.Snapshot) map[meter.Workload]*Resources {
	used := make(map[meter.Workload]*Resources, len(s.Resources))
	for i := range s.Resources {
		r := &s.Resources[i]
		one := Resources{
			CPUPercent: pointer(r.CPUPercent), ResidentMemoryBytes: pointer(r.ResidentBytes),
			ReadBytesPerSecond: pointer(r.ReadBytesPerSecond), WrittenBytesPerSecond: pointer(r.WrittenBytesPerSecond),
		}
		if one != (Resources{}) {
			used[r.Key] = &one
		}
	}
	return used
}

// use says of each holder what its workload uses.
func use(c *Card, used map[meter.Workload]*Resources) {
	for _, d := range c.Devices {
		for i := range d.Holders {
			d.Holders[i].Resources = used[nameOf(&d.Holders[i])]
		}
	}
}

// nameOf is the workload that a holder belongs to.
func nameOf(h *Holder) meter.Workload {
	w := meter.Workload{User: h.User, UID: -1, Kind: h.Kind, Name: h.Workload, Project: h.Project, Class: h.Class}
	if h.UID != nil {
		w.UID = *h.UID
	}
	return w
}

func card(s *snapshot.Snapshot, c *snapshot.Card, viewer Viewer, held map[workloadKey]time.Time) Card {
	out := Card{
		Index:                   c.Identity.Index,
		UUID:                    c.Identity.UUID,
		Name:                    c.Identity.Name,
		PCIBusID:                c.Identity.PCIBusID,
		State:                   CardUp,
		PassedThrough:           c.Identity.PassedThrough,
		MemoryUnattributedBytes: pointer(c.UnattributedMemoryBytes),
	}
	if !c.Up {
		out.State, out.Reason = cardState(c), c.Reason
	}
	if r := c.Reading; r != nil {
		out.MIG = r.SlicesTotal > 0
		out.MemoryTotalBytes = pointer(r.MemoryTotalBytes)
		out.MemoryUsedBytes = pointer(r.MemoryUsedBytes)
		out.MemoryReservedBytes = pointer(r.MemoryReservedBytes)
		out.UtilizationPercent = integer(r.UtilizationPercent)
		out.TemperatureCelsius = pointer(r.TemperatureC)
		out.PowerWatts = watts(r.PowerMW)
		out.PowerLimitWatts = watts(r.PowerLimitMW)
	} else if mig, known := c.Identity.MIGMode.Get(); known {
		out.MIG = mig
	}
	out.Devices = devices(c, out.MIG)
	for i := range c.Holders {
		h := &c.Holders[i]
		uuid := cmp.Or(h.Device, c.Identity.UUID)
		at := slices.IndexFunc(out.Devices, func(d Device) bool { return d.UUID == uuid })
		if at < 0 { // an instance that the reading no longer lists
			at = len(out.Devices)
			out.Devices = append(out.Devices, Device{UUID: uuid, Profile: h.Profile, Holders: []Holder{}})
		}
		out.Devices[at].Holders = append(out.Devices[at].Holders, holder(s, c, h, viewer, held[keyOf(h.Device, h.Workload)]))
	}
	for i := range out.Devices {
		d := &out.Devices[i]
		slices.SortStableFunc(d.Holders, compareHolders)
		d.Free = c.Up && !c.Identity.PassedThrough && !slices.ContainsFunc(d.Holders, func(h Holder) bool { return h.Holds || h.Assigned })
	}
	return out
}

func cardState(c *snapshot.Card) string {
	switch c.Reason {
	case gpu.DownLost, gpu.DownResetRequired, gpu.DownRefused:
		return CardDown
	case CardHung:
		return CardHung
	}
	if c.Reading != nil && c.Reading.State == gpu.StateDown {
		return CardDown
	}
	return CardFailed
}

func devices(c *snapshot.Card, mig bool) []Device {
	if !mig {
		d := Device{UUID: c.Identity.UUID, Slices: 1, Of: 1, Holders: []Holder{}}
		if c.Reading != nil {
			d.MemoryTotalBytes = pointer(c.Reading.MemoryTotalBytes)
			d.MemoryUsedBytes = pointer(c.Reading.MemoryUsedBytes)
		}
		return []Device{d}
	}
	out := []Device{}
	if c.Reading == nil {
		return out
	}
	for _, i := range c.Reading.Instances {
		out = append(out, Device{
			UUID:             i.UUID,
			Profile:          i.Profile,
			GPUInstance:      new(i.GPUInstance),
			ComputeInstance:  new(i.ComputeInstance),
			Slices:           i.Slices,
			Of:               c.Reading.SlicesTotal,
			MemoryTotalBytes: pointer(i.MemoryTotalBytes),
			MemoryUsedBytes:  pointer(i.MemoryUsedBytes),
			Holders:          []Holder{},
		})
	}
	slices.SortStableFunc(out, func(x, y Device) int {
		return cmp.Or(cmp.Compare(*x.GPUInstance, *y.GPUInstance), cmp.Compare(*x.ComputeInstance, *y.ComputeInstance))
	})
	return out
}

func holder(s *snapshot.Snapshot, c *snapshot.Card, h *snapshot.Holder, viewer Viewer, since time.Time) Holder {
	out := Holder{
		User:            h.Workload.User,
		Kind:            h.Workload.Kind,
		Workload:        h.Workload.Name,
		Project:         h.Workload.Project,
		Class:           h.Workload.Class,
		AttributedBy:    h.Workload.AttributedBy,
		Review:          h.Workload.Review,
		Disagrees:       h.Disagrees,
		Command:         h.Command,
		Contexts:        []string{},
		MemoryBytes:     pointer(h.Process.MemoryBytes),
		ActivityPercent: integer(h.ActivityPercent),
		Estimated:       h.Estimated,
		StartedAt:       instant(h.StartedAt),
		HeldSince:       instant(since),
		LastActiveAt:    instant(h.LastActive),
		Holds:           h.Holds,
		Assigned:        h.PID == 0,
		GraphicsOnly:    h.Process.Graphics && !h.Process.Compute && !h.Process.MPS,
		System:          h.System,
		Zombie:          h.Zombie,
		Pending:         h.Pending,
		ContainerID:     h.Detail.ContainerID,
		ContainerName:   h.Detail.ContainerName,
		Image:           h.Detail.Image,
		PodNamespace:    h.Detail.PodNamespace,
		PodName:         h.Detail.PodName,
		SlurmJob:        h.Detail.SlurmJob,
		Unit:            h.Detail.Unit,
	}
	if h.Workload.UID >= 0 {
		out.UID = new(h.Workload.UID)
	}
	if h.PID != 0 {
		out.PID = new(h.PID)
	}
	if h.CommandLine != "" && viewer.sees(h.Workload.UID) {
		out.CommandLine = new(h.CommandLine)
	}
	for _, context := range []struct {
		name string
		has  bool
	}{{"compute", h.Process.Compute}, {"graphics", h.Process.Graphics}, {"mps", h.Process.MPS}} {
		if context.has {
			out.Contexts = append(out.Contexts, context.name)
		}
	}
	out.IdleSeconds = idle(s, c, h, since)
	return out
}

// idle is for how many seconds the process is known to have been inactive. One
// never seen active has been so since it, its hold or the watching began,
// whichever was last.
func idle(s *snapshot.Snapshot, c *snapshot.Card, h *snapshot.Holder, since time.Time) *int64 {
	activity, known := h.ActivityPercent.Get()
	if !known || c.Reading == nil || h.PID == 0 {
		return nil
	}
	if activity > 0 {
		return new(int64(0))
	}
	from := h.LastActive
	if from.IsZero() {
		for _, begin := range []time.Time{h.StartedAt, since, s.Started} {
			if begin.After(from) {
				from = begin
			}
		}
	}
	if from.IsZero() {
		return nil
	}
	return new(max(0, int64(s.At.Sub(from)/time.Second)))
}

// compareHolders puts who holds first, then who was given the device, then who
// is only shown; one user's and one workload's lines stand together.
func compareHolders(x, y Holder) int {
	rank := func(h Holder) int {
		switch {
		case h.System:
			return 3
		case h.Holds:
			return 0
		case h.Assigned:
			return 1
		}
		return 2
	}
	pid := func(h Holder) uint32 {
		if h.PID == nil {
			return 0
		}
		return *h.PID
	}
	return cmp.Or(
		cmp.Compare(rank(x), rank(y)),
		cmp.Compare(x.User, y.User),
		cmp.Compare(x.Kind, y.Kind),
		cmp.Compare(x.Workload, y.Workload),
		cmp.Compare(pid(x), pid(y)),
	)
}

func missing(s *snapshot.Snapshot, a Answer, now time.Time) []Missing {
	var out []Missing
	if !s.NVMLUp {
		out = append(out, Missing{What: MissingNVML, Message: a.Error})
	}
	if age := now.Sub(s.At); age > StaleAfter {
		out = append(out, Missing{What: MissingStale, Message: fmt.Sprintf(
			"the cards were last read %s ago: gpu-exporter is held up; see its log", age.Round(time.Second))})
	}
	for _, c := range a.Cards {
		switch {
		case c.State == CardHung:
			out = append(out, Missing{MissingCard, indexOf(c), unnamed(c) + "did not answer in time: a call into the driver hangs; see dmesg for XID errors"})
		case c.State == CardFailed && !s.NVMLUp:
			// No card can be read then: that has been said, and is no fault of the card.
		case c.State == CardFailed:
			out = append(out, Missing{MissingCard, indexOf(c), unread(c.Reason)})
		case c.State == CardDown && c.Reason == gpu.DownRefused:
			out = append(out, Missing{MissingCard, indexOf(c), "refused access: check the permissions of /dev/nvidia* and, in a container, its device rules"})
		}
		if pids := unexplained(c); len(pids) > 0 {
			out = append(out, Missing{MissingProcess, indexOf(c), fmt.Sprintf(
				"/proc has nothing on PID %s: just ended, hidden (hidepid), or of another PID namespace", strings.Join(pids, ", "))})
		}
	}
	if s.NVMLUp && s.Expected > len(a.Cards) {
		out = append(out, Missing{What: MissingCard, Message: fmt.Sprintf(
			"NVML counts %d cards, %d were read; the others have not answered yet", s.Expected, len(a.Cards))})
	}
	for _, name := range slices.Sorted(maps.Keys(s.Exporter.Collectors)) {
		state := s.Exporter.Collectors[name]
		// The journal is no part of this answer, and NVML has its own entry.
		if state.Up || name == "journal" || name == "nvml" {
			continue
		}
		what := MissingRuntime
		if name == "procfs" {
			what = MissingProcess
		}
		out = append(out, Missing{What: what, Message: name + ": " + cmp.Or(state.Error, "could not be read")})
	}
	return out
}

// indexOf is nil for a card that has not said which it is.
func indexOf(c Card) *int {
	if c.Index < 0 {
		return nil
	}
	return new(c.Index)
}

// unnamed names a card that has no index to be named by.
func unnamed(c Card) string {
	if c.Index < 0 {
		return c.UUID + ": "
	}
	return ""
}

// unread says why nothing is known of a card now.
func unread(reason string) string {
	switch reason {
	case "", CardFailed:
		return "could not be read; the log of gpu-exporter says why"
	case "missing":
		return "is not among the cards that NVML lists now; see lspci and dmesg"
	}
	return "could not be read: " + reason
}

// unexplained are the PIDs of a card that nothing is known of, at most ten.
func unexplained(c Card) []string {
	const most = 10
	var pids []string
	for _, d := range c.Devices {
		for _, h := range d.Holders {
			if h.PID == nil || h.Command != "" || h.StartedAt != nil || h.Pending || h.Zombie {
				continue
			}
			if len(pids) == most {
				return append(pids, "…")
			}
			pids = append(pids, strconv.FormatUint(uint64(*h.PID), 10))
		}
	}
	return pids
}

func pointer[T any](o gpu.Optional[T]) *T {
	if v, known := o.Get(); known {
		return new(v)
	}
	return nil
}

func integer(o gpu.Optional[uint32]) *int64 {
	if v, known := o.Get(); known {
		return new(int64(v))
	}
	return nil
}

func watts(mw gpu.Optional[int64]) *float64 {
	if v, known := mw.Get(); known {
		return new(float64(v) / 1000)
	}
	return nil
}

func instant(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return new(t.UTC())
}
