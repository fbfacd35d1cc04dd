package billing

import (
	"fmt"
	"math/big"
	"slices"
	"strings"
)

// PerGPUHour is the unit of rates that price gpu_us: card time, split over
// slices and holders.
const PerGPUHour = "gpu_hour"

// rate is one name: which models it prices, and its prices through time.
type rate struct {
	name   string
	gpu    string // glob
	per    string
	prices []price // by from
}

// price is what a rate costs from a day on.
type price struct {
	rate   *rate
	from   string // local day; "" sorts before every day
	micros int64  // millionths of the currency's unit
}

// perUnits are the units that the design knows.
var perUnits = []string{PerGPUHour, "instance_hour", "active_gpu_hour", "reserved_gpu_hour", "gib_hour", "kwh"}

func (b *Book) addRates(configs []RateConfig, found *problems) {
	byName := make(map[string]*rate)
	for i, config := range configs {
		key := fmt.Sprintf("billing.rates[%d]", i)
		if err := checkName(config.Name); err != nil {
			found.add(key+".name", err)
			continue
		}
		gpu, per := config.GPU, config.Per
		if gpu == "" {
			gpu = "*"
		}
		switch {
		case per == "":
			per = PerGPUHour
		case !slices.Contains(perUnits, per):
			found.addf(key+".per", "%q is none of %s", per, strings.Join(perUnits, ", "))
		case per != PerGPUHour:
			found.addf(key+".per", "%q is %w", per, ErrNotSupported)
		}
		history, ok := byName[config.Name]
		if !ok {
			history = &rate{name: config.Name, gpu: gpu, per: per}
			byName[config.Name] = history
			b.rates = append(b.rates, history)
		}
		// A glob that changed through a history would let one edit reprice
		// models that the earlier entries never meant.
		if history.gpu != gpu {
			found.addf(key+".gpu", "%q differs from %q of the earlier entries of rate %q: one name is one history; give it another name", gpu, history.gpu, config.Name)
		}
		if history.per != per {
			found.addf(key+".per", "%q differs from %q of the earlier entries of rate %q: one name is one history; give it another name", per, history.per, config.Name)
		}
		if err := checkDay(config.From); err != nil {
			found.add(key+".from", err)
			continue
		}
		micros, err := parsePrice(string(config.Price))
		if err != nil {
			found.add(key+".price", err)
			continue
		}
		at, taken := slices.BinarySearchFunc(history.prices, config.From, func(p price, from string) int { return strings.Compare(p.from, from) })
		if taken {
			found.addf(key+".from", "rate %q already has a price from %q", config.Name, config.From)
			continue
		}
		history.prices = slices.Insert(history.prices, at, price{rate: history, from: config.From, micros: micros})
	}
}

// priceOf is the price of a unit on a model on a local day: that of the first
// name in file order which matches the model and has a price by then. It is
// nil where there is none, which is not the same as free.
func (b *Book) priceOf(per, model, day string) *price {
	for _, rate := range b.rates {
		if rate.per != per || !globMatch(rate.gpu, model) {
			continue
		}
		for i := len(rate.prices) - 1; i >= 0; i-- {
			if rate.prices[i].from <= day {
				return &rate.prices[i]
			}
		}
	}
	return nil
}

// decimal is the price as statements print it.
func (p *price) decimal(currency Currency) string {
	return decimal(big.NewInt(p.micros), currency.Digits)
}

// globMatch reports whether the whole text matches a pattern in which * stands
// for any text and ? for any character. It takes at most len(pattern) ×
// len(text) steps, whatever the pattern.
func globMatch(pattern, text string) bool {
	glob, runes := []rune(pattern), []rune(text)
	g, r := 0, 0
	star, resume := -1, 0
	for r < len(runes) {
		switch {
		case g < len(glob) && glob[g] == '*':
			star, resume = g, r
			g++
		case g < len(glob) && (glob[g] == '?' || glob[g] == runes[r]):
			g++
			r++
		case star >= 0:
			resume++
			g, r = star+1, resume
		default:
			return false
		}
	}
	for g < len(glob) && glob[g] == '*' {
		g++
	}
	return g == len(glob)
}
