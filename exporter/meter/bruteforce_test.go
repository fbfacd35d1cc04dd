package meter_test

import (
	"fmt"
	"math/big"
	"sort"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/usage"
)

// This file is a second, independent count. It keeps a whole history and walks
// it card by card after the fact, in exact rationals, with none of the meter's
// own code: only its types. Where the two differ by a single unit, one of them
// breaks a law of docs/design.md §3.

// history is everything a run of the meter was told, in order.
type history struct {
	run         string
	notBeforeUS int64
	observed    []meter.Observation
	// commitsAfter[i] is the instant of the Commit after observed[i].
	commitsAfter []gpu.Instant
	// knownFrom says from which monotonic time on a process's workload is
	// settled; before, provisional stands in for it.
	knownFrom   map[meter.ProcessKey]int64
	settled     map[meter.ProcessKey]meter.Workload
	provisional map[meter.ProcessKey]meter.Workload
}

func (h *history) attributeAt(monotonicUS int64) func(meter.ProcessKey) meter.Attribution {
	return func(key meter.ProcessKey) meter.Attribution {
		if monotonicUS >= h.knownFrom[key] {
			return meter.Attribution{Workload: h.settled[key]}
		}
		return meter.Attribution{Workload: h.provisional[key], Pending: true}
	}
}

type tally struct {
	amounts     usage.Amounts
	peakMemory  int64
	peakCelsius int64
	estimated   bool
}

type stretch struct {
	from, to int64
	endMono  int64
	state    meter.Observation
	end      gpu.Reading
	energy   int64
}

const (
	quarterUS = int64(900_000_000)
	gapUS     = int64(10_000_000)
)

// count replays a history. It returns the rows and the committed length of
// each card.
func (h *history) count() (map[usage.Key]*tally, map[string]int64) {
	rows := map[usage.Key]*tally{}
	committed := map[string]int64{}
	latest := h.notBeforeUS
	begun := false
	type track struct {
		ledger, mono int64
		prev         *meter.Observation
		counter      bool
		nanojoules   int64
		stretches    []stretch
	}
	tracks := map[string]*track{}
	for i := range h.observed {
		o := h.observed[i]
		r := o.Reading
		if r.State == gpu.StateFailed {
			continue
		}
		tr := tracks[r.Card.UUID]
		if tr == nil {
			if !begun && latest-r.At.WallUS > quarterUS {
				latest = 0
			}
			begun = true
			tr = &track{ledger: r.At.WallUS, mono: r.At.MonotonicUS, prev: &o}
			if latest > tr.ledger {
				tr.ledger = latest
			}
			tracks[r.Card.UUID] = tr
			if tr.ledger > latest {
				latest = tr.ledger
			}
			continue
		}
		elapsed := r.At.MonotonicUS - tr.mono
		if elapsed <= 0 {
			continue
		}
		was := tr.ledger
		natural := was + elapsed
		jumped := false
		if r.At.WallUS > natural+1_000_000 {
			tr.ledger, jumped = r.At.WallUS, true
		} else if r.At.WallUS < natural {
			if r.At.WallUS > was {
				tr.ledger = r.At.WallUS
			}
		} else {
			tr.ledger = natural
		}
		tr.mono = r.At.MonotonicUS
		if tr.ledger > latest {
			latest = tr.ledger
		}
		if !jumped && elapsed <= gapUS {
			s := stretch{from: was, to: tr.ledger, endMono: r.At.MonotonicUS, state: *tr.prev, end: r}
			before := tr.prev.Reading
			if before.State == gpu.StateGood && r.State == gpu.StateGood {
				if before.EnergyMJ.Known || r.EnergyMJ.Known {
					tr.counter = true
				}
				if tr.counter {
					limit := int64(2_000_000)
					if r.PowerLimitMW.Known && r.PowerLimitMW.Value > 0 {
						limit = r.PowerLimitMW.Value
					}
					delta := r.EnergyMJ.Value - before.EnergyMJ.Value
					bound := limit * elapsed / 1_000_000 * 3 / 2
					if before.EnergyMJ.Known && r.EnergyMJ.Known && delta >= 0 && delta <= bound {
						s.energy = delta
					}
				} else if before.PowerMW.Known {
					tr.nanojoules += before.PowerMW.Value * elapsed
					s.energy = tr.nanojoules / 1_000_000
					tr.nanojoules -= s.energy * 1_000_000
				}
			}
			tr.stretches = append(tr.stretches, s)
		}
		tr.prev = &o
	}
	for uuid, tr := range tracks {
		ledger := newExact()
		after := int64(0) // commits happen in order
		for _, s := range tr.stretches {
			at, final := h.commitTime(s, after)
			after = at
			workloads := map[uint32]meter.Workload{}
			attribute := h.attributeAt(at)
			for _, p := range allProcesses(s.state.Reading) {
				key, ok := s.state.Keys[p.PID]
				if !ok {
					key = meter.ProcessKey{PID: p.PID}
				}
				workloads[p.PID] = attribute(key).Workload
			}
			_ = final
			committed[uuid] += s.to - s.from
			ledger.stretch(h.run, s, workloads, rows)
		}
	}
	for key, row := range rows {
		if row.amounts == (usage.Amounts{}) {
			delete(rows, key)
		}
	}
	return rows, committed
}

