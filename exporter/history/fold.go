package history

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"gpuledger/exporter/usage"
)

// Bounds of one answer: an exporter may use 48 MiB in all.
const (
	maxRows      = 100_000
	maxStretches = 10_000
)

// lagAllowed is how far the journal may lag behind the clock: rows are written
// every few seconds, and an interval waits up to ten for names.
const lagAllowed = 2 * time.Minute

// settling is how much of the newest bucket may be on its way to the journal;
// less than that is not called unobserved there.
const settling = 30 * time.Second

// party is what makes rows of consecutive buckets one stretch. For others'
// rows what they are not to be told is empty, so that it splits nothing either.
type party struct {
	card, device, profile          string
	slices, of                     int64
	state, user                    string
	uid                            int64
	kind, workload, project, class string
}

func partyOf(row *usage.Row, whole bool) party {
	p := party{
		card: row.Card, device: row.Device, profile: row.Profile, slices: row.Slices, of: row.Of,
		state: row.State, user: row.User, uid: row.UID, kind: row.Kind,
	}
	if whole {
		p.workload, p.project, p.class = row.Workload, row.Project, row.Class
	}
	return p
}

// card is what is known of a card beside its stretches.
type card struct {
	index    int
	model    string
	observed map[int64]int64 // bucket's start in seconds → gpu_us of all its rows
}

// fold makes stretches of rows that come newest bucket first.
type fold struct {
	reader        Reader
	rowsLeft      int
	mostStretches int

	cards  map[string]*card
	done   []*stretch           // every stretch, in the order in which they end
	newest map[party]*stretch   // which of these may still grow backwards
	bucket time.Time            // the one that rows are of now
	now    map[party]*stretch   // its stretches, not yet joined to what follows
	seen   map[string]cardShare // of the bucket, by card

	cut time.Time // where the bounds ended it; zero if they didn't
}

type stretch struct {
	party
	from, to time.Time // of buckets
	detail   *Detail
}

// cardShare is what one bucket tells of a card.
type cardShare struct {
	index int
	model string
	gpuUS int64
}

func newFold(reader Reader) *fold {
	return &fold{
		reader: reader, rowsLeft: maxRows, mostStretches: maxStretches,
		cards: map[string]*card{}, newest: map[party]*stretch{}, now: map[party]*stretch{}, seen: map[string]cardShare{},
	}
}

// add takes a row. It returns false once a bound is reached: then the bucket of
// that row and all before it are left out.
func (f *fold) add(row *usage.Row) bool {
	if !row.Bucket.Equal(f.bucket) {
		if !f.join() {
			return false
		}
		f.bucket = row.Bucket
	}
	if f.rowsLeft--; f.rowsLeft < 0 {
		f.endBefore(row.Bucket)
		return false
	}
	whole := f.reader.sees(row)
	p := partyOf(row, whole)
	s := f.now[p]
	if s == nil {
		s = &stretch{party: p, from: row.Bucket, to: row.Bucket.Add(usage.BucketLength)}
		if whole {
			s.detail = &Detail{Workload: row.Workload, Project: row.Project, Class: row.Class, AttributedBy: row.AttributedBy}
		}
		f.now[p] = s
	}
	if whole {
		s.detail.add(row.Amounts, row.PeakMemoryBytes, row.Estimated)
	}
	share := f.seen[row.Card]
	share.index, share.model, share.gpuUS = row.Index, row.Model, share.gpuUS+row.GPUUS
	f.seen[row.Card] = share
	return true
}

func (d *Detail) add(amounts usage.Amounts, peak int64, estimated bool) {
	d.Amounts = d.Amounts.Plus(amounts)
	d.PeakMemoryBytes = max(d.PeakMemoryBytes, peak)
	d.Estimated = d.Estimated || estimated
}

// endBefore leaves the bucket under way out.
func (f *fold) endBefore(bucket time.Time) {
	f.cut = bucket.Add(usage.BucketLength)
	clear(f.now)
	clear(f.seen)
}

// join joins the stretches of a bucket that is whole to those that follow it.
func (f *fold) join() bool {
	if f.cut.IsZero() && len(f.done)+len(f.now) > f.mostStretches {
		f.endBefore(f.bucket)
	}
	if !f.cut.IsZero() {
		return false
	}
	for p, s := range f.now {
		if later := f.newest[p]; later != nil && later.from.Equal(s.to) {
			later.from = s.from
			if later.detail != nil {
				later.detail.add(s.detail.Amounts, s.detail.PeakMemoryBytes, s.detail.Estimated)
			}
			continue
		}
		f.newest[p] = s
		f.done = append(f.done, s)
	}
	for uuid, share := range f.seen {
		c := f.cards[uuid]
		if c == nil { // the newest row names it
			c = &card{index: share.index, model: share.model, observed: map[int64]int64{}}
			f.cards[uuid] = c
		}
		c.observed[f.bucket.Unix()] += share.gpuUS
	}
	clear(f.now)
	clear(f.seen)
	return true
}

