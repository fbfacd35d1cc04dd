// Package billing prices usage, splits money and writes statements. It is
// pure: values in, values out, no clock, no disk.
package billing

import "gpuledger/exporter/usage"

// Usage is one group of ledger rows: everything that has the same values here,
// summed over the buckets of one local day of the billing time zone.
type Usage struct {
	Day      string // local date, YYYY-MM-DD
	Node     string
	Card     string // UUID
	Model    string
	Profile  string // MIG profile, empty for a whole card
	State    string // usage.StateHeld, StateIdle or StateDown
	User     string
	UID      int64
	Kind     string
	Workload string
	Project  string
	Class    string
	usage.Amounts
	Estimated bool
}

// Capacity is how long one card was in service in one local day. What its rows
// do not cover of it is unobserved; more rows than capacity is an overlap.
type Capacity struct {
	Day         string
	Node        string
	Card        string
	Model       string
	InServiceUS int64
}
