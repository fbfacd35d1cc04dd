package report

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/text/width"

	"gpuledger/accounting/billing"
)

// WriteTable writes a statement for people at a terminal: who used how much
// and what it costs, then where the rest of the capacity went, then what needs
// attention. The hours of the TOTAL row are the capacity; without overlaps
// those above it add up to it exactly.
func WriteTable(w io.Writer, statement billing.Statement) error {
	out := bufio.NewWriter(w)
	currency := statement.Currency
	fmt.Fprintf(out, "%s (%s), %s, %s\n\n", statement.Period.Name, statement.Period.Location, statement.Status, statement.Mode)

	rows := [][]string{{"USER", "ACCOUNT", "GPU HOURS", "ACTIVE HOURS", "ENERGY KWH", amountTitle(statement)}}
	for _, p := range people(&statement) {
		active := "?"
		if p.activityKnown {
			active = p.active.String()
		}
		amount := p.list.Decimal(currency)
		if !p.charged {
			amount = "no price" // 0.00 would look like a gift
		}
		rows = append(rows, []string{
			visible(p.user), visible(p.account), p.gpu.String(), active, p.energy.String(), amount,
		})
	}
	rows = append(rows, nil)
	for _, rest := range []billing.LineType{billing.LineIdle, billing.LineDown, billing.LineUnobserved} {
		var gpu, energy billing.Micro
		for _, line := range statement.Lines {
			if line.Type == rest {
				gpu += line.Hours.GPUHours
				energy += line.Hours.EnergyKWh
			}
		}
		shown := energy.String()
		if rest == billing.LineUnobserved {
			shown = "?"
		}
		rows = append(rows, []string{"(" + string(rest) + ")", "", gpu.String(), "", shown, ""})
	}
	list, _ := statement.Total()
	rows = append(rows, nil, []string{"TOTAL", "", statement.CapacityHours().String(), "", "", list.Decimal(currency)})
	writeAligned(out, rows, 2)
	writeNotes(out, &statement)
	if err := out.Flush(); err != nil {
		return fmt.Errorf("write the table of %s: %w", statement.Period.Name, err)
	}
	return nil
}

func amountTitle(statement billing.Statement) string {
	if statement.Mode == billing.ModeShowback {
		return "WOULD COST " + statement.Currency.Code
	}
	return "AMOUNT " + statement.Currency.Code
}

// person is a user under the account that pays.
type person struct {
	user, account string
	gpu, active   billing.Micro
	energy        billing.Micro
	activityKnown bool
	charged       bool // some of it has a price
	list          billing.Money
}

// people sums the statement by user and account, who used most first.
func people(statement *billing.Statement) []*person {
	type key struct{ user, account string }
	index := make(map[key]*person)
	var found []*person
	for i := range statement.Lines {
		line := &statement.Lines[i]
		if line.Type != billing.LineUsage && line.Type != billing.LineCharge {
			continue
		}
		p, ok := index[key{line.User, line.Account}]
		if !ok {
			p = &person{user: line.User, account: line.Account}
			index[key{line.User, line.Account}] = p
			found = append(found, p)
		}
		if line.Charge != nil {
			p.list, p.charged = p.list.Add(line.Charge.ListAmount), true
			continue
		}
		p.gpu += line.Hours.GPUHours
		p.active += line.Hours.ActiveHours
		p.energy += line.Hours.EnergyKWh
		p.activityKnown = p.activityKnown || line.Hours.ActivityKnown()
	}
	slices.SortFunc(found, func(a, b *person) int {
		return cmp.Or(cmp.Compare(b.gpu, a.gpu), strings.Compare(a.user, b.user), strings.Compare(a.account, b.account))
	})
	return found
}

