package ledger

import (
	"errors"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/exporter/usage"
)

// Errors on which callers decide.
var (
	// ErrUnknownNode: no row of this node is in the ledger.
	ErrUnknownNode = errors.New("no such node in the ledger")
	// ErrUnknownCard: no row of this card is in the ledger.
	ErrUnknownCard = errors.New("no such card in the ledger")
)

// BadLine is a line of the wire that is somebody's usage and no valid row.
type BadLine struct {
	Line   string // as it came
	Reason string // one of the Reason constants
	Detail string
	Node   string     // as far as it can be read
	Bucket *time.Time // as far as it can be read
}

// Batch is rows that enter the ledger in one transaction, or not at all.
type Batch struct {
	Source   string // where they come from: a target's URL, a file's name
	Rows     []usage.Row
	BadLines []BadLine
}

// Page is what one request to a target brought.
type Page struct {
	Batch
	// Cursor is where the next request goes on.
	Cursor string
	// CompleteThrough: every row before it has been served. Zero if not said.
	CompleteThrough time.Time
}

// Result counts what became of a batch.
type Result struct {
	Inserted    int64 // now counted: new rows, and later states of rows
	Duplicate   int64 // there already, the same or a later state
	Quarantined int64 // kept aside, now for the first time
}

// Plus returns the sum of two results.
func (r Result) Plus(other Result) Result {
	return Result{r.Inserted + other.Inserted, r.Duplicate + other.Duplicate, r.Quarantined + other.Quarantined}
}

// Target is what the ledger remembers of a place that it pulls from.
type Target struct {
	URL             string
	Node            string // empty until the first row
	Cursor          string
	LastSuccess     time.Time // zero if never
	LastError       string    // of the newest failure, empty once a pull succeeds
	LastErrorAt     time.Time
	CompleteThrough time.Time // of its node; zero if never said
}

// Quarantined is one row that is kept aside.
type Quarantined struct {
	Reason    string
	Detail    string
	Node      string
	Bucket    *time.Time
	Source    string
	Line      string
	FirstSeen time.Time
}

// Period is all that a statement of a period is made from, read at one moment.
type Period struct {
	Usage       []billing.Usage
	Capacity    []billing.Capacity
	ReviewUS    int64 // held time of rows that need review
	Quarantined int64 // rows that belong to the period, or to none that can be read
}
