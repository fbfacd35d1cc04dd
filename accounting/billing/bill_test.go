package billing

import (
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"gpuledger/exporter/usage"
)

const hourUS = int64(3_600_000_000)

// fataler is what testing.T, testing.B and rapid.T have in common.
type fataler interface {
	Helper()
	Fatal(args ...any)
}

func mustBook(t fataler, config Config, accounts ...AccountConfig) *Book {
	t.Helper()
	book, err := NewBook(config, accounts, nil)
	if err != nil {
		t.Fatal(err)
	}
	return book
}

func mustPeriod(t fataler, name string, book *Book) Period {
	t.Helper()
	period, err := ParsePeriod(name, book.Location)
	if err != nil {
		t.Fatal(err)
	}
	return period
}

func mustBill(t fataler, book *Book, period Period, usages []Usage, capacity []Capacity) Statement {
	t.Helper()
	statement, err := Bill(book, period, usages, capacity)
	if err != nil {
		t.Fatal(err)
	}
	return statement
}

func held(day, user string, us int64) Usage {
	return Usage{Day: day, Node: "gpu01", Card: "GPU-1", Model: "NVIDIA A100", State: usage.StateHeld, User: user,
		Amounts: usage.Amounts{GPUUS: us, HeldUS: us, ShareUS: us}}
}

func amounts(s Statement) map[string]string {
	found := make(map[string]string)
	for _, line := range s.Lines {
		if line.Charge != nil {
			found[line.User] = line.Charge.Amount.Decimal(s.Currency)
		}
	}
	return found
}

// The tables of a published cost report whose rounded rows do not add up to
// their own total: 3.43 + 2.57 + 1.72 for 18 slice hours at 3/7, and
// 444 + 333 + 222 for 1000.
func TestLargestRemainderVectors(t *testing.T) {
	for _, test := range []struct {
		name        string
		numerators  []int64
		denominator int64
		want        []int64
	}{
		{"18 slice hours at 3/7 in cents", []int64{8 * 300, 6 * 300, 4 * 300}, 7, []int64{343, 257, 171}},
		{"1000.00 over 8, 6 and 4 in cents", []int64{8 * 100000, 6 * 100000, 4 * 100000}, 18, []int64{44445, 33333, 22222}},
		{"ties go to the first", []int64{1, 1, 1}, 3, []int64{1, 0, 0}},
		{"nothing to nobody", []int64{0, 3, 0}, 2, []int64{0, 2, 0}},
		{"a half is rounded up once", []int64{1, 0}, 2, []int64{1, 0}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var numerators []*big.Int
			sum := new(big.Int)
			for _, n := range test.numerators {
				numerators = append(numerators, big.NewInt(n))
				sum.Add(sum, big.NewInt(n))
			}
			total := roundHalfUp(sum, big.NewInt(test.denominator))
			var got []int64
			for _, part := range apportion(total, numerators, big.NewInt(test.denominator)) {
				got = append(got, part.Int64())
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
			scaled := apportionScaled(total.Int64(), test.numerators, ratio{1, test.denominator})
			if !slices.Equal(scaled, test.want) {
				t.Errorf("scaled: got %v, want %v", scaled, test.want)
			}
		})
	}
}

func TestRoundingIsOncePerAccount(t *testing.T) {
	book := mustBook(t, Config{Currency: "CNY", Rates: []RateConfig{{Name: "a100", Price: "1.00"}}},
		AccountConfig{Name: "lab", Members: []MemberConfig{{User: "a"}, {User: "b"}, {User: "c"}}})
	third := hourUS / 3
	s := mustBill(t, book, mustPeriod(t, "2026-11", book),
		[]Usage{held("2026-11-01", "a", third), held("2026-11-01", "b", third), held("2026-11-01", "c", third)},
		[]Capacity{{"2026-11-01", "gpu01", "GPU-1", "NVIDIA A100", hourUS}})
	want := map[string]string{"a": "0.34", "b": "0.33", "c": "0.33"}
	if got := amounts(s); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	var printed []string
	for _, line := range s.Lines[:3] {
		printed = append(printed, line.Hours.GPUHours.String())
	}
	if want := []string{"0.333334", "0.333333", "0.333333"}; !slices.Equal(printed, want) {
		t.Errorf("hours %v, want %v", printed, want)
	}
}