// writeNotes says what a reader must know before trusting the figures.
func writeNotes(out *bufio.Writer, statement *billing.Statement) {
	var notes []string
	for _, c := range statement.Capacity {
		if c.UnobservedUS > 0 {
			notes = append(notes, fmt.Sprintf("coverage of %s on %s is %s", visible(c.Model), visible(c.Node), c.Decimal()))
		}
	}
	for _, o := range statement.Overlaps {
		if o.MeteredUS > o.InServiceUS {
			notes = append(notes, fmt.Sprintf("OVERLAP: %s on %s was metered for %s h on %s but was in service for %s h: two runs metered it at once",
				visible(o.Card), visible(o.Node), hoursOf(o.MeteredUS), o.Day, hoursOf(o.InServiceUS)))
		}
		if o.InServiceUS > o.DayUS {
			notes = append(notes, fmt.Sprintf("OVERLAP: %s on %s counts as in service for %s h on %s, a day of %s h",
				visible(o.Card), visible(o.Node), hoursOf(o.InServiceUS), o.Day, hoursOf(o.DayUS)))
		}
	}
	for _, u := range statement.Unpriced {
		model := visible(u.Model)
		if u.Profile != "" {
			model += " " + visible(u.Profile)
		}
		notes = append(notes, fmt.Sprintf("NO PRICE for %s on %s, %s to %s: %s h are not charged (a rate with price \"0\" makes them free)",
			model, visible(u.Node), u.FirstDay, u.LastDay, hoursOf(u.GPUUS)))
	}
	if note := unassignedNote(statement); note != "" {
		notes = append(notes, note)
	}
	if len(notes) > 0 {
		out.WriteByte('\n')
	}
	for _, note := range notes {
		fmt.Fprintln(out, note)
	}
}

// maxNamed is how many users a note names; the rows above it have them all.
const maxNamed = 5

// unassignedNote names those for whom no account pays, who used most first. A
// site without accounts has nobody to name.
func unassignedNote(statement *billing.Statement) string {
	if !statement.HasAccounts || len(statement.Unassigned) == 0 {
		return ""
	}
	users := slices.Clone(statement.Unassigned)
	slices.SortStableFunc(users, func(a, b billing.UserTime) int { return cmp.Compare(b.GPUUS, a.GPUUS) })
	var names []string
	var total int64
	for i, u := range users {
		total += u.GPUUS
		if i < maxNamed {
			names = append(names, visible(u.User))
		}
	}
	if more := len(users) - maxNamed; more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("no account pays for %s h of users who are members of none: %s", hoursOf(total), strings.Join(names, ", "))
}

// hoursOf writes microseconds as hours with six decimals, rounded down.
func hoursOf(microseconds int64) string { return billing.Micro(microseconds / 3600).String() }

// writeAligned writes cells in columns: the first left aligned ones as text,
// the others as figures. A nil row is an empty line.
func writeAligned(out *bufio.Writer, rows [][]string, left int) {
	var widths []int
	for _, cells := range rows {
		for i, cell := range cells {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], columnsOf(cell))
		}
	}
	for _, cells := range rows {
		var line strings.Builder
		for i, cell := range cells {
			if i > 0 {
				line.WriteString("  ")
			}
			padding := strings.Repeat(" ", widths[i]-columnsOf(cell))
			if i < left {
				line.WriteString(cell + padding)
			} else {
				line.WriteString(padding + cell)
			}
		}
		out.WriteString(strings.TrimRight(line.String(), " "))
		out.WriteByte('\n')
	}
}

// columnsOf is how many columns of a terminal a text takes.
func columnsOf(cell string) int {
	columns := 0
	for _, r := range cell {
		switch {
		case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		case width.LookupRune(r).Kind() == width.EastAsianWide, width.LookupRune(r).Kind() == width.EastAsianFullwidth:
			columns += 2
		default:
			columns++
		}
	}
	return columns
}

// visible escapes what would move the cursor, colour the terminal, break the
// line or turn the reading direction, so that a name can only look like
// itself.
func visible(name string) string {
	var shown strings.Builder
	for _, r := range printable(name) {
		switch {
		case unicode.IsControl(r), unicode.In(r, unicode.Bidi_Control, unicode.Zl, unicode.Zp):
			quoted := strconv.QuoteRuneToASCII(r)
			shown.WriteString(quoted[1 : len(quoted)-1])
		default:
			shown.WriteRune(r)
		}
	}
	return shown.String()
}
