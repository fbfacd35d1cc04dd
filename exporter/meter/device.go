package meter

import (
	"gpuledger/exporter/usage"
)

// device is what the splits on one card or MIG instance carry from interval to
// interval.
type device struct {
	share, gpu surplus[party] // device and card time among users
	energy     surplus[party] // where energy is split equally
	byUser     map[party]*userOnDevice
	// memoryRemainder is memory-time below one KiB-second, in KiB·µs.
	memoryRemainder map[identity]int64
	// lastHeld is the start of the newest bucket each workload held in.
	lastHeld map[identity]int64
	bucketUS int64 // bucket of the newest commit
}

// userOnDevice is what splits within one user's workloads carry.
type userOnDevice struct {
	share, gpu, held, energy surplus[identity]
}

func (t *timeline) device(uuid string) *device {
	found, ok := t.devices[uuid]
	if !ok {
		found = &device{
			share: surplus[party]{}, gpu: surplus[party]{}, energy: surplus[party]{},
			byUser: map[party]*userOnDevice{}, memoryRemainder: map[identity]int64{},
			lastHeld: map[identity]int64{},
		}
		t.devices[uuid] = found
	}
	return found
}

func (d *device) user(p party) *userOnDevice {
	found, ok := d.byUser[p]
	if !ok {
		found = &userOnDevice{share: surplus[identity]{}, gpu: surplus[identity]{}, held: surplus[identity]{}, energy: surplus[identity]{}}
		d.byUser[p] = found
	}
	return found
}

// forget drops what workloads carry that did not hold the device during the
// whole bucket before this one, so that a node which runs a million jobs does
// not remember a million. What named users are owed among each other is kept
// for the run.
func (d *device) forget(bucketStartUS int64) {
	if bucketStartUS == d.bucketUS {
		return
	}
	d.bucketUS = bucketStartUS
	for id, lastUS := range d.lastHeld {
		if lastUS >= bucketStartUS-bucketUS {
			continue
		}
		delete(d.lastHeld, id)
		delete(d.memoryRemainder, id)
		p := party{user: id.user}
		if id.user == UserUnattributed {
			p.workload = id
			delete(d.share, p)
			delete(d.gpu, p)
			delete(d.energy, p)
		}
		if user, ok := d.byUser[p]; ok {
			for _, carried := range []surplus[identity]{user.share, user.gpu, user.held, user.energy} {
				delete(carried, id)
			}
			if len(user.share)+len(user.gpu)+len(user.held)+len(user.energy) == 0 {
				delete(d.byUser, p)
			}
		}
	}
}

// commit splits one stretch of a held device among its holdings, which come
// in the order of party and identity.
func (d *device) commit(base usage.Row, on presentDevice, lengthUS, cardUS int64, energy heldEnergy) []usage.Row {
	d.forget(base.Bucket.UnixMicro())
	var parties []party
	var ofParty [][]*holding
	for _, h := range on.holdings {
		if n := len(parties); n == 0 || parties[n-1] != h.party {
			parties, ofParty = append(parties, h.party), append(ofParty, nil)
		}
		ofParty[len(ofParty)-1] = append(ofParty[len(ofParty)-1], h)
		d.lastHeld[h.identity] = d.bucketUS
	}
	whole := on.slices == on.of
	shares := equally(lengthUS, parties, d.share)
	cards := shares
	if !whole {
		cards = equally(cardUS, parties, d.gpu)
	}
	var equalEnergies []int64
	if energy.parts == nil {
		equalEnergies = equally(energy.totalMJ, parties, d.energy)
	}
	rows := make([]usage.Row, 0, len(on.holdings))
	for i, p := range parties {
		user := d.user(p)
		ids := make([]identity, len(ofParty[i]))
		for j, h := range ofParty[i] {
			ids[j] = h.identity
		}
		share := equally(shares[i], ids, user.share)
		card := share
		if !whole {
			card = equally(cards[i], ids, user.gpu)
		}
		held := equally(lengthUS, ids, user.held)
		var energies []int64
		if energy.parts == nil {
			energies = equally(equalEnergies[i], ids, user.energy)
		} else {
			energies = energy.parts[len(rows) : len(rows)+len(ids)]
		}
		for j, h := range ofParty[i] {
			row := base
			row.Device, row.Profile, row.Slices, row.Of, row.State = on.uuid, on.profile, on.slices, on.of, usage.StateHeld
			row.User, row.UID, row.Kind, row.Workload = h.identity.user, h.identity.uid, h.identity.kind, h.identity.name
			row.Project, row.Class, row.AttributedBy = h.identity.project, h.identity.class, h.attributedBy
			row.Review = h.review
			row.GPUUS, row.ShareUS, row.HeldUS, row.EnergyMJ = card[j], share[j], held[j], energies[j]
			d.describe(&row, h, lengthUS)
			rows = append(rows, row)
		}
	}
	return rows
}

// describe fills in what is not split: a workload's own use.
func (d *device) describe(row *usage.Row, h *holding, lengthUS int64) {
	if h.reserved {
		row.ReservedUS = row.HeldUS
	}
	if h.activeKnown {
		row.ActiveKnownUS = lengthUS
		row.ActiveUS = lengthUS * h.smPercent / max(100, h.smTotal)
		if h.smPercent == 0 {
			row.IdleUS = row.ShareUS
		}
	}
	row.Estimated = h.estimated
	if !h.memoryKnown {
		return
	}
	row.MemoryKnownUS = lengthUS
	row.PeakMemoryBytes = h.memoryBytes
	total := d.memoryRemainder[h.identity] + h.memoryKiB*lengthUS
	row.MemoryKiBSeconds = total / second
	if total %= second; total != 0 {
		d.memoryRemainder[h.identity] = total
	} else {
		delete(d.memoryRemainder, h.identity)
	}
}
