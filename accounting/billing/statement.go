package billing

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"strings"

	"gpuledger/exporter/usage"
)

// LineType says what a line is. Lines of the first four carry hours and no
// money, charges carry money and no hours: so hours add up to capacity and
// amounts to the bill, and nothing is counted twice.
type LineType string

// The line types, in the order of a statement.
const (
	LineUsage      LineType = "usage"      // held by a user
	LineIdle       LineType = "idle"       // held by nobody
	LineDown       LineType = "down"       // the card said it could not work
	LineUnobserved LineType = "unobserved" // in service, and nobody knows
	LineCharge     LineType = "charge"     // usage × price
)

var lineOrder = map[LineType]int{LineUsage: 0, LineIdle: 1, LineDown: 2, LineUnobserved: 3, LineCharge: 4}

// States of a statement.
const (
	StatusOpen    = "open" // may still change
	StatusClosing = "closing"
	StatusClosed  = "closed" // frozen
)

// Statement is one period: where every hour of capacity went, and what it
// costs.
type Statement struct {
	Period   Period
	Status   string // StatusOpen, as Bill leaves it
	Mode     Mode
	Currency Currency
	// Lines are ordered by type, then by key. Their GPUHours add up to the
	// printed hours of Capacity, for each node and model.
	Lines    []Line
	Capacity []NodeCapacity // by node, model
	Accounts []AccountTotal // by name
	// Unpriced is held time for which the book has no price; it is in the
	// usage lines and in no charge.
	Unpriced []Unpriced
	// Overlaps are days of cards with more metered than there was. The hours
	// beyond capacity stay in the lines: nobody can say which are wrong.
	Overlaps []Overlap
	// Unassigned are users for whom no account pays, with their card time.
	Unassigned []UserTime
	// HasAccounts is false where no account is configured at all: then that
	// nobody pays is how the site wants it, and nothing to complain about.
	HasAccounts bool
}

// Line is one line of a statement. Names are copies, so that later renames do
// not rewrite it.
type Line struct {
	ID   string // hash of period and key; the same for the same key, whatever the figures
	Type LineType
	Key
	CostCentre string
	Hours      *Hours  // nil for LineCharge
	Charge     *Charge // nil for all other types
	// Coverage of the line's node and model.
	Coverage Coverage
}

// Key is what a line is about. It identifies the line within its type and
// period.
type Key struct {
	Account string // who pays; empty for lines without a user
	User    string
	Project string
	Node    string
	Model   string // GPU model
	Profile string // MIG profile, empty for a whole card
	Class   string
	Item    string // name of the rate; empty for lines of hours
	// UnitPrice is the decimal price of one unit; empty for lines of hours. A
	// price that changes within the period makes two lines.
	UnitPrice string
}

// Hours are a line's times, memory and energy: exact sums, and as printed.
// Printed figures are split by largest remainder within node and model, so
// that they add up to the rounded sum.
type Hours struct {
	usage.Amounts
	GPUHours       Micro // of card time
	HeldHours      Micro // un-split time of the user
	ActiveHours    Micro // time × own SM activity
	IdleHours      Micro // with known zero own activity
	ReservedHours  Micro // given by a scheduler
	MemoryGiBHours Micro
	EnergyKWh      Micro
	// Metered is false for unobserved time, of which only GPUHours is known.
	Metered bool
	// Estimated says that some activity was not measured per process.
	Estimated bool
}

// ActivityKnown reports whether ActiveHours and IdleHours stand for any of the
// time. Not known is not zero.
func (h *Hours) ActivityKnown() bool { return h.Metered && h.ActiveKnownUS > 0 }

// MemoryKnown reports whether MemoryGiBHours stands for any of the time.
func (h *Hours) MemoryKnown() bool { return h.Metered && h.MemoryKnownUS > 0 }

// Charge is a quantity and what it costs.
type Charge struct {
	QuantityUS int64 // exact, of PerGPUHour
	Quantity   Micro // printed; the quantities of a fully priced usage line add up to its GPUHours
	Unit       string
	// ListAmount is what the quantity costs by the price book, rounded once
	// per account. Amount is what is owed: the same in ModeCharge, zero in
	// ModeShowback.
	ListAmount Money
	Amount     Money
}

// Coverage is how much of the time in service was observed.
type Coverage struct{ InServiceUS, UnobservedUS int64 }

// Decimal writes 1 − unobserved/in service with six decimals, rounded down:
// only complete coverage prints as one. It is empty if nothing was in service.
func (c Coverage) Decimal() string {
	if c.InServiceUS <= 0 {
		return ""
	}
	observed := intOf(c.InServiceUS - c.UnobservedUS)
	observed.Mul(observed, intOf(1_000_000))
	return decimal(observed.Div(observed, intOf(c.InServiceUS)), microDigits)
}

// NodeCapacity is the time in service of a node's cards of one model.
type NodeCapacity struct {
	Node  string
	Model string
	Cards int
	Coverage
	// OverlapUS is time metered beyond what was in service; zero in order.
	// Rows + unobserved = in service + overlap, exactly.
	OverlapUS int64
	// Hours is InServiceUS as printed.
	Hours Micro
}

// AccountTotal is what an account owes for the period.
type AccountTotal struct {
	Account    string
	CostCentre string
	GPUUS      int64 // card time of its users
	ListAmount Money
	Amount     Money
}

// Unpriced is held time without a price.
type Unpriced struct {
	Node, Model, Profile string
	FirstDay, LastDay    string
	GPUUS                int64
}

// Overlap is a card's day with more metered than it was in service, or with
// more in service than the day is long.
type Overlap struct {
	Day, Node, Card, Model string
	InServiceUS            int64
	MeteredUS              int64
	DayUS                  int64 // length of the day
}

// UserTime is a user's card time.
type UserTime struct {
	User  string
	GPUUS int64
}

// Total is the sum of all accounts.
func (s *Statement) Total() (list, amount Money) {
	for _, account := range s.Accounts {
		list, amount = list.Add(account.ListAmount), amount.Add(account.Amount)
	}
	return list, amount
}

// CapacityHours is the printed capacity of all nodes: the sum of the printed
// capacities, and without overlaps the sum of the printed hours of all lines.
func (s *Statement) CapacityHours() Micro {
	var sum Micro
	for _, capacity := range s.Capacity {
		sum += capacity.Hours
	}
	return sum
}

// lineID is a hash of what makes a line that line. It starts with a letter, so
// that no spreadsheet takes one like 12e45… for a number.
func lineID(period string, lineType LineType, key Key) string {
	encoded := make([]byte, 0, 256)
	for _, part := range [...]string{
		period, string(lineType), key.Account, key.User, key.Project, key.Node,
		key.Model, key.Profile, key.Class, key.Item, key.UnitPrice,
	} {
		// The length keeps "a", "bc" apart from "ab", "c".
		encoded = binary.AppendUvarint(encoded, uint64(len(part)))
		encoded = append(encoded, part...)
	}
	sum := sha256.Sum256(encoded)
	return "L" + hex.EncodeToString(sum[:16])
}

// cleanName makes a name printable anywhere: bytes that are not UTF-8, and
// NUL, become U+FFFD.
func cleanName(name string) string {
	name = strings.ToValidUTF8(name, "\uFFFD")
	if strings.IndexByte(name, 0) >= 0 {
		name = strings.ReplaceAll(name, "\x00", "\uFFFD")
	}
	return name
}
