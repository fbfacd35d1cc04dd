package billing

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"strings"

	"gpuledger/exporter/usage"
)

// Bill writes the statement of a period from all its usage and capacity. The
// order of both does not matter, and the same input gives the same statement.
// What is wrong with the measured world (overlaps, missing prices, users nobody
// pays for) is in the statement; an error means input that can't be used: a
// day outside the period, an unknown state, a negative amount, a sum beyond 63
// bits.
func Bill(book *Book, period Period, usages []Usage, capacity []Capacity) (Statement, error) {
	b := biller{
		book:   book,
		days:   make(map[string]int64),
		cards:  make(map[cardDay]*cardTime),
		nodes:  make(map[nodeModel]*nodeTime),
		lines:  make(map[hoursKey]*hoursLine),
		prices: make(map[modelDay]*price),
		names:  make(map[string]string),
	}
	for _, day := range period.Days() {
		b.days[day.Name] = day.LengthUS()
	}
	for i := range capacity {
		if err := b.addCapacity(&capacity[i], period); err != nil {
			return Statement{}, err
		}
	}
	if err := b.nameModels(usages); err != nil {
		return Statement{}, err
	}
	for i := range usages {
		if err := b.addUsage(&usages[i], period); err != nil {
			return Statement{}, err
		}
	}
	statement := Statement{Period: period, Status: StatusOpen, Mode: book.Mode, Currency: book.Currency, HasAccounts: len(book.Accounts) > 0}
	if err := b.addUnobserved(&statement); err != nil {
		return Statement{}, err
	}
	hours := b.orderedHours()
	if err := b.printHours(hours); err != nil {
		return Statement{}, err
	}
	size := len(hours)
	for _, line := range hours {
		size += len(line.priced)
	}
	statement.Lines = make([]Line, 0, size)
	for _, line := range hours {
		statement.Lines = append(statement.Lines, line.Line)
	}
	b.addCharges(&statement, hours)
	listUnpriced(&statement, hours)
	listUnassigned(&statement, hours)
	for i := range statement.Lines {
		line := &statement.Lines[i]
		line.ID = lineID(period.Name, line.Type, line.Key)
		line.CostCentre = book.costCentre[line.Account]
		line.Coverage = b.nodes[nodeModel{line.Node, line.Model}].Coverage
	}
	return statement, nil
}

// biller is the state of one run of Bill.
type biller struct {
	book   *Book
	days   map[string]int64 // length of the period's days, in microseconds
	cards  map[cardDay]*cardTime
	nodes  map[nodeModel]*nodeTime
	lines  map[hoursKey]*hoursLine
	prices map[modelDay]*price
	names  map[string]string // raw name to printable name
	// meteredUS is the card time of all rows: no sum of parts of it overflows.
	meteredUS int64
}

type cardDay struct{ day, node, card string }

type cardTime struct {
	model       string
	inServiceUS int64
	meteredUS   int64
}

type nodeModel struct{ node, model string }

type nodeTime struct {
	NodeCapacity
	cards map[string]struct{}
}

type modelDay struct{ model, day string }

type hoursKey struct {
	lineType LineType
	Key
}

// hoursLine is a line of hours in the making, and how it is priced.
type hoursLine struct {
	Line
	priced []pricedTime
	// Time without a price, and its first and last day.
	unpricedUS        int64
	firstDay, lastDay string
}

type pricedTime struct {
	price *price
	us    int64
}

func (b *biller) clean(name string) string {
	if name == "" {
		return ""
	}
	cleaned, ok := b.names[name]
	if !ok {
		cleaned = cleanName(name)
		b.names[name] = cleaned
	}
	return cleaned
}

func (b *biller) addCapacity(c *Capacity, period Period) error {
	key := cardDay{c.Day, b.clean(c.Node), b.clean(c.Card)}
	if _, ok := b.days[c.Day]; !ok {
		return fmt.Errorf("capacity of card %s on %s: day %q is not in period %s", key.card, key.node, c.Day, period.Name)
	}
	if c.InServiceUS < 0 {
		return fmt.Errorf("capacity of card %s on %s, %s: in service for %d µs, which is negative", key.card, key.node, c.Day, c.InServiceUS)
	}
	card, model := b.card(key), b.clean(c.Model)
	if card.model != "" && model != "" && card.model != model {
		return fmt.Errorf("capacity of card %s on %s, %s: given for both models %q and %q", key.card, key.node, c.Day, card.model, model)
	}
	card.model = cmp.Or(model, card.model)
	return add(&card.inServiceUS, c.InServiceUS)
}

func (b *biller) card(key cardDay) *cardTime {
	card, ok := b.cards[key]
	if !ok {
		card = &cardTime{}
		b.cards[key] = card
	}
	return card
}

