package ledger

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"

	"gpuledger/exporter/usage"
)

// A row grows while its bucket is open, and never shrinks. A journal restored
// from a copy that was taken in mid-run makes the copy's open rows final: the
// same key with smaller numbers. So of two rows with one key, of which one is
// an earlier state of the other, the later state is the fact.
//
// Rows with one key that are no states of each other contradict each other.
// One of them is counted, the others are quarantined; which one depends on the
// rows and not on the order they came in, so that the ledger doesn't either.

// EarlierState reports whether a is an earlier state of b, a row with the same
// key: a is of the same card, place and model, no number is larger in a, and at
// least one is smaller. Since then Estimated and Review may have become true, and
// AttributedBy another step.
func EarlierState(a, b *usage.Row) bool {
	if a.Node != b.Node || a.Card != b.Card || a.Index != b.Index || a.Model != b.Model || a.Profile != b.Profile ||
		(a.Estimated && !b.Estimated) || (a.Review && !b.Review) {
		return false
	}
	grown := false
	before, after := numbersOf(a), numbersOf(b)
	for i := range before {
		if before[i] > after[i] {
			return false
		}
		grown = grown || before[i] < after[i]
	}
	// A reader from before there were reviews dropped that mark and nothing else.
	return grown || !a.Review && b.Review && a.AttributedBy == b.AttributedBy
}

// numbersOf are what grows in a row.
func numbersOf(row *usage.Row) [12]int64 {
	return [...]int64{
		row.GPUUS, row.ShareUS, row.HeldUS, row.ReservedUS, row.ActiveUS, row.ActiveKnownUS, row.IdleUS,
		row.MemoryKiBSeconds, row.MemoryKnownUS, row.EnergyMJ, row.PeakMemoryBytes, row.PeakTemperatureC,
	}
}

// compareStates orders rows with the same key: 0 if they say the same, and an
// earlier state before a later one. Of rows that contradict each other the one
// with more card time comes later, then the one with more of the other numbers
// in turn.
func compareStates(a, b *usage.Row) int {
	x, y := numbersOf(a), numbersOf(b)
	for i := range x {
		if c := cmp.Compare(x[i], y[i]); c != 0 {
			return c
		}
	}
	return bytes.Compare(AppendContent(nil, a), AppendContent(nil, b))
}

// Settle decides between rows with the same key: which of them is counted, and
// which ones contradict it. Those that are an earlier state of another are
// neither. The answer does not depend on the order of rows, and deciding again
// between its rows and further ones is the same as deciding between all at
// once. There must be at least one row.
func Settle(rows []usage.Row) (counted usage.Row, aside []usage.Row) {
	sorted := slices.Clone(rows)
	slices.SortFunc(sorted, func(a, b usage.Row) int { return compareStates(&b, &a) })
	sorted = slices.CompactFunc(sorted, func(a, b usage.Row) bool { return compareStates(&a, &b) == 0 })
	for i := range sorted {
		// Later states come first.
		if i > 0 && !slices.ContainsFunc(sorted[:i], func(other usage.Row) bool { return EarlierState(&sorted[i], &other) }) {
			aside = append(aside, sorted[i])
		}
	}
	return sorted[0], aside
}

// KeyDigest is a SHA-256 of a row's key.
func KeyDigest(key *usage.Key) [sha256.Size]byte {
	var text []byte
	for _, s := range []string{key.Run, key.Device, key.State, key.User, key.Kind, key.Workload, key.Project, key.Class} {
		text = binary.AppendUvarint(text, uint64(len(s)))
		text = append(text, s...)
	}
	for _, n := range []int64{key.Bucket.Unix(), key.Slices, key.Of, key.UID} {
		text = binary.AppendVarint(text, n)
	}
	return sha256.Sum256(text)
}
