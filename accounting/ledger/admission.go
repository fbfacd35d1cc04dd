// Package ledger says what the ledger holds and what can be proved of it: which
// rows are let in, how their content is hashed, how long each card was in
// service, and what is wrong. It is pure; the package sqlite beside it keeps the
// rows.
package ledger

import (
	"fmt"
	"time"

	"gpuledger/exporter/usage"
)

// Reasons why a row is quarantined: kept, shown, in no sum, and in the way of
// closing its period.
const (
	// ReasonConflict: a row with the same key is counted, and neither is an
	// earlier state of the other.
	ReasonConflict = "conflict"
	// ReasonNode: the row's node is not the node of the target it came from.
	ReasonNode = "node"
	// ReasonFuture: the bucket starts more than FutureLimit after the ledger's clock.
	ReasonFuture = "future"
	// ReasonPast: the bucket is before EarliestBucket.
	ReasonPast = "past"
	// ReasonInvalid: a field has a value that no row can have, such as a bucket
	// that is not on a quarter hour.
	ReasonInvalid = "invalid"
	// ReasonAmounts: an amount is more than a device can do in a bucket.
	ReasonAmounts = "amounts"
)

// FutureLimit is how far after the ledger's clock a bucket may start.
const FutureLimit = time.Hour

// EarliestBucket is the earliest bucket let in. A node that booted with no clock
// reports 1970, and its cards would be in service since then.
var EarliestBucket = time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)

// Bounds of one row. They stop nonsense, and keep every sum that a period needs
// within 63 bits.
const (
	maxMemoryKiBSeconds = int64(1<<34) * bucketSeconds       // 16 TiB for a whole bucket
	maxEnergyMJ         = int64(100_000_000) * bucketSeconds // 100 kW for a whole bucket
	maxPeakMemoryBytes  = int64(1) << 44                     // 16 TiB
	// carryUS is by how much a part may pass its whole because remainders are
	// carried from bucket to bucket.
	carryUS = 1000
)

const (
	bucketSeconds = int64(usage.BucketLength / time.Second)
	bucketUS      = int64(usage.BucketLength / time.Microsecond)
)

// Fault says why a row is quarantined.
type Fault struct {
	Reason string // one of the Reason constants
	Detail string // for people: the value that is wrong, and what it should be
}

// Admit checks a row on its own. wantNode is the node the row must be of, empty
// for any. It returns nil if the row may enter the ledger.
func Admit(row *usage.Row, wantNode string, now time.Time) *Fault {
	if err := row.Validate(); err != nil {
		return &Fault{ReasonInvalid, err.Error()}
	}
	if wantNode != "" && row.Node != wantNode {
		return &Fault{ReasonNode, fmt.Sprintf("row is of node %q, its target is node %q", row.Node, wantNode)}
	}
	bucket := row.Bucket
	switch {
	case bucket.Before(EarliestBucket):
		return &Fault{ReasonPast, fmt.Sprintf("bucket %s is before %s: was the node's clock set?", bucket.UTC().Format(time.RFC3339), EarliestBucket.Format(time.RFC3339))}
	case bucket.After(now.Add(FutureLimit)):
		return &Fault{ReasonFuture, fmt.Sprintf("bucket %s starts more than %s after the ledger's clock, %s", bucket.UTC().Format(time.RFC3339), FutureLimit, now.UTC().Format(time.RFC3339))}
	}
	return admitAmounts(row)
}

func admitAmounts(row *usage.Row) *Fault {
	for _, field := range []struct {
		name       string
		value, max int64
	}{
		{"gpu_us", row.GPUUS, bucketUS},
		{"share_us", row.ShareUS, bucketUS},
		{"held_us", row.HeldUS, bucketUS},
		{"reserved_us", row.ReservedUS, min(bucketUS, row.HeldUS+carryUS)},
		{"active_us", row.ActiveUS, min(bucketUS, row.ActiveKnownUS+carryUS)},
		{"active_known_us", row.ActiveKnownUS, bucketUS},
		{"idle_us", row.IdleUS, min(bucketUS, row.ShareUS+carryUS)},
		{"memory_kib_seconds", row.MemoryKiBSeconds, maxMemoryKiBSeconds},
		{"memory_known_us", row.MemoryKnownUS, bucketUS},
		{"energy_mj", row.EnergyMJ, maxEnergyMJ},
		{"peak_memory_bytes", row.PeakMemoryBytes, maxPeakMemoryBytes},
	} {
		if field.value < 0 || field.value > field.max {
			return &Fault{ReasonAmounts, fmt.Sprintf("%s is %d, it can be 0 to %d in this row", field.name, field.value, field.max)}
		}
	}
	if row.PeakTemperatureC < -300 || row.PeakTemperatureC > 1000 {
		return &Fault{ReasonAmounts, fmt.Sprintf("peak_temperature_c is %d", row.PeakTemperatureC)}
	}
	return nil
}
