package meter

import (
	"cmp"
	"math/big"
	"math/bits"
	"slices"
)

// surplus is how much each party has been given beyond its exact share so far:
// a rational strictly between -1 and 1 while the set of parties stays the same.
// With parties that come and go no rule that must hand out whole units at once
// can keep every party below one unit (docs/metering.md has the four-party
// counter-example); giving the odd units to those with the smallest surplus
// keeps it as small as an on-line rule can.
type surplus[K comparable] map[K]*big.Rat

// apportion splits total into whole parts in proportion to weights, so that
// the parts add up to total exactly. The units that do not divide go to the
// parties that are furthest below their exact share, counting what carry says
// they were given before; ties go to the earlier party. parties and carry may
// be nil, for a split that remembers nothing. If all weights are zero every part is zero.
func apportion[K comparable](total int64, parties []K, weights []int64, carry surplus[K]) []int64 {
	parts := make([]int64, len(weights))
	var sum int64
	for _, weight := range weights {
		sum += weight
	}
	if sum == 0 || total == 0 {
		return parts
	}
	type claim struct {
		index     int
		remainder int64 // of total × weight ÷ sum, in units of 1/sum
	}
	claims := make([]claim, len(weights))
	left := total
	for i, weight := range weights {
		high, low := bits.Mul64(uint64(total), uint64(weight))
		quotient, remainder := bits.Div64(high, low, uint64(sum))
		parts[i] = int64(quotient)
		left -= parts[i]
		claims[i] = claim{index: i, remainder: int64(remainder)}
	}
	if left == 0 {
		return parts
	}
	if carry == nil {
		slices.SortStableFunc(claims, func(a, b claim) int { return cmp.Compare(b.remainder, a.remainder) })
		for _, c := range claims[:left] {
			parts[c.index]++
		}
		return parts
	}
	// owed is the exact fraction less the surplus: the larger, the more due.
	owed := make([]*big.Rat, len(parties))
	for _, c := range claims {
		owed[c.index] = big.NewRat(c.remainder, sum)
		if before, ok := carry[parties[c.index]]; ok {
			owed[c.index].Sub(owed[c.index], before)
		}
	}
	slices.SortStableFunc(claims, func(a, b claim) int { return owed[b.index].Cmp(owed[a.index]) })
	one := big.NewRat(1, 1)
	for rank, c := range claims {
		given := owed[c.index].Neg(owed[c.index])
		if int64(rank) < left {
			parts[c.index]++
			given.Add(given, one)
		}
		if given.Sign() == 0 {
			delete(carry, parties[c.index])
			continue
		}
		carry[parties[c.index]] = given
	}
	return parts
}

// equally is apportion among parties of the same weight.
func equally[K comparable](total int64, parties []K, carry surplus[K]) []int64 {
	if len(parties) == 1 {
		return []int64{total}
	}
	weights := make([]int64, len(parties))
	for i := range weights {
		weights[i] = 1
	}
	return apportion(total, parties, weights, carry)
}
