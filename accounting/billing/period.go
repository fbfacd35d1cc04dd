package billing

import (
	"errors"
	"fmt"
	"time"
	_ "time/tzdata" // a bill must not depend on which zones a host has installed
)

const dayLayout = "2006-01-02"

// Period is one calendar month of a time zone.
type Period struct {
	Name     string    // YYYY-MM
	Start    time.Time // first instant of the month, in Location
	End      time.Time // first instant after it
	Location *time.Location
}

// ErrPeriod is the error of a period that is not a month.
var ErrPeriod = errors.New("not a month of the form YYYY-MM")

// ParsePeriod reads a month such as "2026-11" in the zone of the price book.
func ParsePeriod(text string, location *time.Location) (Period, error) {
	month, err := time.Parse("2006-01", text)
	if err != nil || month.Year() < 1 {
		return Period{}, fmt.Errorf("period %q: %w", text, ErrPeriod)
	}
	return Period{
		Name:     text,
		Start:    StartOfDay(month.Year(), month.Month(), 1, location),
		End:      StartOfDay(month.Year(), month.Month()+1, 1, location),
		Location: location,
	}, nil
}

// PeriodAt is the month that holds an instant.
func PeriodAt(instant time.Time, location *time.Location) Period {
	local := instant.In(location)
	period, err := ParsePeriod(local.Format("2006-01"), location)
	if err != nil { // only years beyond 9999
		return Period{Location: location}
	}
	return period
}

// StartOfDay is the first instant at which the zone's calendar shows the day.
// Where clocks are put forward at midnight that is not 00:00, and where they
// are put back over midnight it is the first 00:00 of two: both are more than
// time.Date promises. Edges lie on quarter hours of UTC, as buckets do.
func StartOfDay(year int, month time.Month, day int, location *time.Location) time.Time {
	noon := time.Date(year, month, day, 12, 0, 0, 0, time.UTC)
	target := noon.Format(dayLayout)
	// Zones lie between 12 hours behind UTC and 14 ahead of it.
	at := noon.Add(-28 * time.Hour)
	for at.In(location).Format(dayLayout) < target {
		at = at.Add(15 * time.Minute)
	}
	return at.In(location)
}

// Day is one local day of a period.
type Day struct {
	Name       string // YYYY-MM-DD
	Start, End time.Time
}

// LengthUS is the length of the day in microseconds: 24 hours, but where
// clocks are changed.
func (d Day) LengthUS() int64 { return d.End.Sub(d.Start).Microseconds() }

// LengthUS is the length of the period in microseconds.
func (p Period) LengthUS() int64 { return p.End.Sub(p.Start).Microseconds() }

// Days are the local days of the period, in order. Their lengths add up to its
// length.
func (p Period) Days() []Day {
	month, err := time.Parse("2006-01", p.Name)
	if err != nil {
		return nil
	}
	var days []Day
	for date := month; date.Month() == month.Month(); date = date.AddDate(0, 0, 1) {
		next := date.AddDate(0, 0, 1)
		days = append(days, Day{
			Name:  date.Format(dayLayout),
			Start: StartOfDay(date.Year(), date.Month(), date.Day(), p.Location),
			End:   StartOfDay(next.Year(), next.Month(), next.Day(), p.Location),
		})
	}
	return days
}
