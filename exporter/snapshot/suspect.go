package snapshot

import (
	"time"

	"gpuledger/exporter/meter"
)

// Verdicts of a Search.
const (
	SearchNone    = ""        // there is nothing to look for
	SearchLooking = "looking" // somebody is being looked for
	SearchFound   = "found"   // there are suspects
	SearchNobody  = "nobody"  // no process has the card open
	SearchHidden  = "hidden"  // none of those that may be looked into has
	SearchFailed  = "failed"  // processes could not be looked at
)

// Search is how the search for who has a card's unexplained memory stands.
type Search struct {
	Verdict string
	At      time.Time // of the newest look; zero before the first
	// Hidden counts the processes that could not be looked into. With HidePID
	// there may be more.
	Hidden  int
	HidePID bool
	Error   string // for SearchFailed
}

// Suspect is a process that may have a card's unexplained memory. It is no
// holder: nothing is metered or billed for it.
type Suspect struct {
	PID uint32
	// Reason and Strength are constants of package suspects; Why is a sentence's
	// predicate, whose subject is the process.
	Reason, Strength, Why string
	// Monitor says that it has the card open only to watch it or to keep it
	// ready: it is named, and not suspected.
	Monitor     bool
	Workload    meter.Workload
	Detail      Detail
	Pending     bool // who it is, is still being looked up
	Command     string
	CommandLine string // only for the owner and root, never in metrics, journal or logs
	StartedAt   time.Time
	Zombie      bool
}
