package meter

import (
	"cmp"
	"slices"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/usage"
)

// party is who has an equal share: a user, or one unattributed workload.
type party struct {
	user     string
	workload identity // set only where user is UserUnattributed
}

// identity is a workload's key: everything but how it was found.
type identity struct {
	user                       string
	uid                        int64
	kind, name, project, class string
}

func identityOf(w Workload) identity {
	return identity{user: w.User, uid: w.UID, kind: w.Kind, name: w.Name, project: w.Project, class: w.Class}
}

func partyOf(w Workload) party {
	if w.Unattributed() {
		return party{user: w.User, workload: identityOf(w)}
	}
	return party{user: w.User}
}

func compareIdentity(a, b identity) int {
	return cmp.Or(cmp.Compare(a.user, b.user), cmp.Compare(a.uid, b.uid), cmp.Compare(a.kind, b.kind),
		cmp.Compare(a.name, b.name), cmp.Compare(a.project, b.project), cmp.Compare(a.class, b.class))
}

func compareParty(a, b party) int {
	return cmp.Or(cmp.Compare(a.user, b.user), compareIdentity(a.workload, b.workload))
}

// holding is one workload's hold on one device during one interval.
type holding struct {
	identity     identity
	party        party
	attributedBy string
	review       bool
	reserved     bool
	processes    int
	memoryKiB    int64
	memoryBytes  int64
	memoryKnown  bool
	smPercent    int64
	smTotal      int64 // of all processes on the device: over 100, all are scaled down
	activeKnown  bool
	estimated    bool
}

// present are the holdings on each device of a card during an interval, and
// the SM use of processes that hold nothing.
type present struct {
	devices      []presentDevice
	otherPercent int64 // SM use of listed processes that do not hold
}

type presentDevice struct {
	uuid, profile string
	slices, of    int64
	holdings      []*holding // by party, then identity
}

// attributed resolves who was on each device. pending says that at least one
// process is still being looked up.
func attributed(o *Observation, attribute func(ProcessKey) Attribution) (map[uint32]Workload, bool) {
	workloads := map[uint32]Workload{}
	pending := false
	resolve := func(processes []gpu.Process) {
		for _, process := range processes {
			if _, done := workloads[process.PID]; done {
				continue
			}
			key, ok := o.Keys[process.PID]
			if !ok {
				key = ProcessKey{PID: process.PID}
			}
			answer := attribute(key)
			pending = pending || answer.Pending
			workloads[process.PID] = answer.Workload
		}
	}
	for i := range o.Reservations {
		if reservation := &o.Reservations[i]; reservation.Key != (ProcessKey{}) {
			answer := attribute(reservation.Key)
			pending = pending || answer.Pending
			reservation.Workload = answer.Workload
		}
	}
	resolve(o.Reading.Processes)
	for _, instance := range o.Reading.Instances {
		resolve(instance.Processes)
	}
	return workloads, pending
}

// presence lays an interval's state out by device.
func presence(next interval, workloads map[uint32]Workload) present {
	reading := &next.during.Reading
	var state present
	if reading.SlicesTotal == 0 && len(reading.Instances) == 0 {
		whole := presentDevice{uuid: reading.Card.UUID, slices: 1, of: 1}
		whole.holdings = holdings(whole.uuid, reading.Processes, workloads, next.during.Reservations)
		state.devices = []presentDevice{whole}
		state.otherPercent = spreadActivity(whole.holdings, reading.Processes, workloads, next.activity)
		return state
	}
	used := int64(0)
	for _, instance := range reading.Instances {
		used += max(instance.Slices, 1)
	}
	of := max(reading.SlicesTotal, used)
	for _, instance := range reading.Instances {
		part := presentDevice{uuid: instance.UUID, profile: instance.Profile, slices: max(instance.Slices, 1), of: of}
		part.holdings = holdings(part.uuid, instance.Processes, workloads, next.during.Reservations)
		state.devices = append(state.devices, part)
	}
	if unused := of - used; unused > 0 {
		state.devices = append(state.devices, presentDevice{uuid: reading.Card.UUID, slices: unused, of: of})
	}
	slices.SortFunc(state.devices, func(a, b presentDevice) int { return cmp.Compare(a.uuid, b.uuid) })
	return state
}

// holdings are the workloads that hold a device, in the order of their keys.
func holdings(uuid string, processes []gpu.Process, workloads map[uint32]Workload, reservations []Reservation) []*holding {
	byIdentity := map[identity]*holding{}
	hold := func(w Workload) *holding {
		id := identityOf(w)
		found, ok := byIdentity[id]
		if !ok {
			found = &holding{identity: id, party: partyOf(w), attributedBy: w.AttributedBy, review: w.Review, memoryKnown: true}
			byIdentity[id] = found
		}
		if found.review && !w.Review { // one process that is trusted is enough
			found.attributedBy, found.review = w.AttributedBy, false
		}
		return found
	}
	for _, process := range processes {
		workload := workloads[process.PID]
		if !Holds(process, workload) {
			continue
		}
		h := hold(workload)
		h.processes++
		bytes, known := process.MemoryBytes.Get()
		h.memoryKnown = h.memoryKnown && known
		h.memoryKiB += int64(bytes / 1024)
		h.memoryBytes += int64(bytes)
	}
	for _, reservation := range reservations {
		if reservation.Device == uuid {
			hold(reservation.Workload).reserved = true
		}
	}
	all := make([]*holding, 0, len(byIdentity))
	for _, h := range byIdentity {
		all = append(all, h)
	}
	slices.SortFunc(all, func(a, b *holding) int {
		return cmp.Or(compareParty(a.party, b.party), compareIdentity(a.identity, b.identity))
	})
	return all
}

