package billing

import (
	"errors"
	"fmt"
	"math/big"
	"time"
)

// Mode says whether a statement is a bill.
type Mode string

const (
	// ModeCharge bills: amounts are owed.
	ModeCharge Mode = "charge"
	// ModeShowback shows what usage would have cost: list amounts are filled
	// in, amounts are zero.
	ModeShowback Mode = "showback"
)

// Book is a checked price book: what usage costs and who pays. It is never
// changed once made.
type Book struct {
	Location *time.Location
	Currency Currency
	Mode     Mode
	// MinimumCoverage is the least coverage, 0–1, with which a period may be
	// closed.
	MinimumCoverage *big.Rat
	Accounts        []Account // in file order

	rates      []*rate // in file order of their names' first entries
	members    map[string][]membership
	projects   map[string]string // project to account
	costCentre map[string]string // account to cost centre
	identities map[identity]string
}

// Account is who pays.
type Account struct {
	Name       string
	CostCentre string
	Managers   []string
	Projects   []string
	// Budget is a month's, in millionths; nil if there is none.
	Budget *Money
}

// AccountUnassigned is the account of usage for which nobody is named to pay.
const AccountUnassigned = "unassigned"

// NewBook checks the sections billing, accounts and identities of a
// configuration. The error holds one *ConfigError for each value that can't be
// used.
func NewBook(config Config, accounts []AccountConfig, identities []IdentityConfig) (*Book, error) {
	var found problems
	book := &Book{
		Location:        time.UTC,
		Currency:        currencies[NoCurrency],
		Mode:            ModeCharge,
		MinimumCoverage: big.NewRat(95, 100),
	}
	if config.Timezone != "" {
		// "Local" would make the bill depend on the host it is written on.
		location, err := time.LoadLocation(config.Timezone)
		if err != nil || config.Timezone == "Local" {
			found.addf("billing.timezone", "%q is not an IANA time zone such as Asia/Shanghai", config.Timezone)
		} else {
			book.Location = location
		}
	}
	if config.Currency != "" {
		currency, ok := ParseCurrency(config.Currency)
		if !ok {
			found.addf("billing.currency", "%q is not an ISO 4217 code such as CNY", config.Currency)
		}
		book.Currency = currency
	}
	switch mode := Mode(config.Mode); mode {
	case "":
	case ModeCharge, ModeShowback:
		book.Mode = mode
	default:
		found.addf("billing.mode", "%q is neither %q nor %q", config.Mode, ModeCharge, ModeShowback)
	}
	if config.MinimumCoverage != "" {
		micros, err := parsePrice(string(config.MinimumCoverage))
		if err != nil || micros > 1_000_000 {
			found.addf("billing.minimum_coverage", "%q is not a ratio from 0 to 1", config.MinimumCoverage)
		} else {
			book.MinimumCoverage = big.NewRat(micros, 1_000_000)
		}
	}
	for _, section := range []struct {
		key    string
		values []any
	}{{"billing.tariffs", config.Tariffs}, {"billing.classes", config.Classes}, {"billing.pools", config.Pools}} {
		if len(section.values) > 0 {
			found.add(section.key, ErrNotSupported)
		}
	}
	book.addRates(config.Rates, &found)
	book.addAccounts(accounts, &found)
	book.addIdentities(identities, &found)
	if err := found.err(); err != nil {
		return nil, err
	}
	return book, nil
}

// checkDay accepts a local day YYYY-MM-DD, or nothing.
func checkDay(text string) error {
	if text == "" {
		return nil
	}
	if _, err := time.Parse(dayLayout, text); err != nil {
		return fmt.Errorf("%q is not a day of the form YYYY-MM-DD", text)
	}
	return nil
}

// checkName accepts text that can name something on a statement.
func checkName(text string) error {
	switch {
	case text == "":
		return errors.New("must not be empty")
	case text != cleanName(text):
		return fmt.Errorf("%q is not valid UTF-8, or holds a NUL", text)
	}
	return nil
}
