package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/exporter/usage"
)

// Span is a stretch of time, From included, To not. Both are on a quarter hour.
type Span struct {
	From, To time.Time
}

// Kinds of finding.
const (
	// FindingOverFull: the rows of a card in a bucket add up to more than the bucket.
	FindingOverFull = "over-full"
	// FindingOverlap: two runs metered the same card in the same stretch of time.
	FindingOverlap = "overlap"
)

// Finding is one thing that is wrong with the rows of one card, over one bucket
// or over several that follow each other and are wrong in the same way.
type Finding struct {
	Kind     string
	Card     string
	Devices  []string // the card itself, or its MIG instances
	From, To time.Time
	Buckets  int64
	ExcessUS int64 // card time above what the buckets hold; 0 for an overlap that fits in them
	Runs     []RunUse
}

// RunUse is what one run metered of a card in the buckets of a finding.
type RunUse struct {
	Run   string
	Node  string
	GPUUS int64
}

// String names the card, the time, the excess and the runs on one line.
func (f Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: card %q", f.Kind, f.Card)
	if len(f.Devices) > 1 || (len(f.Devices) == 1 && f.Devices[0] != f.Card) {
		fmt.Fprintf(&b, " devices %q", f.Devices)
	}
	fmt.Fprintf(&b, " %s to %s (%d buckets)", f.From.UTC().Format(time.RFC3339), f.To.UTC().Format(time.RFC3339), f.Buckets)
	if f.ExcessUS > 0 {
		fmt.Fprintf(&b, ", %s more than the time there was", seconds(f.ExcessUS))
	}
	for i, run := range f.Runs {
		separator := ";"
		if i == 0 {
			separator = ":"
		}
		fmt.Fprintf(&b, "%s run %q on node %q metered %s", separator, run.Run, run.Node, seconds(run.GPUUS))
	}
	return b.String()
}

func seconds(us int64) string {
	return fmt.Sprintf("%d.%06d s", us/1_000_000, us%1_000_000)
}

// Audit is what a walk over all rows of a span proves.
type Audit struct {
	Span        Span
	ContentHash string
	Rows        int64
	Cards       int64 // that were in service
	Buckets     int64 // buckets of cards in service
	CapacityUS  int64 // time in service
	HeldUS      int64
	IdleUS      int64
	DownUS      int64
	// ReviewUS is the part of HeldUS in rows that need review before they are
	// billed.
	ReviewUS int64
	// UnobservedUS is what no row covers. HeldUS + IdleUS + DownUS +
	// UnobservedUS = CapacityUS + OverFullUS, and OverFullUS is 0 if all is well.
	UnobservedUS int64
	OverFullUS   int64
	InService    []InService
	Findings     []Finding // in order of card and time
}

// Auditor walks over the rows of a span, one bucket at a time, with memory for
// one bucket and the number of cards.
type Auditor struct {
	audit   Audit
	hash    *ContentHash
	service *service
	open    map[string]*Finding // card → over-full finding that may go on
	runs    map[string]map[string]*runSpan
	cards   map[string]*cardBucket
}

type runSpan struct {
	node        string
	devices     map[string]bool
	first, last int64
	totalUS     int64
}

type cardBucket struct {
	use
	runs    map[string]*RunUse
	devices map[string]bool
}

// AuditInput is what an audit must know beside the rows of the span.
type AuditInput struct {
	Span        Span
	Now         time.Time
	Days        []billing.Day // by which time in service is summed; nil for one sum
	Opening     []Opening
	Retirements []Retirement
	// Last has the start of each card's last bucket in the whole ledger.
	Last map[string]time.Time
}

// NewAuditor begins an audit.
func NewAuditor(in AuditInput) *Auditor {
	days := in.Days
	if days == nil {
		days = []billing.Day{{Start: in.Span.From, End: in.Span.To}}
	}
	return &Auditor{
		audit:   Audit{Span: in.Span},
		hash:    NewContentHash(),
		service: newService(in.Span, in.Now, days, in.Opening, in.Retirements, in.Last),
		open:    make(map[string]*Finding),
		runs:    make(map[string]map[string]*runSpan),
	}
}

// Bucket takes all rows of one bucket, in any order. Buckets must come in order
// of time.
func (a *Auditor) Bucket(rows []usage.Row) {
	if len(rows) == 0 {
		return
	}
	bucket := rows[0].Bucket.Unix()
	a.hash.Bucket(rows)
	a.audit.Rows += int64(len(rows))
	cards := make(map[string]*cardBucket, len(a.cards))
	for i := range rows {
		row := &rows[i]
		switch row.State {
		case usage.StateHeld:
			a.audit.HeldUS += row.GPUUS
			if row.Review {
				a.audit.ReviewUS += row.GPUUS
			}
		case usage.StateIdle:
			a.audit.IdleUS += row.GPUUS
		default:
			a.audit.DownUS += row.GPUUS
		}
		c := cards[row.Card]
		if c == nil {
			c = &cardBucket{use: use{seats: map[Seat]int64{}}, runs: map[string]*RunUse{}, devices: map[string]bool{}}
			cards[row.Card] = c
		}
		c.seats[Seat{row.Node, row.Model}] += row.GPUUS
		c.totalUS += row.GPUUS
		c.devices[row.Device] = true
		run := c.runs[row.Run]
		if run == nil {
			run = &RunUse{Run: row.Run, Node: row.Node}
			c.runs[row.Run] = run
		}
		run.GPUUS += row.GPUUS
		a.runUse(bucket, row)
	}
	for card, c := range cards {
		a.service.row(bucket, card, c.use)
		if c.totalUS > bucketUS {
			a.overFull(bucket, card, c)
		}
	}
	a.cards = cards
}