// commitTime is the monotonic time of the first commit at which the stretch
// need not wait any longer.
func (h *history) commitTime(s stretch, notBefore int64) (int64, bool) {
	for _, commit := range h.commitsAfter {
		at := commit.MonotonicUS
		if at < s.endMono || at < notBefore {
			continue
		}
		pending := false
		for _, p := range allProcesses(s.state.Reading) {
			key := s.state.Keys[p.PID]
			pending = pending || at < h.knownFrom[key]
		}
		if !pending || at-s.endMono >= gapUS {
			return at, false
		}
	}
	last := h.commitsAfter[len(h.commitsAfter)-1].MonotonicUS
	return last, true
}

func allProcesses(r gpu.Reading) []gpu.Process {
	all := append([]gpu.Process{}, r.Processes...)
	for _, instance := range r.Instances {
		all = append(all, instance.Processes...)
	}
	return all
}

// exact keeps, for every split that carries, what each party should have had
// and what it was given, both since the beginning.
type exact struct {
	due    map[string]*big.Rat
	given  map[string]int64
	memory map[string]int64
	// last is the newest quarter in which a workload held a device.
	last    map[string]int64
	quarter map[string]int64
}

func newExact() *exact {
	return &exact{due: map[string]*big.Rat{}, given: map[string]int64{}, memory: map[string]int64{}, last: map[string]int64{}, quarter: map[string]int64{}}
}

// split hands out total among names (in order) by weight: everyone the whole
// part, then one unit each to those furthest behind.
func (e *exact) split(scope string, total int64, names []string, weights []int64) []int64 {
	var sum int64
	for _, w := range weights {
		sum += w
	}
	out := make([]int64, len(names))
	if total == 0 || sum == 0 {
		return out
	}
	behind := make([]*big.Rat, len(names))
	left := total
	for i, name := range names {
		key := scope + "\x01" + name
		share := new(big.Rat).Mul(big.NewRat(total, 1), big.NewRat(weights[i], sum))
		whole := new(big.Int).Div(share.Num(), share.Denom()).Int64()
		out[i] = whole
		left -= whole
		if e.due[key] == nil {
			e.due[key] = new(big.Rat)
		}
		e.due[key].Add(e.due[key], share)
		e.given[key] += whole
		behind[i] = new(big.Rat).Sub(e.due[key], big.NewRat(e.given[key], 1))
	}
	order := make([]int, len(names))
	for i := range order {
		order[i] = i
	}
	sort.SliceStable(order, func(a, b int) bool { return behind[order[a]].Cmp(behind[order[b]]) > 0 })
	for _, i := range order[:left] {
		out[i]++
		e.given[scope+"\x01"+names[i]]++
	}
	return out
}

// largestRemainder is a split that remembers nothing.
func largestRemainder(total int64, weights []int64) []int64 {
	return newExact().split("", total, numbered(len(weights)), weights)
}

func numbered(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprint(i)
	}
	return names
}

