// Package usage holds the one record that crosses from a node to accounting.
package usage

import (
	"time"
)

// BucketLength is the length of a bucket. Every time zone's month and day
// edges fall on a quarter hour of UTC.
const BucketLength = 15 * time.Minute

// States of a row.
const (
	StateHeld = "held"
	StateIdle = "idle"
	StateDown = "down"
)

// Key is what makes a row one row: rows with the same key are the same fact.
// For idle and down rows UID is -1 and User, Kind, Workload, Project and Class
// are empty.
type Key struct {
	Run      string    `json:"run"`    // id of the exporter run that metered it
	Device   string    `json:"device"` // UUID of the card or MIG instance
	Slices   int64     `json:"slices"` // slices of the card this device has
	Of       int64     `json:"of"`     // slices the card has in all; 1 for a whole card
	Bucket   time.Time `json:"bucket"` // start of the bucket, UTC
	State    string    `json:"state"`
	User     string    `json:"user"`
	UID      int64     `json:"uid"`
	Kind     string    `json:"kind"`
	Workload string    `json:"workload"`
	Project  string    `json:"project"`
	Class    string    `json:"class"`
}

// Amounts are the quantities of a row. All are integers and add up.
type Amounts struct {
	GPUUS            int64 `json:"gpu_us"`          // card time, split over slices and holders
	ShareUS          int64 `json:"share_us"`        // device time, split over holders
	HeldUS           int64 `json:"held_us"`         // the user's un-split time
	ReservedUS       int64 `json:"reserved_us"`     // of HeldUS, while a scheduler gave the device exclusively
	ActiveUS         int64 `json:"active_us"`       // time × own SM activity
	ActiveKnownUS    int64 `json:"active_known_us"` // how long ActiveUS and IdleUS are known
	IdleUS           int64 `json:"idle_us"`         // of ShareUS, with known zero own activity
	MemoryKiBSeconds int64 `json:"memory_kib_seconds"`
	MemoryKnownUS    int64 `json:"memory_known_us"`
	EnergyMJ         int64 `json:"energy_mj"`
}

// Row is one workload's, or idle's, or down's use of one device in one bucket
// by one run of one exporter.
type Row struct {
	Key
	Seq     int64  `json:"seq"` // position in the node's journal, from 1; 0 while not final
	Node    string `json:"node"`
	Card    string `json:"card"` // UUID of the card that Device is or is part of
	Index   int    `json:"index"`
	Model   string `json:"model"`
	Profile string `json:"profile"` // MIG profile, empty for a whole card
	Amounts
	PeakMemoryBytes  int64  `json:"peak_memory_bytes"`
	PeakTemperatureC int64  `json:"peak_temperature_c"`
	Estimated        bool   `json:"estimated"`     // some activity was not per process
	AttributedBy     string `json:"attributed_by"` // the resolution step that named User
	// Review says that some of the time is attributed by a step that the site
	// does not trust for billing.
	Review bool `json:"review"`
}

// Plus returns the sum of two amounts.
func (a Amounts) Plus(b Amounts) Amounts {
	return Amounts{
		GPUUS:            a.GPUUS + b.GPUUS,
		ShareUS:          a.ShareUS + b.ShareUS,
		HeldUS:           a.HeldUS + b.HeldUS,
		ReservedUS:       a.ReservedUS + b.ReservedUS,
		ActiveUS:         a.ActiveUS + b.ActiveUS,
		ActiveKnownUS:    a.ActiveKnownUS + b.ActiveKnownUS,
		IdleUS:           a.IdleUS + b.IdleUS,
		MemoryKiBSeconds: a.MemoryKiBSeconds + b.MemoryKiBSeconds,
		MemoryKnownUS:    a.MemoryKnownUS + b.MemoryKnownUS,
		EnergyMJ:         a.EnergyMJ + b.EnergyMJ,
	}
}