func TestMinorUnits(t *testing.T) {
	for currency, want := range map[string]string{"JPY": "4", "CNY": "3.50", "KWD": "3.500", "CLF": "3.5000"} {
		book := mustBook(t, Config{Currency: currency, Rates: []RateConfig{{Name: "r", Price: "3.5"}}})
		s := mustBill(t, book, mustPeriod(t, "2026-11", book), []Usage{held("2026-11-01", "a", hourUS)}, nil)
		if got := amounts(s)["a"]; got != want {
			t.Errorf("%s: got %s, want %s", currency, got, want)
		}
	}
}

func TestPrices(t *testing.T) {
	book := mustBook(t, Config{Currency: "CNY", Rates: []RateConfig{
		{Name: "a100", GPU: "NVIDIA A100*", Price: "6.00", From: "2026-11-02"},
		{Name: "free", GPU: "NVIDIA T4", Price: "0"},
		{Name: "any", GPU: "* A*", Price: "1"},
		{Name: "a100", GPU: "NVIDIA A100*", Price: "7.5", From: "2026-11-03"},
	}})
	usages := []Usage{held("2026-11-01", "u", hourUS), held("2026-11-02", "u", hourUS), held("2026-11-30", "u", 2*hourUS)}
	for _, model := range []string{"NVIDIA T4", "NVIDIA H200"} {
		other := held("2026-11-05", "u", hourUS)
		other.Card, other.Model = "GPU-"+model, model
		usages = append(usages, other)
	}
	s := mustBill(t, book, mustPeriod(t, "2026-11", book), usages, nil)
	var got []string
	for _, line := range s.Lines {
		if c := line.Charge; c != nil {
			got = append(got, fmt.Sprintf("%s %s × %s = %s", line.Item, c.Quantity, line.UnitPrice, c.Amount.Decimal(s.Currency)))
		}
	}
	want := []string{
		"a100 1.000000 × 6.00 = 6.00", "a100 2.000000 × 7.50 = 15.00", "any 1.000000 × 1.00 = 1.00",
		"free 1.000000 × 0.00 = 0.00",
	}
	if !slices.Equal(got, want) {
		t.Errorf("charges:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	wantUnpriced := []Unpriced{{"gpu01", "NVIDIA H200", "", "2026-11-05", "2026-11-05", hourUS}}
	if !reflect.DeepEqual(s.Unpriced, wantUnpriced) {
		t.Errorf("unpriced %+v, want %+v", s.Unpriced, wantUnpriced)
	}
}

func TestWhoPays(t *testing.T) {
	uid := int64(1001)
	book, err := NewBook(Config{}, []AccountConfig{
		{Name: "vision-lab", Projects: []string{"vision"}, Members: []MemberConfig{{User: "alice", Until: "2026-11-10"}, {User: "bob", From: "2026-11-15"}, {User: "dan", Share: "0%"}}},
		{Name: "text-lab", Projects: []string{"text"}, Members: []MemberConfig{{User: "alice", From: "2026-11-10"}, {User: "carol", UID: &uid, Node: "gpu01"}, {User: "dan", Share: "100%"}}},
	}, []IdentityConfig{{Node: "gpu02", User: "alice2", As: "alice"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		user          string
		uid           int64
		node, project string
		day           string
		want          string
	}{
		{"alice", 1, "gpu01", "", "2026-11-09", "vision-lab"},
		{"alice", 1, "gpu01", "", "2026-11-10", "text-lab"},
		{"alice", 1, "gpu01", "vision", "2026-11-10", "text-lab"},
		{"bob", 2, "gpu01", "vision", "2026-11-14", AccountUnassigned},
		{"bob", 2, "gpu01", "text", "2026-11-15", "vision-lab"},
		{"carol", 1001, "gpu01", "", "2026-11-01", "text-lab"},
		{"carol", 1002, "gpu01", "", "2026-11-01", AccountUnassigned},
		{"carol", 1001, "gpu02", "", "2026-11-01", AccountUnassigned},
		{"dan", 5, "gpu01", "", "2026-11-01", "text-lab"},
		{"dan", 5, "gpu01", "vision", "2026-11-01", "vision-lab"},
		{"unattributed", -1, "gpu01", "vision", "2026-11-01", AccountUnassigned},
	} {
		if got := book.payer(test.user, test.uid, test.node, test.project, test.day); got != test.want {
			t.Errorf("%+v: got %s", test, got)
		}
	}
	if got := book.knownAs("gpu02", "alice2"); got != "alice" {
		t.Errorf("alice2 of gpu02 is %s", got)
	}
	if got := book.knownAs("gpu01", "alice2"); got != "alice2" {
		t.Errorf("alice2 of gpu01 is %s", got)
	}
}

func TestOverlapIsReportedAndHidesNothing(t *testing.T) {
	book := mustBook(t, Config{Rates: []RateConfig{{Name: "r", Price: "1"}}})
	day := "2026-11-01"
	s := mustBill(t, book, mustPeriod(t, "2026-11", book),
		[]Usage{held(day, "a", 2*hourUS)},
		[]Capacity{{day, "gpu01", "GPU-1", "NVIDIA A100", hourUS}, {day, "gpu01", "GPU-2", "NVIDIA A100", 3 * hourUS}, {day, "gpu01", "GPU-3", "NVIDIA A100", 25 * hourUS}})
	want := []Overlap{
		{day, "gpu01", "GPU-1", "NVIDIA A100", hourUS, 2 * hourUS, 24 * hourUS},
		{day, "gpu01", "GPU-3", "NVIDIA A100", 25 * hourUS, 0, 24 * hourUS},
	}
	if !reflect.DeepEqual(s.Overlaps, want) {
		t.Errorf("got %+v, want %+v", s.Overlaps, want)
	}
	c := s.Capacity[0]
	if c.UnobservedUS != 28*hourUS || c.OverlapUS != hourUS || c.InServiceUS != 29*hourUS || c.Cards != 3 {
		t.Errorf("capacity %+v", c)
	}
}

func TestBillRefuses(t *testing.T) {
	book := mustBook(t, Config{})
	period := mustPeriod(t, "2026-11", book)
	good := held("2026-11-01", "a", hourUS)
	outside, state, negative := good, good, good
	outside.Day, state.State, negative.EnergyMJ = "2026-12-01", "sleeping", -5
	huge := good
	huge.MemoryKiBSeconds = 1 << 62
	for name, usages := range map[string][]Usage{
		`"2026-12-01" is not in period`: {outside}, `state "sleeping"`: {state}, "energy_mj is -5": {negative},
		"memory_kib_seconds: the sum passes 63 bits": {huge, huge},
	} {
		if _, err := Bill(book, period, usages, nil); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	for name, capacity := range map[string][]Capacity{
		"is not in period": {{"2026-10-31", "n", "c", "m", 1}}, "negative": {{"2026-11-01", "n", "c", "m", -1}},
		"both models": {{"2026-11-01", "n", "c", "m", 1}, {"2026-11-01", "n", "c", "m2", 1}},
	} {
		if _, err := Bill(book, period, nil, capacity); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestBigMoneyDoesNotOverflow(t *testing.T) {
	book := mustBook(t, Config{Currency: "UYW", Rates: []RateConfig{{Name: "r", Price: "999999999999.999999"}}})
	period := mustPeriod(t, "2026-11", book)
	var usages []Usage
	for card := range 100 {
		for _, day := range period.Days() {
			u := held(day.Name, "a", day.LengthUS())
			u.Card = fmt.Sprintf("GPU-%d", card)
			usages = append(usages, u)
		}
	}
	s := mustBill(t, book, period, usages, nil)
	if got, want := amounts(s)["a"], "71999999999999999.9280"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestShowbackOwesNothing(t *testing.T) {
	book := mustBook(t, Config{Mode: "showback", Rates: []RateConfig{{Name: "r", Price: "2"}}})
	s := mustBill(t, book, mustPeriod(t, "2026-11", book), []Usage{held("2026-11-01", "a", hourUS)}, nil)
	list, amount := s.Total()
	if list.Decimal(s.Currency) != "2.00" || amount.Decimal(s.Currency) != "0.00" {
		t.Errorf("list %s, amount %s", list.Decimal(s.Currency), amount.Decimal(s.Currency))
	}
}

// TestBillAgainstBruteForce recounts random months with rationals and nested
// loops over the input, sharing no code with Bill.
func TestBillAgainstBruteForce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		currency := rapid.SampledFrom([]string{"JPY", "CNY", "KWD"}).Draw(t, "currency")
		digits := map[string]int{"JPY": 0, "CNY": 2, "KWD": 3}[currency]
		prices := map[string]string{"A": rapid.SampledFrom([]string{"0", "0.333333", "6.04", "1234567.89"}).Draw(t, "price A"), "B": "1.7"}
		config := Config{Timezone: "America/New_York", Currency: currency, Rates: []RateConfig{
			{Name: "a", GPU: "A", Price: Text(prices["A"])}, {Name: "b", GPU: "B", Price: Text(prices["B"])}}}
		book := mustBook(t, config,
			AccountConfig{Name: "one", Members: []MemberConfig{{User: "u1"}, {User: "u2", Until: "2026-03-08"}}},
			AccountConfig{Name: "two", Members: []MemberConfig{{User: "u2", From: "2026-03-08"}, {User: "u3"}}})
		account := func(user, day string) string {
			switch {
			case user == "u1", user == "u2" && day < "2026-03-08":
				return "one"
			case user == "u2", user == "u3":
				return "two"
			}
			return "unassigned"
		}
		period := mustPeriod(t, "2026-03", book)

		var usages []Usage
		var capacity []Capacity
		for card, model := range []string{"A", "A", "B", "C"} {
			for _, day := range []string{"2026-03-01", "2026-03-07", "2026-03-08", "2026-03-31"} {
				length := rapid.Int64Range(0, 23*hourUS).Draw(t, "in service")
				where := Capacity{day, fmt.Sprintf("gpu%02d", card%2), fmt.Sprintf("GPU-%d", card), model, length}
				capacity = append(capacity, where)
				left := length
				for range rapid.IntRange(0, 6).Draw(t, "groups") {
					us := rapid.Int64Range(0, left).Draw(t, "gpu_us")
					left -= us
					u := Usage{Day: day, Node: where.Node, Card: where.Card, Model: model, UID: -1,
						State:   rapid.SampledFrom([]string{"held", "held", "held", "idle", "down"}).Draw(t, "state"),
						Amounts: usage.Amounts{GPUUS: us, EnergyMJ: rapid.Int64Range(0, 1e12).Draw(t, "mJ")}}
					if u.State == "held" {
						u.User = rapid.SampledFrom([]string{"u1", "u2", "u3", "stranger"}).Draw(t, "user")
						u.Project = rapid.SampledFrom([]string{"", "p"}).Draw(t, "project")
					}
					usages = append(usages, u)
				}
			}
		}
		s := mustBill(t, book, period, usages, capacity)

		// Hours: by node and model, printed lines = printed capacity, and
		// every line within one printed unit of its exact time.
		for _, node := range []string{"gpu00", "gpu01"} {
			for _, model := range []string{"A", "B", "C"} {
				var us, printed, exact int64
				for _, c := range capacity {
					if c.Node == node && c.Model == model {
						us += c.InServiceUS
					}
				}
				for _, line := range s.Lines {
					if line.Hours != nil && line.Node == node && line.Model == model {
						printed += int64(line.Hours.GPUHours)
						exact += line.Hours.GPUUS
						if off := int64(line.Hours.GPUHours)*3600 - line.Hours.GPUUS; off <= -3600 || off >= 3600 {
							t.Fatalf("line %+v is printed %d µs off", line.Key, off)
						}
					}
				}
				if exact != us {
					t.Fatalf("%s %s: lines have %d µs, capacity %d", node, model, exact, us)
				}
				if want := (us + 1800) / 3600; printed != want {
					t.Fatalf("%s %s: lines print %d millionths of an hour, capacity %d", node, model, printed, want)
				}
			}
		}
		// Money: for each account, users and lines.
		scale := new(big.Rat).SetInt(new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(digits)), nil))
		exactOf := func(match func(Usage) bool) *big.Rat {
			sum := new(big.Rat)
			for _, u := range usages {
				if u.State != "held" || prices[u.Model] == "" || !match(u) {
					continue
				}
				price, _ := new(big.Rat).SetString(prices[u.Model])
				sum.Add(sum, price.Mul(price, big.NewRat(u.GPUUS, hourUS)))
			}
			return sum.Mul(sum, scale) // in minor units
		}
		minorOf := func(match func(Line) bool) *big.Rat {
			sum := new(big.Rat)
			for _, line := range s.Lines {
				if line.Charge != nil && match(line) {
					amount, ok := new(big.Rat).SetString(line.Charge.Amount.Decimal(s.Currency))
					if !ok {
						t.Fatalf("amount %q is no number", line.Charge.Amount.Decimal(s.Currency))
					}
					sum.Add(sum, amount)
				}
			}
			return sum.Mul(sum, scale)
		}
		within := func(what string, got, exact *big.Rat) {
			off := new(big.Rat).Sub(got, exact)
			if off.Abs(off).Cmp(big.NewRat(1, 1)) >= 0 || !got.IsInt() {
				t.Fatalf("%s: %s minor units for an exact %s", what, got.FloatString(6), exact.FloatString(6))
			}
		}
		for _, name := range []string{"one", "two", "unassigned"} {
			exact := exactOf(func(u Usage) bool { return account(u.User, u.Day) == name })
			half := new(big.Rat).Add(exact, big.NewRat(1, 2))
			rounded := new(big.Rat).SetInt(new(big.Int).Div(half.Num(), half.Denom()))
			if got := minorOf(func(l Line) bool { return l.Account == name }); got.Cmp(rounded) != 0 {
				t.Fatalf("account %s: lines add up to %s, its total is %s", name, got.FloatString(3), rounded.FloatString(3))
			}
			for _, user := range []string{"u1", "u2", "u3", "stranger"} {
				within(name+" "+user,
					minorOf(func(l Line) bool { return l.Account == name && l.User == user }),
					exactOf(func(u Usage) bool { return account(u.User, u.Day) == name && u.User == user }))
				for _, model := range []string{"A", "B"} {
					for _, node := range []string{"gpu00", "gpu01"} {
						for _, project := range []string{"", "p"} {
							within(strings.Join([]string{name, user, model, node, project}, " "),
								minorOf(func(l Line) bool {
									return l.Account == name && l.User == user && l.Model == model && l.Node == node && l.Project == project
								}),
								exactOf(func(u Usage) bool {
									return account(u.User, u.Day) == name && u.User == user && u.Model == model && u.Node == node && u.Project == project
								}))
						}
					}
				}
			}
		}
		// Quantities of a usage line's charges are its hours.
		for _, line := range s.Lines {
			if line.Type != LineUsage || prices[line.Model] == "" || line.Hours.GPUUS == 0 {
				continue
			}
			var quantity Micro
			for _, other := range s.Lines {
				key := other.Key
				key.Item, key.UnitPrice = "", ""
				if other.Charge != nil && key == line.Key {
					quantity += other.Charge.Quantity
				}
			}
			if quantity != line.Hours.GPUHours {
				t.Fatalf("%+v: charged %s, used %s", line.Key, quantity, line.Hours.GPUHours)
			}
		}
		// Order of the input, and doing it again.
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		random.Shuffle(len(usages), func(i, j int) { usages[i], usages[j] = usages[j], usages[i] })
		random.Shuffle(len(capacity), func(i, j int) { capacity[i], capacity[j] = capacity[j], capacity[i] })
		if again := mustBill(t, book, period, usages, capacity); !reflect.DeepEqual(s, again) {
			t.Fatal("the statement depends on the order of its input")
		}
		ids := make(map[string]bool)
		for _, line := range s.Lines {
			if ids[line.ID] || line.ID == "" {
				t.Fatalf("line id %q is there twice", line.ID)
			}
			ids[line.ID] = true
		}
	})
}

func TestConfigErrorsNameTheKey(t *testing.T) {
	_, err := NewBook(Config{
		Timezone: "Local", Currency: "RMB", Mode: "free", MinimumCoverage: "1.5", Tariffs: []any{1},
		Rates: []RateConfig{
			{Name: "", Price: "1"}, {Name: "a", Price: "-1"}, {Name: "b", Price: "1e3"}, {Name: "c", Per: "kwh", Price: "1"},
			{Name: "d", Per: "hours", Price: "1"}, {Name: "e", Price: "1", From: "2026-02-30"},
			{Name: "f", GPU: "A", Price: "1"}, {Name: "f", GPU: "B", Price: "1", From: "2026-02-01"}, {Name: "f", GPU: "A", Price: "2"},
			{Name: "g", Price: "0.0000001"},
		},
	}, []AccountConfig{
		{Name: "unassigned"},
		{Name: "x", Projects: []string{"p", "p"}, Budget: "lots", Members: []MemberConfig{
			{User: "u"}, {User: "v", Share: "50%"}, {User: "w", From: "2026-02-01", Until: "2026-02-01"}, {User: "", From: "x"}}},
		{Name: "y", Members: []MemberConfig{{User: "u", From: "2026-05-01"}}},
	}, []IdentityConfig{{User: "a"}})
	var got []string
	for _, one := range err.(interface{ Unwrap() []error }).Unwrap() {
		var config *ConfigError
		if !errors.As(one, &config) {
			t.Fatalf("%v is no ConfigError", one)
		}
		got = append(got, config.Key)
		wantUnsupported := slices.Contains([]string{"billing.tariffs", "billing.rates[3].per", "accounts[1].members[1].share"}, config.Key)
		if errors.Is(one, ErrNotSupported) != wantUnsupported {
			t.Errorf("%v: not supported is %v", one, !wantUnsupported)
		}
	}
	want := []string{
		"billing.timezone", "billing.currency", "billing.mode", "billing.minimum_coverage", "billing.tariffs",
		"billing.rates[0].name", "billing.rates[1].price", "billing.rates[2].price", "billing.rates[3].per",
		"billing.rates[4].per", "billing.rates[5].from", "billing.rates[7].gpu", "billing.rates[8].from", "billing.rates[9].price",
		"accounts[0].name", "accounts[1].budget", "accounts[1].projects[1]", "accounts[1].members[1].share",
		"accounts[1].members[2].until", "accounts[1].members[3].user", "accounts[2].members[0]", "identities[0].as",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
}

func TestGlob(t *testing.T) {
	for _, test := range []struct {
		pattern, text string
		want          bool
	}{
		{"*", "", true}, {"", "", true}, {"", "x", false}, {"NVIDIA A100*", "NVIDIA A100-SXM4-80GB", true},
		{"NVIDIA A100*", "NVIDIA A10", false}, {"*A100*80GB", "NVIDIA A100 80GB", true}, {"*ab*ab", "abab", true},
		{"*ab*ab", "ab", false}, {"显?", "显卡", true}, {"[a]*", "[a]b", true},
		{strings.Repeat("*a", 50) + "b", strings.Repeat("a", 5000), false},
	} {
		if got := globMatch(test.pattern, test.text); got != test.want {
			t.Errorf("%q on %q: got %v", test.pattern, test.text, got)
		}
	}
}

// TestBillIsLinear counts allocations, not time: four times the groups must
// not take much more than four times the work.
func TestBillIsLinear(t *testing.T) {
	book := mustBook(t, Config{Rates: []RateConfig{{Name: "r", Price: "6.04"}}})
	period := mustPeriod(t, "2026-11", book)
	cost := func(groups int) float64 {
		usages, capacity := load(period, groups)
		return testing.AllocsPerRun(1, func() { mustBill(t, book, period, usages, capacity) })
	}
	small, large := cost(5_000), cost(20_000)
	if large > 6*small {
		t.Errorf("%.0f allocations for 5,000 groups, %.0f for 20,000", small, large)
	}
}

func load(period Period, groups int) ([]Usage, []Capacity) {
	days := period.Days()
	usages := make([]Usage, groups)
	for i := range usages {
		usages[i] = held(days[i%len(days)].Name, fmt.Sprintf("user%d", i%997), 1_000_003)
		usages[i].Card, usages[i].Node = fmt.Sprintf("GPU-%d", i%100), fmt.Sprintf("gpu%02d", i%100/8)
		usages[i].Project = fmt.Sprintf("p%d", i%13)
	}
	var capacity []Capacity
	for card := range 100 {
		for _, day := range days {
			capacity = append(capacity, Capacity{day.Name, fmt.Sprintf("gpu%02d", card/8), fmt.Sprintf("GPU-%d", card), "NVIDIA A100", day.LengthUS()})
		}
	}
	return usages, capacity
}

func BenchmarkBill200kGroups(b *testing.B) {
	book := mustBook(b, Config{Rates: []RateConfig{{Name: "r", Price: "6.04"}}})
	period := mustPeriod(b, "2026-11", book)
	usages, capacity := load(period, 200_000)
	b.ReportAllocs()
	for b.Loop() {
		mustBill(b, book, period, usages, capacity)
	}
}

// A line that is priced in part is charged for that part only.
func TestPartlyPriced(t *testing.T) {
	book := mustBook(t, Config{Rates: []RateConfig{{Name: "r", Price: "1", From: "2026-11-02"}}})
	s := mustBill(t, book, mustPeriod(t, "2026-11", book), []Usage{held("2026-11-01", "a", 1800), held("2026-11-02", "a", 2700)}, nil)
	if got := s.Lines[0].Hours.GPUHours; got != 1 {
		t.Errorf("used %s", got)
	}
	if got := s.Lines[1].Charge; got.Quantity != 1 || got.QuantityUS != 2700 {
		t.Errorf("charged %s, %d µs", got.Quantity, got.QuantityUS)
	}
	more := mustBill(t, book, mustPeriod(t, "2026-11", book), []Usage{held("2026-11-01", "a", 2700), held("2026-11-02", "a", 1800)}, nil)
	if got := more.Lines[1].Charge.Quantity; got != 0 {
		t.Errorf("charged %s for half a printed unit, though the other part had the larger remainder", got)
	}
	if got := more.Unpriced; len(got) != 1 || got[0].GPUUS != 2700 || got[0].LastDay != "2026-11-01" {
		t.Errorf("unpriced %+v", got)
	}
}
