package ledger

import (
	"cmp"
	"slices"
	"sort"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/exporter/usage"
)

// Seat is where a card sits and what it says it is. Time in service is counted
// by seat, so that it can be priced by node and model.
type Seat struct {
	Node  string
	Model string
}

// Retirement ends the time in service of one card, or of every card of a node.
// Exactly one of Node and Card is set. A row of a later bucket puts a card back
// into service.
type Retirement struct {
	Node string
	Card string
	At   time.Time // on a quarter hour
}

// Opening is what is known of a card before a period: its last row until then.
type Opening struct {
	Card   string
	Seat   Seat
	Bucket time.Time // of the card's last row before the period
}

// InService is how long a card was in service in one day on one seat.
type InService struct {
	Day  string
	Card string
	Seat Seat
	US   int64 // microseconds
}

// service follows every card through a period, bucket by bucket, and adds up
// the time it was in service: from its first row until it is retired, or until
// the period ends, or until now, but never ending before its last row does.
type service struct {
	from, to    int64 // epoch seconds
	now         int64 // floored to a quarter hour
	days        []billing.Day
	dayStarts   []int64
	retirements []Retirement
	last        map[string]int64 // card → start of its last bucket in the whole ledger
	cards       map[string]*cardService
	inService   map[inServiceKey]int64
	buckets     int64 // card-buckets in service, begun ones too
}

type cardService struct {
	seat    Seat
	covered int64 // counted up to here; the end of the last row's bucket or later
}

type inServiceKey struct {
	day  int
	card string
	seat Seat
}

func newService(period Span, now time.Time, days []billing.Day, opening []Opening, retirements []Retirement, last map[string]time.Time) *service {
	s := &service{
		from: period.From.Unix(), to: period.To.Unix(),
		now:  now.Unix() - now.Unix()%bucketSeconds,
		days: days, retirements: retirements,
		last:      make(map[string]int64, len(last)),
		cards:     make(map[string]*cardService),
		inService: make(map[inServiceKey]int64),
	}
	for _, day := range days {
		s.dayStarts = append(s.dayStarts, day.Start.Unix())
	}
	for card, bucket := range last {
		s.last[card] = bucket.Unix()
	}
	for _, o := range opening {
		s.cards[o.Card] = &cardService{seat: o.Seat, covered: o.Bucket.Unix() + bucketSeconds}
	}
	return s
}

// use is what one card's rows of one bucket add up to, by seat.
type use struct {
	seats   map[Seat]int64 // Σ gpu_us
	totalUS int64
}

// row counts one bucket of one card that has rows.
func (s *service) row(bucket int64, card string, u use) {
	c := s.cards[card]
	if c == nil {
		c = &cardService{covered: bucket}
		s.cards[card] = c
	} else {
		s.silence(c, card, bucket)
	}
	// A card that moves in mid-bucket has rows on two seats. The seat it left has
	// what its rows say, the seat it came to has the rest of the bucket.
	seats := make([]Seat, 0, len(u.seats))
	for seat := range u.seats {
		seats = append(seats, seat)
	}
	slices.SortFunc(seats, func(a, b Seat) int {
		if before := boolCompare(a == c.seat, b == c.seat); before != 0 {
			return before
		}
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Model, b.Model))
	})
	left := bucketUS
	for i, seat := range seats {
		part := min(left, u.seats[seat])
		if i == len(seats)-1 {
			part = left
		}
		s.add(bucket, card, seat, part)
		left -= part
		c.seat = seat
	}
	s.buckets++
	c.covered = bucket + bucketSeconds
}

// boolCompare orders true before false.
func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	default:
		return 1
	}
}

// silence counts the time from a card's last row to the next one, or to the end
// of what is counted. Nothing came of the card, so it is all unobserved, unless
// the card was retired.
func (s *service) silence(c *cardService, card string, until int64) {
	end := until
	for _, r := range s.retirements {
		if (r.Card == card || (r.Card == "" && r.Node == c.seat.Node)) && r.At.Unix() >= c.covered {
			end = min(end, r.At.Unix())
		}
	}
	from := max(c.covered, s.from)
	for from < end {
		next := end
		if day := s.day(from); day+1 < len(s.dayStarts) {
			next = min(next, s.dayStarts[day+1])
		}
		s.add(from, card, c.seat, (next-from)*1_000_000)
		s.buckets += (next - from) / bucketSeconds
		from = next
	}
	c.covered = max(c.covered, until)
}

func (s *service) add(at int64, card string, seat Seat, us int64) {
	s.inService[inServiceKey{s.day(at), card, seat}] += us
}

func (s *service) day(at int64) int {
	return max(0, sort.Search(len(s.dayStarts), func(i int) bool { return s.dayStarts[i] > at })-1)
}

// finish counts every card to the end and returns the time in service in order
// of day, card, node and model, and the number of cards that were in service.
func (s *service) finish() (list []InService, cards int64) {
	for card, c := range s.cards {
		end := min(s.to, max(s.now, s.last[card]+bucketSeconds))
		s.silence(c, card, end)
	}
	seen := make(map[string]bool)
	for key, us := range s.inService {
		if us == 0 {
			continue
		}
		seen[key.card] = true
		list = append(list, InService{Day: s.days[key.day].Name, Card: key.card, Seat: key.seat, US: us})
	}
	slices.SortFunc(list, func(a, b InService) int {
		return cmp.Or(cmp.Compare(a.Day, b.Day), cmp.Compare(a.Card, b.Card),
			cmp.Compare(a.Seat.Node, b.Seat.Node), cmp.Compare(a.Seat.Model, b.Seat.Model))
	})
	return list, int64(len(seen))
}

// CeilQuarter rounds a time up to the next quarter hour of UTC: a retirement
// takes effect at the end of the bucket it falls in, because that bucket's rows
// may still count time until then.
func CeilQuarter(at time.Time) time.Time {
	floor := at.Truncate(usage.BucketLength)
	if floor.Equal(at) {
		return floor.UTC()
	}
	return floor.Add(usage.BucketLength).UTC()
}