// Holds reports whether a process holds its device: it has a compute context
// or is an MPS client, and is not a system process.
func Holds(process gpu.Process, workload Workload) bool {
	return (process.Compute || process.MPS) && workload.Kind != KindSystem
}

// spreadActivity gives each holding its SM percent by law L5 and returns what
// processes that do not hold used.
func spreadActivity(all []*holding, processes []gpu.Process, workloads map[uint32]Workload, seen activity) int64 {
	if seen.perProcess == nil {
		spreadDeviceActivity(all, seen.device)
		return 0
	}
	byIdentity := map[identity]*holding{}
	for _, h := range all {
		h.activeKnown = true
		byIdentity[h.identity] = h
	}
	listed := make(map[uint32]bool, len(processes))
	other := int64(0)
	for _, process := range processes {
		listed[process.PID] = true
		percent := seen.perProcess[process.PID]
		if Holds(process, workloads[process.PID]) {
			byIdentity[identityOf(workloads[process.PID])].smPercent += percent
		} else {
			other += percent
		}
	}
	for pid, percent := range seen.perProcess {
		if !listed[pid] && seen.endListed[pid] {
			other += percent
		}
	}
	total := other
	for _, h := range all {
		total += h.smPercent
	}
	for _, h := range all {
		h.smTotal = total
	}
	return other
}

// spreadDeviceActivity is for drivers without per-process figures: the
// device's goes to the single holder, or is split by memory among several.
func spreadDeviceActivity(all []*holding, device gpu.Optional[uint32]) {
	percent, known := device.Get()
	if !known || percent > 100 || len(all) == 0 {
		return
	}
	weights := make([]int64, len(all))
	byMemory := true
	for i, h := range all {
		weights[i] = h.memoryKiB
		byMemory = byMemory && h.memoryKnown
	}
	if !byMemory || slices.Max(weights) == 0 {
		for i := range weights {
			weights[i] = 1
		}
	}
	for i, part := range apportion[party](int64(percent), nil, weights, nil) {
		all[i].smPercent, all[i].activeKnown, all[i].estimated = part, true, true
	}
}

// commit turns one interval into rows of increments.
func (t *timeline) commit(next interval, workloads map[uint32]Workload, options Options) []usage.Row {
	reading := &next.during.Reading
	base := usage.Row{Node: options.Node, Card: reading.Card.UUID, Index: reading.Card.Index, Model: reading.Card.Name}
	base.Run = options.Run
	if celsius, ok := reading.TemperatureC.Get(); ok {
		base.PeakTemperatureC = celsius
	}
	var rows []usage.Row
	state := present{}
	if reading.State == gpu.StateGood {
		state = presence(next, workloads)
	}
	lengthUS := next.toUS - next.fromUS
	for fromUS, energyDone := next.fromUS, int64(0); ; {
		startUS := bucketStart(fromUS)
		toUS := min(next.toUS, startUS+bucketUS)
		energyMJ := next.energyMJ - energyDone
		if toUS < next.toUS {
			energyMJ = next.energyMJ*(toUS-next.fromUS)/lengthUS - energyDone
		}
		energyDone += energyMJ
		base.Bucket = time.UnixMicro(startUS).UTC()
		if reading.State == gpu.StateDown {
			rows = append(rows, plainRow(base, usage.StateDown, presentDevice{uuid: reading.Card.UUID, slices: 1, of: 1}, toUS-fromUS, toUS-fromUS, 0))
		} else {
			rows = append(rows, t.commitPiece(base, state, toUS-fromUS, energyMJ)...)
		}
		fromUS = toUS
		if fromUS >= next.toUS {
			break
		}
	}
	return slices.DeleteFunc(rows, func(row usage.Row) bool { return row.Amounts == usage.Amounts{} })
}

// plainRow is a row that belongs to nobody.
func plainRow(base usage.Row, state string, on presentDevice, gpuUS, shareUS, energyMJ int64) usage.Row {
	row := base
	row.Device, row.Profile, row.Slices, row.Of, row.State, row.UID = on.uuid, on.profile, on.slices, on.of, state, -1
	row.GPUUS, row.ShareUS, row.EnergyMJ = gpuUS, shareUS, energyMJ
	return row
}

// commitPiece splits one stretch within one bucket.
func (t *timeline) commitPiece(base usage.Row, state present, lengthUS, energyMJ int64) []usage.Row {
	names := make([]string, len(state.devices))
	weights := make([]int64, len(state.devices))
	for i, on := range state.devices {
		names[i], weights[i] = on.uuid, on.slices
	}
	for name := range t.slices {
		if !slices.Contains(names, name) {
			delete(t.slices, name)
		}
	}
	cardUS := apportion(lengthUS, names, weights, t.slices)
	energies := splitEnergy(state, energyMJ)
	var rows []usage.Row
	for i, on := range state.devices {
		if len(on.holdings) == 0 {
			rows = append(rows, plainRow(base, usage.StateIdle, on, cardUS[i], lengthUS, energies.idle[i]))
			continue
		}
		rows = append(rows, t.device(on.uuid).commit(base, on, lengthUS, cardUS[i], energies.held[i])...)
		if energies.idle[i] > 0 {
			rows = append(rows, plainRow(base, usage.StateIdle, on, 0, 0, energies.idle[i]))
		}
	}
	return rows
}