// span is what was asked for and what there is.
type span struct {
	from      time.Time // asked for
	begins    time.Time // the journal's earliest bucket; zero if it is empty
	committed time.Time // up to where rows tell everything
	now       time.Time
	node      string
}

// answer ends the fold.
func (f *fold) answer(s span) Answer {
	f.join()
	a := Answer{
		Version: Version, Node: s.node, AnsweredAt: s.now.UTC(), BucketSeconds: int64(usage.BucketLength / time.Second),
		From: s.from, To: s.committed, All: f.reader.All, Missing: []Missing{}, Cards: []Card{},
	}
	if f.reader.Known {
		uid := int64(f.reader.UID)
		a.ViewerUID = &uid
	}
	if !s.begins.IsZero() {
		a.JournalBegins = &s.begins
		if s.begins.After(a.From) {
			a.From = s.begins
		}
	}
	if !f.cut.IsZero() {
		a.From = f.cut
		a.Missing = append(a.Missing, Missing{What: MissingOlder, Message: fmt.Sprintf(
			"one answer takes %d rows and %d stretches: what was before %s is left out", maxRows, maxStretches, f.cut.Format(time.RFC3339))})
	}
	if a.To.Before(a.From) {
		a.To = a.From
	}
	if lag := s.now.Sub(s.committed); !s.begins.IsZero() && lag > lagAllowed {
		a.Missing = append(a.Missing, Missing{What: MissingNewer, Message: fmt.Sprintf(
			"the journal is written up to %s, %s ago: see the exporter's log", s.committed.Format(time.RFC3339), lag.Round(time.Second))})
	}
	byCard := map[string][]Stretch{}
	for _, each := range f.done {
		byCard[each.card] = append(byCard[each.card], each.shown(a.To))
	}
	for uuid, c := range f.cards {
		stretches := append(byCard[uuid], c.unobserved(uuid, a.From, a.To)...)
		slices.SortFunc(stretches, newestFirst)
		a.Cards = append(a.Cards, Card{Index: c.index, UUID: uuid, Model: c.model, Stretches: stretches})
	}
	slices.SortFunc(a.Cards, func(x, y Card) int { return cmp.Or(cmp.Compare(x.Index, y.Index), strings.Compare(x.UUID, y.UUID)) })
	return a
}

func (s *stretch) shown(to time.Time) Stretch {
	shown := Stretch{
		Device: s.device, Profile: s.profile, Slices: s.slices, Of: s.of, State: s.state, User: s.user, Kind: s.kind,
		From: s.from, To: s.to, Detail: s.detail,
	}
	if s.to.After(to) && to.After(s.from) {
		shown.To = to
	}
	if s.state == usage.StateHeld && s.uid >= 0 {
		shown.UID = &s.uid
	}
	return shown
}

// unobserved are the stretches of a card's time that no row tells of: what its
// rows lack of each bucket (law L1).
func (c *card) unobserved(uuid string, from, to time.Time) []Stretch {
	var list []Stretch
	for start := from; start.Before(to); start = start.Add(usage.BucketLength) {
		end, slack := start.Add(usage.BucketLength), int64(0)
		if end.After(to) {
			end, slack = to, settling.Microseconds()
		}
		lackUS := end.Sub(start).Microseconds() - c.observed[start.Unix()]
		if lackUS <= slack { // less than nothing where runs overlap
			continue
		}
		amounts := usage.Amounts{GPUUS: lackUS, ShareUS: lackUS}
		if last := len(list) - 1; last >= 0 && list[last].To.Equal(start) {
			list[last].To = end
			list[last].Detail.add(amounts, 0, false)
			continue
		}
		list = append(list, Stretch{Device: uuid, Slices: 1, Of: 1, State: StateUnobserved, From: start, To: end, Detail: &Detail{Amounts: amounts}})
	}
	return list
}

func newestFirst(a, b Stretch) int {
	rank := func(s Stretch) int {
		return slices.Index([]string{usage.StateHeld, usage.StateIdle, usage.StateDown, StateUnobserved}, s.State)
	}
	workload := func(s Stretch) string {
		if s.Detail == nil {
			return ""
		}
		return s.Detail.Workload + "\x00" + s.Detail.Project + "\x00" + s.Detail.Class
	}
	uid := func(s Stretch) int64 {
		if s.UID == nil {
			return -1
		}
		return *s.UID
	}
	return cmp.Or(
		b.To.Compare(a.To), b.From.Compare(a.From), cmp.Compare(rank(a), rank(b)), strings.Compare(a.User, b.User), cmp.Compare(uid(a), uid(b)),
		strings.Compare(a.Kind, b.Kind), strings.Compare(workload(a), workload(b)), strings.Compare(a.Device, b.Device),
		cmp.Compare(a.Slices, b.Slices), cmp.Compare(a.Of, b.Of), strings.Compare(a.Profile, b.Profile))
}