func ones(n int) []int64 {
	w := make([]int64, n)
	for i := range w {
		w[i] = 1
	}
	return w
}

type piece struct {
	uuid, profile string
	slices, of    int64
	who           []*who
}

type who struct {
	w                  meter.Workload
	user, id           string
	kib, bytes         int64
	memoryKnown        bool
	sm, smAll          int64
	activeKnown, guess bool
	reserved           bool
}

func order(w meter.Workload) (string, string) {
	id := fmt.Sprintf("%s\x02%020d\x02%s\x02%s\x02%s\x02%s", w.User, w.UID+1, w.Kind, w.Name, w.Project, w.Class)
	if w.User == meter.UserUnattributed {
		return w.User + "\x03" + id, id
	}
	return w.User, id
}

func (e *exact) stretch(run string, s stretch, workloads map[uint32]meter.Workload, rows map[usage.Key]*tally) {
	r := s.state.Reading
	var pieces []*piece
	other := int64(0)
	if r.State == gpu.StateGood {
		if r.SlicesTotal == 0 && len(r.Instances) == 0 {
			p := &piece{uuid: r.Card.UUID, slices: 1, of: 1}
			p.fill(r.Processes, workloads, s.state.Reservations)
			other = p.activity(r.Processes, workloads, s.end)
			pieces = []*piece{p}
		} else {
			var used int64
			for _, in := range r.Instances {
				used += in.Slices
			}
			of := r.SlicesTotal
			if used > of {
				of = used
			}
			for _, in := range r.Instances {
				p := &piece{uuid: in.UUID, profile: in.Profile, slices: in.Slices, of: of}
				p.fill(in.Processes, workloads, s.state.Reservations)
				pieces = append(pieces, p)
			}
			if of > used {
				pieces = append(pieces, &piece{uuid: r.Card.UUID, slices: of - used, of: of})
			}
			sort.Slice(pieces, func(a, b int) bool { return pieces[a].uuid < pieces[b].uuid })
		}
	}
	energyBefore := int64(0)
	from := s.from
	for {
		quarter := from / quarterUS * quarterUS
		to := s.to
		if to > quarter+quarterUS {
			to = quarter + quarterUS
		}
		energy := s.energy - energyBefore
		if to < s.to {
			energy = s.energy*(to-s.from)/(s.to-s.from) - energyBefore
		}
		energyBefore += energy
		add := func(p *piece, state string, x *who, a usage.Amounts) {
			key := usage.Key{Run: run, Device: p.uuid, Slices: p.slices, Of: p.of, Bucket: time.UnixMicro(quarter).UTC(), State: state, UID: -1}
			t := tally{amounts: a}
			if x != nil {
				key.User, key.UID, key.Kind, key.Workload, key.Project, key.Class = x.w.User, x.w.UID, x.w.Kind, x.w.Name, x.w.Project, x.w.Class
				t.estimated = x.guess
				if x.memoryKnown {
					t.peakMemory = x.bytes
				}
			}
			if a == (usage.Amounts{}) {
				return
			}
			have := rows[key]
			if have == nil {
				have = &tally{}
				rows[key] = have
			}
			have.amounts = have.amounts.Plus(t.amounts)
			have.estimated = have.estimated || t.estimated
			if t.peakMemory > have.peakMemory {
				have.peakMemory = t.peakMemory
			}
			if r.TemperatureC.Known && r.TemperatureC.Value > have.peakCelsius {
				have.peakCelsius = r.TemperatureC.Value
			}
		}
		if r.State == gpu.StateDown {
			add(&piece{uuid: r.Card.UUID, slices: 1, of: 1}, usage.StateDown, nil, usage.Amounts{GPUUS: to - from, ShareUS: to - from})
		} else {
			e.quarterOf(r.Card.UUID, pieces)
			e.piece(r.Card.UUID, pieces, other, quarter, to-from, energy, add)
		}
		from = to
		if from >= s.to {
			return
		}
	}
}

