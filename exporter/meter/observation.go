// Package meter turns readings into conserved usage.
//
// It is pure: readings and attributions come in, rows of increments go out; it
// reads no clock, no disk and no /proc. The laws it keeps are L1–L8 of
// docs/design.md, and its tests replay the same readings through an
// independent brute-force count.
package meter

import "gpuledger/exporter/gpu"

// ProcessKey is one process of this boot: a PID and when it started. A reused
// PID has another start time, so it is another key.
type ProcessKey struct {
	PID uint32
	// StartTicks is field 22 of /proc/PID/stat, in clock ticks since boot; 0
	// for a PID that was gone before it could be looked at.
	StartTicks uint64
}

// Reservation is a device given to a workload by a scheduler, with or without
// a process on it.
type Reservation struct {
	Device string // UUID of the card or MIG instance
	// Key is what is asked for the workload when the interval is committed, as
	// for a process. Without one Workload says it.
	Key      ProcessKey
	Workload Workload
}

// Observation is one card's reading, joined with who its PIDs are.
type Observation struct {
	Reading gpu.Reading
	// Keys has an entry for every PID in the reading.
	Keys map[uint32]ProcessKey
	// Reservations on the card's devices at the reading.
	Reservations []Reservation
}

// Attribution is what is known of a process when an interval wants to be
// committed.
type Attribution struct {
	Workload Workload
	// Pending says that a name or owner is still being looked up. The interval
	// then waits, up to Options.AttributionWait.
	Pending bool
}