// nameModels settles which model a card is on a day, so that its usage and its
// capacity meet on the same lines: what its capacity says, else the first of
// the names in its usage.
func (b *biller) nameModels(usages []Usage) error {
	unnamed := make(map[cardDay]string)
	for i := range usages {
		key := cardDay{usages[i].Day, b.clean(usages[i].Node), b.clean(usages[i].Card)}
		if card, ok := b.cards[key]; ok && card.model != "" {
			continue
		}
		model := b.clean(usages[i].Model)
		if known, ok := unnamed[key]; !ok || known == "" || (model != "" && model < known) {
			unnamed[key] = model
		}
	}
	for key, model := range unnamed {
		b.card(key).model = model
	}
	return nil
}

func (b *biller) addUsage(u *Usage, period Period) error {
	node, cardName := b.clean(u.Node), b.clean(u.Card)
	fail := func(format string, args ...any) error {
		return fmt.Errorf("usage of card %s on %s, %s: %w", cardName, node, u.Day, fmt.Errorf(format, args...))
	}
	if _, ok := b.days[u.Day]; !ok {
		return fail("day %q is not in period %s", u.Day, period.Name)
	}
	for _, amount := range amountsOf(&u.Amounts) {
		if *amount.value < 0 {
			return fail("%s is %d, which is negative", amount.name, *amount.value)
		}
	}
	if err := add(&b.meteredUS, u.GPUUS); err != nil {
		return fail("gpu_us: %w", err)
	}
	card := b.card(cardDay{u.Day, node, cardName})
	card.meteredUS += u.GPUUS
	key := hoursKey{Key: Key{Node: node, Model: card.model, Profile: b.clean(u.Profile)}}
	switch u.State {
	case usage.StateHeld:
		key.lineType = LineUsage
		key.User = b.clean(b.book.knownAs(node, b.clean(u.User)))
		key.Project = b.clean(u.Project)
		key.Class = b.clean(u.Class)
		key.Account = b.book.payer(key.User, u.UID, node, key.Project, u.Day)
	case usage.StateIdle:
		key.lineType = LineIdle
	case usage.StateDown:
		key.lineType = LineDown
	default:
		return fail("state %q is none of held, idle, down", u.State)
	}
	line, ok := b.lines[key]
	if !ok {
		line = &hoursLine{Line: Line{Type: key.lineType, Key: key.Key, Hours: &Hours{Metered: true}}}
		b.lines[key] = line
	}
	sums, amounts := amountsOf(&line.Hours.Amounts), amountsOf(&u.Amounts)
	for i := range sums {
		if err := add(sums[i].value, *amounts[i].value); err != nil {
			return fail("%s: %w", sums[i].name, err)
		}
	}
	line.Hours.Estimated = line.Hours.Estimated || u.Estimated
	if u.State == usage.StateHeld && u.GPUUS > 0 {
		line.addPriced(b.priceOf(card.model, u.Day), u.Day, u.GPUUS)
	}
	return nil
}

func (b *biller) priceOf(model, day string) *price {
	key := modelDay{model, day}
	found, ok := b.prices[key]
	if !ok {
		found = b.book.priceOf(PerGPUHour, model, day)
		b.prices[key] = found
	}
	return found
}

// addPriced adds time at a price. The sums are parts of the line's gpu_us, so
// they can't overflow where that did not.
func (l *hoursLine) addPriced(p *price, day string, us int64) {
	if p == nil {
		if l.unpricedUS == 0 || day < l.firstDay {
			l.firstDay = day
		}
		l.lastDay = max(l.lastDay, day)
		l.unpricedUS += us
		return
	}
	for i := range l.priced {
		if l.priced[i].price.rate == p.rate && l.priced[i].price.micros == p.micros {
			l.priced[i].us += us
			return
		}
	}
	l.priced = append(l.priced, pricedTime{p, us})
}

// addUnobserved compares what was in service with what was metered, card by
// card and day by day, so that an overlap on one card never hides missing time
// on another.
func (b *biller) addUnobserved(statement *Statement) error {
	for key, card := range b.cards {
		group := nodeModel{key.node, card.model}
		node, ok := b.nodes[group]
		if !ok {
			node = &nodeTime{cards: make(map[string]struct{})}
			node.Node, node.Model = group.node, group.model
			b.nodes[group] = node
		}
		node.cards[key.card] = struct{}{}
		missing, overlap := card.inServiceUS-card.meteredUS, int64(0)
		if missing < 0 {
			missing, overlap = 0, -missing
		}
		if overlap > 0 || card.inServiceUS > b.days[key.day] {
			statement.Overlaps = append(statement.Overlaps, Overlap{
				Day: key.day, Node: key.node, Card: key.card, Model: card.model,
				InServiceUS: card.inServiceUS, MeteredUS: card.meteredUS, DayUS: b.days[key.day],
			})
		}
		for sum, part := range map[*int64]int64{
			&node.InServiceUS: card.inServiceUS, &node.UnobservedUS: missing, &node.OverlapUS: overlap,
		} {
			if err := add(sum, part); err != nil {
				return fmt.Errorf("capacity of %s on node %s: %w", card.model, key.node, err)
			}
		}
	}
	for group, node := range b.nodes {
		node.Cards = len(node.cards)
		node.Hours = Micro(hourScale.round(node.InServiceUS))
		statement.Capacity = append(statement.Capacity, node.NodeCapacity)
		if node.UnobservedUS > 0 {
			key := hoursKey{LineUnobserved, Key{Node: group.node, Model: group.model}}
			hours := &Hours{Amounts: usage.Amounts{GPUUS: node.UnobservedUS}}
			b.lines[key] = &hoursLine{Line: Line{Type: key.lineType, Key: key.Key, Hours: hours}}
		}
	}
	slices.SortFunc(statement.Capacity, func(a, b NodeCapacity) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), strings.Compare(a.Model, b.Model))
	})
	slices.SortFunc(statement.Overlaps, func(a, b Overlap) int {
		return cmp.Or(strings.Compare(a.Day, b.Day), strings.Compare(a.Node, b.Node), strings.Compare(a.Card, b.Card))
	})
	return nil
}