// quarterOf forgets the card's slices carry of devices that are gone.
func (e *exact) quarterOf(card string, pieces []*piece) {
	now := map[string]bool{}
	for _, p := range pieces {
		now["slices "+card+"\x01"+p.uuid] = true
	}
	for key := range e.due {
		if len(key) > 7 && key[:7] == "slices " && !now[key] {
			delete(e.due, key)
			delete(e.given, key)
		}
	}
}

func (e *exact) piece(card string, pieces []*piece, other, quarter, length, energy int64, add func(*piece, string, *who, usage.Amounts)) {
	names, weights, held := make([]string, len(pieces)), make([]int64, len(pieces)), make([]int64, len(pieces))
	anyone := false
	for i, p := range pieces {
		names[i], weights[i] = p.uuid, p.slices
		if len(p.who) > 0 {
			held[i], anyone = p.slices, true
		}
	}
	times := e.split("slices "+card, length, names, weights)
	joules := largestRemainder(energy, weights)
	if anyone {
		joules = largestRemainder(energy, held)
	}
	for i, p := range pieces {
		if len(p.who) == 0 {
			add(p, usage.StateIdle, nil, usage.Amounts{GPUUS: times[i], ShareUS: length, EnergyMJ: joules[i]})
			continue
		}
		e.forget(p.uuid, quarter)
		var users []string
		for _, x := range p.who {
			if len(users) == 0 || users[len(users)-1] != x.user {
				users = append(users, x.user)
			}
			e.last[p.uuid+"\x04"+x.user+"\x05"+x.id] = quarter
		}
		equal := ones(len(users))
		share := e.split("share "+p.uuid, length, users, equal)
		card := share
		if p.slices != p.of {
			card = e.split("gpu "+p.uuid, times[i], users, equal)
		}
		total := other
		smOf := make([]int64, 0, len(p.who)+1)
		for _, x := range p.who {
			total += x.sm
			smOf = append(smOf, x.sm)
		}
		byActivity := len(pieces) == 1 && p.slices == p.of && total > 0
		var parts, byUser []int64
		if byActivity {
			parts = largestRemainder(joules[i], append(smOf, other))
			add(p, usage.StateIdle, nil, usage.Amounts{EnergyMJ: parts[len(p.who)]})
		} else {
			byUser = e.split("energy "+p.uuid, joules[i], users, equal)
		}
		n := 0
		for u, user := range users {
			var mine []*who
			var ids []string
			for _, x := range p.who {
				if x.user == user {
					mine, ids = append(mine, x), append(ids, x.id)
				}
			}
			scope := p.uuid + "\x04" + user
			w := ones(len(ids))
			s := e.split("wshare "+scope, share[u], ids, w)
			c := s
			if p.slices != p.of {
				c = e.split("wgpu "+scope, card[u], ids, w)
			}
			hl := e.split("wheld "+scope, length, ids, w)
			var en []int64
			if !byActivity {
				en = e.split("wenergy "+scope, byUser[u], ids, w)
			}
			for k, x := range mine {
				a := usage.Amounts{ShareUS: s[k], GPUUS: c[k], HeldUS: hl[k]}
				if byActivity {
					a.EnergyMJ = parts[n]
				} else {
					a.EnergyMJ = en[k]
				}
				if x.reserved {
					a.ReservedUS = a.HeldUS
				}
				if x.activeKnown {
					a.ActiveKnownUS = length
					scale := int64(100)
					if x.smAll > scale {
						scale = x.smAll
					}
					a.ActiveUS = length * x.sm / scale
					if x.sm == 0 {
						a.IdleUS = a.ShareUS
					}
				}
				if x.memoryKnown {
					a.MemoryKnownUS = length
					key := scope + "\x05" + x.id
					e.memory[key] += x.kib * length
					a.MemoryKiBSeconds = e.memory[key] / 1_000_000
					e.memory[key] %= 1_000_000
				}
				add(p, usage.StateHeld, x, a)
				n++
			}
		}
	}
}

