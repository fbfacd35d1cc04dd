package billing

import (
	"cmp"
	"maps"
	"math/big"
	"slices"
	"strings"
)

// microsecondsPerHour × the millionths of a price is what microseconds ×
// millionths of a price must be divided by for whole units of the currency.
const microsecondsPerHour = 3_600_000_000

// addCharges prices the usage lines: exact amounts with one common
// denominator, summed and rounded once per account, then handed out to the
// account's users and to each user's lines.
func (b *biller) addCharges(statement *Statement, hours []*hoursLine) {
	// All amounts are kept as numerators of one denominator, in minor units of
	// the currency: price millionths × µs / (10^6 × µs per hour) × 10^digits.
	minorMicros := power10(microDigits - b.book.Currency.Digits)
	denominator := new(big.Int).Mul(intOf(microsecondsPerHour), minorMicros)

	var charges []*pendingCharge
	accounts := make(map[string]*AccountTotal)
	for _, line := range hours {
		if line.Type != LineUsage {
			continue
		}
		charges = append(charges, line.charges(b.book.Currency)...)
		account, ok := accounts[line.Account]
		if !ok {
			account = &AccountTotal{Account: line.Account, CostCentre: b.book.costCentre[line.Account]}
			accounts[line.Account] = account
		}
		account.GPUUS += line.Hours.GPUUS
	}
	slices.SortFunc(charges, func(x, y *pendingCharge) int { return x.Key.compare(y.Key) })

	for ofAccount := range runs(charges, func(c *pendingCharge) string { return c.Account }) {
		var users [][]*pendingCharge
		var userSums []*big.Int
		total := new(big.Int)
		for ofUser := range runs(ofAccount, func(c *pendingCharge) string { return c.User }) {
			sum := new(big.Int)
			for _, charge := range ofUser {
				sum.Add(sum, charge.numerator)
			}
			users, userSums = append(users, ofUser), append(userSums, sum)
			total.Add(total, sum)
		}
		rounded := roundHalfUp(total, denominator)
		for i, userTotal := range apportion(rounded, userSums, denominator) {
			numerators := make([]*big.Int, len(users[i]))
			for j, charge := range users[i] {
				numerators[j] = charge.numerator
			}
			for j, minor := range apportion(userTotal, numerators, denominator) {
				users[i][j].Charge.ListAmount = Money{micros: minor.Mul(minor, minorMicros)}
			}
		}
		accounts[ofAccount[0].Account].ListAmount = Money{micros: rounded.Mul(rounded, minorMicros)}
	}

	for _, charge := range charges {
		if b.book.Mode != ModeShowback {
			charge.Charge.Amount = charge.Charge.ListAmount
		}
		statement.Lines = append(statement.Lines, charge.Line)
	}
	for _, name := range slices.Sorted(maps.Keys(accounts)) {
		account := accounts[name]
		if b.book.Mode != ModeShowback {
			account.Amount = account.ListAmount
		}
		statement.Accounts = append(statement.Accounts, *account)
	}
}

// pendingCharge is a charge line and its exact amount.
type pendingCharge struct {
	Line
	numerator *big.Int
}

// charges are the charges of a usage line, one for each price it met. The
// printed hours of the line are handed out to them and to what has no price.
func (l *hoursLine) charges(currency Currency) []*pendingCharge {
	slices.SortFunc(l.priced, func(x, y pricedTime) int {
		return cmp.Or(strings.Compare(x.price.rate.name, y.price.rate.name), cmp.Compare(x.price.micros, y.price.micros))
	})
	times := make([]int64, 0, len(l.priced)+1)
	for _, part := range l.priced {
		times = append(times, part.us)
	}
	quantities := apportionScaled(int64(l.Hours.GPUHours), append(times, l.unpricedUS), hourScale)
	charges := make([]*pendingCharge, len(l.priced))
	for i, part := range l.priced {
		charge := &pendingCharge{
			Line: Line{Type: LineCharge, Key: l.Key, Charge: &Charge{
				QuantityUS: part.us, Quantity: Micro(quantities[i]), Unit: part.price.rate.per,
			}},
			numerator: new(big.Int).Mul(intOf(part.us), intOf(part.price.micros)),
		}
		charge.Item = part.price.rate.name
		charge.UnitPrice = part.price.decimal(currency)
		charges[i] = charge
	}
	return charges
}

// runs yields the stretches of neighbours that have the same key.
func runs[T any](items []T, key func(T) string) func(yield func([]T) bool) {
	return func(yield func([]T) bool) {
		for start := 0; start < len(items); {
			end := start + 1
			for end < len(items) && key(items[end]) == key(items[start]) {
				end++
			}
			if !yield(items[start:end]) {
				return
			}
			start = end
		}
	}
}

func power10(exponent int) *big.Int {
	return new(big.Int).Exp(intOf(10), intOf(int64(exponent)), nil)
}

func listUnpriced(statement *Statement, hours []*hoursLine) {
	type key struct{ node, model, profile string }
	found := make(map[key]*Unpriced)
	for _, line := range hours {
		if line.unpricedUS == 0 {
			continue
		}
		k := key{line.Node, line.Model, line.Profile}
		u, ok := found[k]
		if !ok {
			u = &Unpriced{Node: k.node, Model: k.model, Profile: k.profile, FirstDay: line.firstDay}
			found[k] = u
		}
		u.FirstDay, u.LastDay = min(u.FirstDay, line.firstDay), max(u.LastDay, line.lastDay)
		u.GPUUS += line.unpricedUS // part of the node's and model's checked sum
	}
	for _, u := range found {
		statement.Unpriced = append(statement.Unpriced, *u)
	}
	slices.SortFunc(statement.Unpriced, func(a, b Unpriced) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Model, b.Model), strings.Compare(a.Profile, b.Profile))
	})
}

func listUnassigned(statement *Statement, hours []*hoursLine) {
	found := make(map[string]int64)
	for _, line := range hours {
		if line.Type == LineUsage && line.Account == AccountUnassigned {
			found[line.User] += line.Hours.GPUUS
		}
	}
	for _, user := range slices.Sorted(maps.Keys(found)) {
		statement.Unassigned = append(statement.Unassigned, UserTime{User: user, GPUUS: found[user]})
	}
}
