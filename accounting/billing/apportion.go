package billing

import (
	"cmp"
	"math/big"
	"slices"
)

// The method of largest remainders: a total that was rounded once is handed
// out to its parts, each of which gets its exact share rounded down, and the
// units left over go one each to the parts with the largest fractions. Ties go
// to the part that stands first, so callers put parts in the order of their
// immutable keys. No part is ever a unit or more off its exact share, and a
// part whose exact share is zero gets nothing.

// apportion hands out total over the exact shares numerators[i]/denominator.
// total must be the sum of the shares, rounded to one of its two neighbours.
func apportion(total *big.Int, numerators []*big.Int, denominator *big.Int) []*big.Int {
	parts := make([]*big.Int, len(numerators))
	remainders := make([]*big.Int, len(numerators))
	left := new(big.Int).Set(total)
	for i, numerator := range numerators {
		parts[i], remainders[i] = new(big.Int).DivMod(numerator, denominator, new(big.Int))
		left.Sub(left, parts[i])
	}
	one := big.NewInt(1)
	for _, i := range largest(len(parts), left.Int64(), func(a, b int) int { return remainders[a].Cmp(remainders[b]) }) {
		parts[i].Add(parts[i], one)
	}
	return parts
}

// apportionScaled is apportion for amounts of 63 bits whose exact share is
// scale × amount.
func apportionScaled(total int64, amounts []int64, scale ratio) []int64 {
	parts := make([]int64, len(amounts))
	remainders := make([]int64, len(amounts))
	left := total
	for i, amount := range amounts {
		parts[i], remainders[i] = scale.floor(amount)
		left -= parts[i]
	}
	for _, i := range largest(len(parts), left, func(a, b int) int { return cmp.Compare(remainders[a], remainders[b]) }) {
		parts[i]++
	}
	return parts
}

// largest is the indices of the count largest of n remainders.
func largest(n int, count int64, compare func(a, b int) int) []int {
	if count <= 0 {
		return nil
	}
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return compare(b, a) })
	return order[:min(count, int64(n))]
}

// roundHalfUp is numerator/denominator rounded to the nearest integer, halves
// up. Neither may be negative.
func roundHalfUp(numerator, denominator *big.Int) *big.Int {
	doubled := new(big.Int).Lsh(numerator, 1)
	doubled.Add(doubled, denominator)
	return doubled.Div(doubled, new(big.Int).Lsh(denominator, 1))
}

// ratio turns an integer amount into printed millionths.
type ratio struct{ numerator, denominator int64 }

var (
	// Microseconds to millionths of an hour; millijoules to millionths of a
	// kWh is the same figure.
	hourScale = ratio{1, 3600}
	// KiB-seconds to millionths of a GiB-hour: 10^6 / (2^20 × 3600).
	gibHourScale = ratio{625, 2359296}
)

// floor is the scaled amount rounded down, and what is left of it in units of
// 1/denominator. It does not overflow for any amount that is not negative.
func (r ratio) floor(amount int64) (quotient, remainder int64) {
	whole, rest := amount/r.denominator, amount%r.denominator
	scaled := rest * r.numerator
	return whole*r.numerator + scaled/r.denominator, scaled % r.denominator
}

// round is the scaled amount rounded to the nearest integer, halves up.
func (r ratio) round(amount int64) int64 {
	quotient, remainder := r.floor(amount)
	if 2*remainder >= r.denominator {
		quotient++
	}
	return quotient
}