func (b *biller) orderedHours() []*hoursLine {
	lines := slices.Collect(maps.Values(b.lines))
	slices.SortFunc(lines, func(x, y *hoursLine) int {
		return cmp.Or(cmp.Compare(lineOrder[x.Type], lineOrder[y.Type]), x.Key.compare(y.Key))
	})
	return lines
}

// compare orders keys as statements do.
func (k Key) compare(other Key) int {
	if c := strings.Compare(k.Account, other.Account); c != 0 {
		return c
	}
	if c := strings.Compare(k.User, other.User); c != 0 {
		return c
	}
	return cmp.Or(
		strings.Compare(k.Project, other.Project),
		strings.Compare(k.Node, other.Node),
		strings.Compare(k.Model, other.Model),
		strings.Compare(k.Profile, other.Profile),
		strings.Compare(k.Class, other.Class),
		strings.Compare(k.Item, other.Item),
		strings.Compare(k.UnitPrice, other.UnitPrice),
	)
}

// printHours rounds each column of the lines once per node and model, and
// hands the rounded sum out to the lines by largest remainder.
func (b *biller) printHours(lines []*hoursLine) error {
	groups := make(map[nodeModel][]*Hours)
	for _, line := range lines {
		group := nodeModel{line.Node, line.Model}
		groups[group] = append(groups[group], line.Hours)
	}
	columns := []struct {
		name    string
		scale   ratio
		amount  func(*Hours) int64
		printed func(*Hours) *Micro
	}{
		{"gpu_us", hourScale, func(h *Hours) int64 { return h.GPUUS }, func(h *Hours) *Micro { return &h.GPUHours }},
		{"held_us", hourScale, func(h *Hours) int64 { return h.HeldUS }, func(h *Hours) *Micro { return &h.HeldHours }},
		{"active_us", hourScale, func(h *Hours) int64 { return h.ActiveUS }, func(h *Hours) *Micro { return &h.ActiveHours }},
		{"idle_us", hourScale, func(h *Hours) int64 { return h.IdleUS }, func(h *Hours) *Micro { return &h.IdleHours }},
		{"reserved_us", hourScale, func(h *Hours) int64 { return h.ReservedUS }, func(h *Hours) *Micro { return &h.ReservedHours }},
		{"memory_kib_seconds", gibHourScale, func(h *Hours) int64 { return h.MemoryKiBSeconds }, func(h *Hours) *Micro { return &h.MemoryGiBHours }},
		{"energy_mj", hourScale, func(h *Hours) int64 { return h.EnergyMJ }, func(h *Hours) *Micro { return &h.EnergyKWh }},
	}
	for group, members := range groups {
		amounts := make([]int64, len(members))
		for _, column := range columns {
			var sum int64
			for i, hours := range members {
				amounts[i] = column.amount(hours)
				if err := add(&sum, amounts[i]); err != nil {
					return fmt.Errorf("%s of %s on node %s: %w", column.name, group.model, group.node, err)
				}
			}
			for i, part := range apportionScaled(column.scale.round(sum), amounts, column.scale) {
				*column.printed(members[i]) = Micro(part)
			}
		}
	}
	return nil
}

type namedAmount struct {
	name  string
	value *int64
}

// amountsOf lists the quantities of a row by their names on the wire.
func amountsOf(a *usage.Amounts) [10]namedAmount {
	return [10]namedAmount{
		{"gpu_us", &a.GPUUS}, {"share_us", &a.ShareUS}, {"held_us", &a.HeldUS}, {"reserved_us", &a.ReservedUS},
		{"active_us", &a.ActiveUS}, {"active_known_us", &a.ActiveKnownUS}, {"idle_us", &a.IdleUS},
		{"memory_kib_seconds", &a.MemoryKiBSeconds}, {"memory_known_us", &a.MemoryKnownUS}, {"energy_mj", &a.EnergyMJ},
	}
}

// add adds an amount that is not negative, and refuses to pass 63 bits.
func add(sum *int64, amount int64) error {
	if *sum > math.MaxInt64-amount {
		return fmt.Errorf("the sum passes 63 bits at %d + %d: a row must be corrupt", *sum, amount)
	}
	*sum += amount
	return nil
}

func intOf(value int64) *big.Int { return big.NewInt(value) }
