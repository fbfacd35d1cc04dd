package billing

import (
	"errors"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

func TestMonths(t *testing.T) {
	for _, test := range []struct {
		zone, month string
		hours       string // length
		start       string
	}{
		{"Asia/Shanghai", "2026-11", "720h0m0s", "2026-11-01T00:00:00+08:00"},
		{"America/New_York", "2026-03", "743h0m0s", "2026-03-01T00:00:00-05:00"},
		{"America/New_York", "2026-11", "721h0m0s", "2026-11-01T00:00:00-04:00"},
		{"Europe/Berlin", "2026-03", "743h0m0s", "2026-03-01T00:00:00+01:00"},
		{"Europe/Berlin", "2026-10", "745h0m0s", "2026-10-01T00:00:00+02:00"},
		{"Australia/Lord_Howe", "2026-04", "720h30m0s", "2026-04-01T00:00:00+11:00"},
		{"Australia/Lord_Howe", "2026-10", "743h30m0s", "2026-10-01T00:00:00+10:30"},
		{"Asia/Kathmandu", "2026-02", "672h0m0s", "2026-02-01T00:00:00+05:45"},
		// The month begins in the hour that clocks skip.
		{"America/Asuncion", "2017-10", "743h0m0s", "2017-10-01T01:00:00-03:00"},
		// The clocks go from 01:00 back to 00:00: the first 00:00 counts.
		{"America/Havana", "2026-11", "721h0m0s", "2026-11-01T00:00:00-04:00"},
		// 30 December never was.
		{"Pacific/Apia", "2011-12", "720h0m0s", "2011-12-01T00:00:00-10:00"},
		{"UTC", "2028-02", "696h0m0s", "2028-02-01T00:00:00Z"},
		{"Asia/Shanghai", "2026-12", "744h0m0s", "2026-12-01T00:00:00+08:00"},
	} {
		location, err := time.LoadLocation(test.zone)
		if err != nil {
			t.Fatal(err)
		}
		period, err := ParsePeriod(test.month, location)
		if err != nil {
			t.Fatal(err)
		}
		if got := period.End.Sub(period.Start).String(); got != test.hours {
			t.Errorf("%s %s is %s long, want %s", test.zone, test.month, got, test.hours)
		}
		if got := period.Start.Format(time.RFC3339); got != test.start {
			t.Errorf("%s %s starts %s, want %s", test.zone, test.month, got, test.start)
		}
		at := period.Start
		for _, day := range period.Days() {
			if !day.Start.Equal(at) {
				t.Errorf("%s: %s starts %s, the day before ends %s", test.zone, day.Name, day.Start, at)
			}
			at = day.End
		}
		if !at.Equal(period.End) {
			t.Errorf("%s %s: its last day ends %s, not %s", test.zone, test.month, at, period.End)
		}
		for _, instant := range []time.Time{period.Start, period.End.Add(-time.Second)} {
			if got := PeriodAt(instant.UTC(), location); got.Name != test.month {
				t.Errorf("%s: %s is in %s, want %s", test.zone, instant, got.Name, test.month)
			}
		}
	}
	for _, bad := range []string{"", "2026", "2026-13", "2026-1", "2026-11-01", "26-11", "2026-11 "} {
		if _, err := ParsePeriod(bad, time.UTC); !errors.Is(err, ErrPeriod) {
			t.Errorf("%q: got %v", bad, err)
		}
	}
}

func TestConfigFromYAML(t *testing.T) {
	const file = `
billing:
  timezone: Asia/Shanghai
  currency: CNY
  minimum_coverage: 0.90
  rates:
    - {name: a100, gpu: "NVIDIA A100*", per: gpu_hour, price: 6.10, from: 2026-01-01}
    - {name: rest, price: "0", from: }
accounts:
  - {name: lab, cost_centre: 0042, managers: [wang], projects: [vision], budget: 5000.00, members: [{user: alice, uid: 1001, from: 2026-01-01, share: 100%}]}
identities: [{node: gpu02, user: alice2, as: alice}]
`
	var config struct {
		Billing    Config           `yaml:"billing"`
		Accounts   []AccountConfig  `yaml:"accounts"`
		Identities []IdentityConfig `yaml:"identities"`
	}
	if err := yaml.UnmarshalWithOptions([]byte(file), &config, yaml.Strict()); err != nil {
		t.Fatal(err)
	}
	book, err := NewBook(config.Billing, config.Accounts, config.Identities)
	if err != nil {
		t.Fatal(err)
	}
	if got := book.priceOf(PerGPUHour, "NVIDIA A100-80", "2026-11-01").decimal(book.Currency); got != "6.10" {
		t.Errorf("price %s", got)
	}
	if got := book.MinimumCoverage.FloatString(2); got != "0.90" {
		t.Errorf("minimum coverage %s", got)
	}
	if got := book.Accounts[0]; got.CostCentre != "0042" || got.Budget.Decimal(book.Currency) != "5000.00" {
		t.Errorf("account %+v, budget %s", got, got.Budget.Decimal(book.Currency))
	}
}