// forget drops what workloads carry that did not hold in the whole quarter
// before this one.
func (e *exact) forget(uuid string, quarter int64) {
	if e.quarter[uuid] == quarter {
		return
	}
	e.quarter[uuid] = quarter
	for key, last := range e.last {
		if len(key) < len(uuid) || key[:len(uuid)] != uuid || last >= quarter-quarterUS {
			continue
		}
		delete(e.last, key)
		delete(e.memory, key)
		var user, id string
		for i := len(uuid) + 1; i < len(key); i++ {
			if key[i] == '\x05' {
				user, id = key[len(uuid)+1:i], key[i+1:]
				break
			}
		}
		for _, scope := range []string{"wshare ", "wgpu ", "wheld ", "wenergy "} {
			delete(e.due, scope+uuid+"\x04"+user+"\x01"+id)
			delete(e.given, scope+uuid+"\x04"+user+"\x01"+id)
		}
		if len(user) > len(meter.UserUnattributed) && user[:len(meter.UserUnattributed)+1] == meter.UserUnattributed+"\x03" {
			for _, scope := range []string{"share ", "gpu ", "energy "} {
				delete(e.due, scope+uuid+"\x01"+user)
				delete(e.given, scope+uuid+"\x01"+user)
			}
		}
	}
}

func (p *piece) fill(processes []gpu.Process, workloads map[uint32]meter.Workload, reservations []meter.Reservation) {
	byID := map[string]*who{}
	find := func(w meter.Workload) *who {
		user, id := order(w)
		if byID[id] == nil {
			byID[id] = &who{w: w, user: user, id: id, memoryKnown: true}
			p.who = append(p.who, byID[id])
		}
		return byID[id]
	}
	for _, proc := range processes {
		w := workloads[proc.PID]
		if w.Kind == meter.KindSystem || !(proc.Compute || proc.MPS) {
			continue
		}
		x := find(w)
		if !proc.MemoryBytes.Known {
			x.memoryKnown = false
		}
		x.bytes += int64(proc.MemoryBytes.Value)
		x.kib += int64(proc.MemoryBytes.Value) / 1024
	}
	for _, res := range reservations {
		if res.Device == p.uuid {
			find(res.Workload).reserved = true
		}
	}
	sort.Slice(p.who, func(a, b int) bool {
		if p.who[a].user != p.who[b].user {
			return p.who[a].user < p.who[b].user
		}
		return p.who[a].id < p.who[b].id
	})
}

func (p *piece) activity(processes []gpu.Process, workloads map[uint32]meter.Workload, end gpu.Reading) (other int64) {
	if end.State != gpu.StateGood || end.SlicesTotal > 0 || len(end.Instances) > 0 {
		return 0
	}
	if !end.SamplesKnown {
		if !end.UtilizationPercent.Known || end.UtilizationPercent.Value > 100 || len(p.who) == 0 {
			return 0
		}
		weights := ones(len(p.who))
		usable, any := true, false
		for _, x := range p.who {
			usable = usable && x.memoryKnown
			any = any || x.kib > 0
		}
		if usable && any {
			for i, x := range p.who {
				weights[i] = x.kib
			}
		}
		for i, part := range largestRemainder(int64(end.UtilizationPercent.Value), weights) {
			p.who[i].sm, p.who[i].activeKnown, p.who[i].guess = part, true, true
		}
		return 0
	}
	byPID := map[uint32]int64{}
	for _, sample := range end.Samples {
		if sample.SM <= 100 && int64(sample.SM) > byPID[sample.PID] {
			byPID[sample.PID] = int64(sample.SM)
		}
	}
	onList := map[uint32]bool{}
	for _, proc := range end.Processes {
		onList[proc.PID] = true
	}
	atStart := map[uint32]bool{}
	all := int64(0)
	for _, proc := range processes {
		atStart[proc.PID] = true
		onList[proc.PID] = true
	}
	for pid, sm := range byPID {
		if onList[pid] {
			all += sm
		}
	}
	held := int64(0)
	for _, x := range p.who {
		x.activeKnown, x.smAll = true, all
		for _, proc := range processes {
			w := workloads[proc.PID]
			_, id := order(w)
			if id == x.id && w.Kind != meter.KindSystem && (proc.Compute || proc.MPS) {
				x.sm += byPID[proc.PID]
			}
		}
		held += x.sm
	}
	return all - held
}
