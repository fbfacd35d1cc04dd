package billing

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
)

// microDigits is the number of decimals of everything that is counted in
// millionths: money, printed hours, quantities.
const microDigits = 6

// Money is an exact amount of a currency in millionths of its unit. It has no
// upper bound and is never changed once made; the zero value is no money.
type Money struct{ micros *big.Int }

// MoneyFromMicros is that many millionths of the currency's unit.
func MoneyFromMicros(micros *big.Int) Money { return Money{micros: new(big.Int).Set(micros)} }

// Micros is the amount in millionths, as a copy.
func (m Money) Micros() *big.Int {
	if m.micros == nil {
		return new(big.Int)
	}
	return new(big.Int).Set(m.micros)
}

// Add is the sum of both.
func (m Money) Add(other Money) Money {
	sum := m.Micros()
	return Money{micros: sum.Add(sum, other.Micros())}
}

// Compare is -1, 0 or 1.
func (m Money) Compare(other Money) int { return m.Micros().Cmp(other.Micros()) }

// Equal reports whether both are the same amount.
func (m Money) Equal(other Money) bool { return m.Compare(other) == 0 }

// Decimal writes the amount with the decimals of the currency. An amount finer
// than that is written with as many decimals as it needs, never rounded.
func (m Money) Decimal(currency Currency) string {
	return decimal(m.Micros(), currency.Digits)
}

// Micro is a printed quantity in millionths: of an hour, a GiB-hour, a kWh.
type Micro int64

// String writes all six decimals.
func (m Micro) String() string { return decimal(big.NewInt(int64(m)), microDigits) }

// decimal writes millionths with at least digits decimals and as many more as
// are not zero.
func decimal(micros *big.Int, digits int) string {
	text := new(big.Int).Abs(micros).String()
	if missing := microDigits + 1 - len(text); missing > 0 {
		text = strings.Repeat("0", missing) + text
	}
	whole, fraction := text[:len(text)-microDigits], text[len(text)-microDigits:]
	for len(fraction) > digits && fraction[len(fraction)-1] == '0' {
		fraction = fraction[:len(fraction)-1]
	}
	if fraction != "" {
		whole += "." + fraction
	}
	if micros.Sign() < 0 {
		return "-" + whole
	}
	return whole
}

// maxWholeDigits bounds prices so that their millionths fit 63 bits.
const maxWholeDigits = 12

// parsePrice reads a decimal that is not negative ("6.00", "0") into
// millionths. No sign, exponent, separator or space is allowed: what a price
// means must not depend on who reads it.
func parsePrice(text string) (int64, error) {
	whole, fraction, point := strings.Cut(text, ".")
	if !digitsOnly(whole) || whole == "" || (point && (!digitsOnly(fraction) || fraction == "")) {
		return 0, fmt.Errorf(`%q is not a decimal such as "6.00"`, text)
	}
	whole = strings.TrimLeft(whole, "0")
	if len(whole) > maxWholeDigits {
		return 0, fmt.Errorf("%q has more than %d digits before the point", text, maxWholeDigits)
	}
	fraction = strings.TrimRight(fraction, "0")
	if len(fraction) > microDigits {
		return 0, fmt.Errorf("%q has more than %d decimals", text, microDigits)
	}
	return strconv.ParseInt("0"+whole+fraction+strings.Repeat("0", microDigits-len(fraction)), 10, 64)
}

func digitsOnly(text string) bool {
	for _, r := range text {
		if r < '0' || r > '9' {
			return false
		}
	}
	return true
}