func (a *Auditor) runUse(bucket int64, row *usage.Row) {
	runs := a.runs[row.Card]
	if runs == nil {
		runs = make(map[string]*runSpan)
		a.runs[row.Card] = runs
	}
	span := runs[row.Run]
	if span == nil {
		span = &runSpan{node: row.Node, first: bucket, devices: map[string]bool{}}
		runs[row.Run] = span
	}
	span.last = bucket
	span.totalUS += row.GPUUS
	span.devices[row.Device] = true
}

func (a *Auditor) overFull(bucket int64, card string, c *cardBucket) {
	excess := c.totalUS - bucketUS
	a.audit.OverFullUS += excess
	runs := make([]RunUse, 0, len(c.runs))
	for _, run := range c.runs {
		runs = append(runs, *run)
	}
	slices.SortFunc(runs, func(x, y RunUse) int { return cmp.Compare(x.Run, y.Run) })
	devices := sortedKeys(c.devices)
	if open := a.open[card]; open != nil && open.To.Unix() == bucket && slices.Equal(open.Devices, devices) &&
		slices.EqualFunc(open.Runs, runs, func(x, y RunUse) bool { return x.Run == y.Run && x.Node == y.Node }) {
		open.To = open.To.Add(usage.BucketLength)
		open.Buckets++
		open.ExcessUS += excess
		for i := range runs {
			open.Runs[i].GPUUS += runs[i].GPUUS
		}
		return
	}
	a.closeFinding(card)
	start := time.Unix(bucket, 0).UTC()
	a.open[card] = &Finding{
		Kind: FindingOverFull, Card: card, Devices: devices,
		From: start, To: start.Add(usage.BucketLength), Buckets: 1, ExcessUS: excess, Runs: runs,
	}
}

func (a *Auditor) closeFinding(card string) {
	if open := a.open[card]; open != nil {
		a.audit.Findings = append(a.audit.Findings, *open)
		delete(a.open, card)
	}
}

// Finish ends the audit.
func (a *Auditor) Finish() Audit {
	for card := range a.open {
		a.closeFinding(card)
	}
	for card, runs := range a.runs {
		a.overlaps(card, runs)
	}
	slices.SortFunc(a.audit.Findings, func(x, y Finding) int {
		return cmp.Or(cmp.Compare(x.Card, y.Card), x.From.Compare(y.From), cmp.Compare(x.Kind, y.Kind), x.To.Compare(y.To))
	})
	a.audit.ContentHash = a.hash.String()
	a.audit.InService, a.audit.Cards = a.service.finish()
	a.audit.Buckets = a.service.buckets
	for _, in := range a.audit.InService {
		a.audit.CapacityUS += in.US
	}
	a.audit.UnobservedUS = a.audit.CapacityUS + a.audit.OverFullUS - a.audit.HeldUS - a.audit.IdleUS - a.audit.DownUS
	return a.audit
}

// overlaps finds runs that went on at the same time on one card. Runs that
// follow each other have at most the bucket in common in which one ended and
// the next began.
func (a *Auditor) overlaps(card string, runs map[string]*runSpan) {
	names := sortedKeys(runs)
	slices.SortStableFunc(names, func(x, y string) int { return cmp.Compare(runs[x].first, runs[y].first) })
	for i, name := range names {
		for _, other := range names[i+1:] {
			x, y := runs[name], runs[other]
			if y.first >= x.last {
				break // later ones begin later still
			}
			end := min(x.last, y.last)
			if y.first == x.first && end == y.first {
				continue // one ended in the bucket in which both began
			}
			devices := sortedKeys(x.devices)
			for device := range y.devices {
				if !x.devices[device] {
					devices = append(devices, device)
				}
			}
			slices.Sort(devices)
			a.audit.Findings = append(a.audit.Findings, Finding{
				Kind: FindingOverlap, Card: card, Devices: devices,
				From:    time.Unix(y.first, 0).UTC(),
				To:      time.Unix(end+bucketSeconds, 0).UTC(),
				Buckets: (end-y.first)/bucketSeconds + 1,
				Runs:    []RunUse{{name, x.node, x.totalUS}, {other, y.node, y.totalUS}},
			})
		}
	}
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}
