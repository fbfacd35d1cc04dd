package meter

// heldEnergy is what the holdings of one device get of an interval's energy.
type heldEnergy struct {
	totalMJ int64
	// parts by holding, where activity decides; nil for an equal split.
	parts []int64
}

// energies is an interval's energy by device.
type energies struct {
	held []heldEnergy
	idle []int64
}

// splitEnergy divides a card's energy by law L4: by SM activity among the
// holders where it is known, equally if none was active, by held slices under
// MIG; what processes that do not hold used, and what nobody held, is idle.
func splitEnergy(state present, energyMJ int64) energies {
	split := energies{held: make([]heldEnergy, len(state.devices)), idle: make([]int64, len(state.devices))}
	held := make([]int64, len(state.devices)) // slices of held devices
	all := make([]int64, len(state.devices))
	anyHeld := false
	for i, on := range state.devices {
		all[i] = on.slices
		if len(on.holdings) > 0 {
			held[i], anyHeld = on.slices, true
		}
	}
	if !anyHeld {
		split.idle = apportion[party](energyMJ, nil, all, nil)
		return split
	}
	for i, part := range apportion[party](energyMJ, nil, held, nil) {
		split.held[i].totalMJ = part
	}
	if len(state.devices) > 1 || state.devices[0].slices != state.devices[0].of {
		return split
	}
	holdings := state.devices[0].holdings
	weights := make([]int64, len(holdings), len(holdings)+1)
	total := state.otherPercent
	for i, h := range holdings {
		weights[i] = h.smPercent
		total += h.smPercent
	}
	if total == 0 {
		return split
	}
	parts := apportion[party](energyMJ, nil, append(weights, state.otherPercent), nil)
	split.held[0].parts = parts[:len(holdings)]
	split.idle[0] = parts[len(holdings)]
	return split
}
