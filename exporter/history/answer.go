// Package history answers "who held what" from the rows of a node's journal.
//
// An Answer is made for one Reader: of other people it says who and when, and
// what else is in their rows is left out when it is made, not when it is shown.
// docs/gwho.md documents the JSON.
package history

import (
	"time"

	"gpuledger/exporter/usage"
)

// Version is the version of the JSON form of Answer. Fields are added without
// raising it; it is raised when one changes its meaning or goes.
const Version = 1

// StateUnobserved is the state of a card's time that no row tells of. The other
// states are those of rows.
const StateUnobserved = "unobserved"

// Codes of Missing.
const (
	MissingOlder = "older" // there is more than one answer takes
	MissingNewer = "newer" // the journal lags behind
)

// Answer is who held what on one node.
type Answer struct {
	Version int    `json:"version"`
	Node    string `json:"node"`
	// AnsweredAt is when the answer was made.
	AnsweredAt time.Time `json:"answered_at"`
	// From is the edge of a bucket, To up to where the journal is written.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// JournalBegins is the earliest bucket that the journal has anything of;
	// null if it is empty. Before it nothing is known.
	JournalBegins *time.Time `json:"journal_begins"`
	// BucketSeconds is how fine From and To of a stretch are: a stretch begins
	// and ends somewhere within its first and last bucket.
	BucketSeconds int64 `json:"bucket_seconds"`
	// ViewerUID is the uid that the answer was made for; null for a reader
	// known by a token or a certificate.
	ViewerUID *int64 `json:"viewer_uid"`
	// All says that everybody's rows are told in full.
	All     bool      `json:"all"`
	Missing []Missing `json:"missing"`
	Cards   []Card    `json:"cards"`
}

// Missing is one part of the answer that could not be had.
type Missing struct {
	// What is one of the Missing… codes.
	What    string `json:"what"`
	Message string `json:"message"`
}

// Card is one GPU, as its newest row knows it.
type Card struct {
	Index int    `json:"index"`
	UUID  string `json:"uuid"`
	Model string `json:"model"`
	// Stretches are newest first. For each bucket but the newest one, the
	// gpu_us of all stretches that cover it add up to the bucket's length.
	Stretches []Stretch `json:"stretches"`
}

// Stretch is consecutive buckets in each of which the same party held the
// device, or nobody did, or nothing was observed, for at least some time.
type Stretch struct {
	// Device is the UUID of the card, or of one of its MIG instances.
	Device  string `json:"device"`
	Profile string `json:"profile"` // MIG profile; empty for a whole card
	Slices  int64  `json:"slices"`
	Of      int64  `json:"of"`
	// State is held, idle, down or StateUnobserved.
	State string `json:"state"`
	// User, UID and Kind say who; empty and null if the state is not held. UID
	// is null where no uid stands behind the user.
	User string `json:"user"`
	UID  *int64 `json:"uid"`
	Kind string `json:"kind"`
	// From is the start of the first bucket, To the end of the last one, or of
	// what was written of it.
	From time.Time `json:"from"`
	To   time.Time `json:"to"`
	// Detail is the rest of the rows; null where they are another person's.
	Detail *Detail `json:"detail"`
}

// Detail is what only the person whose rows they are and those who may read the
// journal are told; for states other than held, everybody.
type Detail struct {
	Workload string `json:"workload"`
	Project  string `json:"project"`
	Class    string `json:"class"`
	// AttributedBy is of the newest row.
	AttributedBy string `json:"attributed_by"`
	Estimated    bool   `json:"estimated"` // some activity was not per process
	usage.Amounts
	PeakMemoryBytes int64 `json:"peak_memory_bytes"`
}

// Complete reports whether no part of the answer is missing.
func (a Answer) Complete() bool { return len(a.Missing) == 0 }

// Reader is for whom an answer is made. The zero value is told of everybody who
// and when, and nothing in full.
type Reader struct {
	// UID counts if Known: the kernel has given it, and it is one person's.
	UID   uint32
	Known bool
	// All says that the reader may read everybody's usage.
	All bool
}

// sees reports whether the reader is told the whole of a row.
func (r Reader) sees(row *usage.Row) bool {
	return r.All || row.State != usage.StateHeld || r.Known && row.UID == int64(r.UID)
}
