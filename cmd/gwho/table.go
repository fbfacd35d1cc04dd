package main

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/who"
)

// tableOptions say how an answer is shown.
type tableOptions struct {
	// Width is how many columns there are; 0 for no bound.
	Width  int
	Colour bool
	// Bars adds how full each memory is, as far as there is room.
	Bars bool
	// Wrap breaks what is worth more lines than one at Width; a terminal does
	// that by itself unless it is drawn line by line.
	Wrap    bool
	Verbose bool
	// Zone is the time zone that times are shown in.
	Zone *time.Location
	// Free says how many of all devices are free, whatever part is shown.
	Free string
}

// idleHint is from how long on idleness is coloured.
const idleHint = 30 * time.Minute

const unknown = "?"

// line is a line of the table: of a layout, or a text of its own.
type line struct {
	layout *layout
	cells  []cell
	text   cell
	uncut  bool // worth more lines than one where the terminal is narrow
}

// page is an answer as lines, each ready to be printed.
type page struct {
	heading string
	titles  []string // of the columns
	body    []string
	foot    []string // what is concluded of it
	missing []string // what the answer lacks
}

func (p page) String() string {
	var b strings.Builder
	write := func(lines ...string) {
		for _, l := range lines {
			b.WriteString(l + "\n")
		}
	}
	write(p.heading)
	if len(p.titles)+len(p.body) > 0 {
		write("")
		write(p.titles...)
		write(p.body...)
	}
	for _, part := range [][]string{p.foot, p.missing} {
		if len(part) > 0 {
			write("")
			write(part...)
		}
	}
	return b.String()
}

// holderColumns are what is told of a holder. Who, and for how long in vain,
// is what stays where there is little room.
func holderColumns() []column {
	return []column{
		{title: "USER", least: 8}, {title: "WORKLOAD", least: 12}, {title: "COMMAND", least: 8, drop: 7}, {title: "PID", right: true, drop: 5},
		{title: "MEMORY", right: true, drop: 2}, {title: "ACTIVITY", short: "ACT", right: true, drop: 3}, {title: "SINCE", drop: 4},
		{title: "IDLE", right: true, drop: 1}, {title: "NOTE", least: 8, drop: 6, ifAny: true},
	}
}

// table shows an answer to people: a line for each card, and under it who
// holds it.
func table(a who.Answer, o tableOptions) string { return cardsPage(a, o).String() }

func cardsPage(a who.Answer, o tableOptions) page {
	cards := newLayout(0, []column{
		{title: "GPU", right: true}, {title: "NAME", least: 10}, {title: "STATE"}, {title: "UTIL", right: true},
		{title: "MEMORY", right: true}, {title: "", drop: 3, ifAny: true}, {title: "TEMP", right: true, drop: 1}, {title: "POWER", right: true, drop: 2},
	})
	holders := newLayout(5, holderColumns())
	var lines []line
	add := func(l *layout, cells []cell) {
		l.fit(cells)
		lines = append(lines, line{layout: l, cells: cells})
	}
	addCard := func(cells []cell, used, total *uint64) {
		full := cell{}
		if o.Bars {
			full = fullness(used, total)
		}
		add(cards, slices.Insert(cells, 5, full))
	}
	note := func(text string, s style) {
		lines = append(lines, line{text: cell{strings.Repeat(" ", holders.indent) + text, s}})
	}
	anyHolder := false
	for _, c := range a.Cards {
		if c.MIG {
			addCard(cardLine(c), nil, nil)
		} else {
			addCard(cardLine(c), c.MemoryUsedBytes, c.MemoryTotalBytes)
		}
		if o.Verbose {
			note(strings.TrimSpace(clean(c.UUID)+"  "+clean(c.PCIBusID)), faint)
		}
		if c.State != who.CardUp && c.Reason != "" && c.Reason != c.State {
			note(clean(c.Reason), red)
		}
		if c.MIG && len(c.Devices) == 0 && c.State == who.CardUp {
			note("MIG is on, but the card has no instance: nothing can run on it", yellow)
		}
		for _, d := range c.Devices {
			if d.UUID != c.UUID {
				addCard(instanceLine(d), d.MemoryUsedBytes, d.MemoryTotalBytes)
				if o.Verbose {
					note(clean(d.UUID), faint)
				}
			}
			for _, h := range d.Holders {
				anyHolder = true
				add(holders, holderLine(a, h, o.Zone))
				if o.Verbose {
					for _, text := range details(h) {
						note("  "+text, faint)
					}
				}
			}
		}
		for _, l := range taken(c, o.Verbose) {
			note(l.text, l.style)
			lines[len(lines)-1].uncut = true
		}
	}
	p := page{heading: bounded(heading(a, o), faint, o), missing: missing(a, o)}
	if o.Width > 0 {
		cards.shrink(o.Width)
		holders.shrink(o.Width)
	}
	if len(a.Cards) > 0 {
		p.titles = append(p.titles, cards.render(cards.title(), o.Width, o.Colour))
		if anyHolder {
			p.titles = append(p.titles, holders.render(holders.title(), o.Width, o.Colour))
		}
	}
	for _, l := range lines {
		p.body = append(p.body, l.render(o)...)
	}
	return p
}

func (l line) render(o tableOptions) []string {
	switch {
	case l.uncut:
		return whole(l.text.text, l.text.style, o)
	case l.layout == nil:
		return []string{bounded(l.text.text, l.text.style, o)}
	}
	return []string{l.layout.render(l.cells, o.Width, o.Colour)}
}

// missing are the lines about what the answer lacks. What is wrong is worth
// more lines than one: never cut.
func missing(a who.Answer, o tableOptions) []string {
	var out []string
	for _, m := range a.Missing {
		text := "! "
		if m.Card != nil && *m.Card >= 0 {
			text += "GPU " + strconv.Itoa(*m.Card) + ": "
		}
		out = append(out, whole(text+clean(m.Message), red, o)...)
	}
	return out
}

func bounded(text string, s style, o tableOptions) string {
	if o.Width > 0 {
		text = cut(text, o.Width)
	}
	return paint(text, s, o.Colour)
}

// whole is a text that is never cut.
func whole(text string, s style, o tableOptions) []string {
	lines := []string{text}
	if o.Wrap && o.Width > 0 {
		lines = wrap(text, o.Width)
	}
	for i := range lines {
		lines[i] = paint(lines[i], s, o.Colour)
	}
	return lines
}

func heading(a who.Answer, o tableOptions) string {
	parts := []string{cmp.Or(clean(a.Node), unknown), a.At.In(o.Zone).Format("2006-01-02 15:04:05 MST")}
	if o.Free != "" {
		parts = append(parts, o.Free)
	}
	if a.Driver.DriverVersion != "" {
		parts = append(parts, "driver "+clean(a.Driver.DriverVersion))
	}
	if a.Driver.CUDAVersion != "" {
		parts = append(parts, "CUDA "+clean(a.Driver.CUDAVersion))
	}
	if a.Source == who.SourceDirect {
		parts = append(parts, "read without gpu-exporter")
	}
	return strings.Join(parts, "  ")
}

// freeCount says how many devices are free.
func freeCount(a who.Answer) string {
	free, all := 0, 0
	for _, c := range a.Cards {
		for _, d := range c.Devices {
			all++
			if d.Free {
				free++
			}
		}
	}
	if all == 0 {
		return ""
	}
	return fmt.Sprintf("%d of %d free", free, all)
}

// fullness is how full a memory is, as a bar and in percent.
func fullness(used, total *uint64) cell {
	if used == nil || total == nil || *total == 0 {
		return cell{}
	}
	const wide = 10
	ratio := min(1, float64(*used)/float64(*total))
	// Something is never shown as nothing, and not full never as full.
	bars := int(math.Ceil(ratio * wide))
	if ratio < 1 {
		bars = min(bars, wide-1)
	}
	if ratio < 0.005 {
		bars = 0
	}
	style := cyan
	if ratio >= 0.9 {
		style = yellow
	}
	return cell{fmt.Sprintf("[%s%s] %3.0f %%", strings.Repeat("|", bars), strings.Repeat(" ", wide-bars), ratio*100), style}
}

func cardLine(c who.Card) []cell {
	state := cell{c.State, red}
	if c.State == who.CardUp {
		switch {
		case c.MIG:
			state = cell{"mig", plain}
		default:
			state = deviceState(c.Devices)
			if c.PassedThrough && state.text != "held" {
				state = cell{"vm", plain} // for virtual machines only
			}
		}
	}
	index := unknown // a card that has not yet said which it is
	if c.Index >= 0 {
		index = strconv.Itoa(c.Index)
	}
	if c.State != who.CardUp { // nothing of it is known now
		return []cell{{index, bold}, {cmp.Or(clean(c.Name), unknown), plain}, state, {}, {}, {}, {}}
	}
	return []cell{
		{index, bold},
		{cmp.Or(clean(c.Name), unknown), plain},
		state,
		{percent(c.UtilizationPercent), plain},
		{memory(c.MemoryUsedBytes, c.MemoryTotalBytes), plain},
		{unit(c.TemperatureCelsius, " °C"), plain},
		{power(c.PowerWatts, c.PowerLimitWatts), plain},
	}
}

func deviceState(devices []who.Device) cell {
	held, assigned := false, false
	for _, d := range devices {
		for _, h := range d.Holders {
			held = held || h.Holds
			assigned = assigned || h.Assigned
		}
	}
	switch {
	case held:
		return cell{"held", plain}
	case assigned:
		return cell{"assigned", plain}
	}
	if slices.ContainsFunc(devices, func(d who.Device) bool { return d.Free }) {
		return cell{"free", green}
	}
	return cell{"taken", yellow} // by nobody that NVML lists
}

func instanceLine(d who.Device) []cell {
	name := "MIG"
	if d.GPUInstance != nil && d.ComputeInstance != nil {
		name += fmt.Sprintf(" %d/%d", *d.GPUInstance, *d.ComputeInstance)
	}
	if d.Profile != "" {
		name += " " + clean(d.Profile)
	}
	return []cell{{}, {name, plain}, deviceState([]who.Device{d}), {}, {memory(d.MemoryUsedBytes, d.MemoryTotalBytes), plain}, {}, {}}
}

func holderLine(a who.Answer, h who.Holder, zone *time.Location) []cell {
	user := cell{cmp.Or(clean(h.User), unknown), bold}
	if !h.Holds && !h.Assigned {
		user.style = faint
	}
	workload := cmp.Or(clean(h.Kind), unknown)
	if h.Workload != "" {
		workload += ":" + clean(h.Workload)
	}
	activity := percent(h.ActivityPercent)
	if h.Estimated && h.ActivityPercent != nil {
		activity = "~" + activity
	}
	idle := cell{unknown, plain}
	if s := h.IdleSeconds; s != nil {
		idle.text = "-"
		if *s > 0 {
			idle.text = duration(time.Duration(min(*s, math.MaxInt64/int64(time.Second))) * time.Second)
		}
		if *s >= int64(idleHint/time.Second) && h.Holds {
			idle.style = yellow
		}
	}
	command, pid, held := cmp.Or(clean(h.Command), unknown), "-", bytes(h.MemoryBytes)
	if h.PID != nil {
		pid = strconv.FormatUint(uint64(*h.PID), 10)
	} else { // there is no process to say anything of
		command, activity, held, idle.text = "-", "-", "-", "-"
	}
	return []cell{
		user, {workload, plain}, {command, plain}, {pid, plain}, {held, plain}, {activity, plain},
		{since(h, a.At, zone), plain}, idle, {notes(h), faint},
	}
}

func notes(h who.Holder) string {
	var notes []string
	for _, n := range []struct {
		is   bool
		text string
	}{
		{h.Assigned && h.Holds, "reserved, no process"},
		{h.Assigned && !h.Holds, "assigned, no process"},
		{h.GraphicsOnly, "graphics only"},
		{slices.Contains(h.Contexts, "mps"), "MPS client"},
		{h.System, "system"},
		{h.Zombie, "zombie"},
		{h.Pending, "looking up"},
	} {
		if n.is {
			notes = append(notes, n.text)
		}
	}
	return strings.Join(notes, ", ")
}

// attributedBy is the rule that named the user, and what speaks against it.
func attributedBy(h who.Holder) string {
	by := h.AttributedBy
	if h.Review {
		by += " (needs review before billing)"
	}
	if h.Disagrees {
		by += " (something else names another user)"
	}
	return by
}

// details are what -v adds below a holder.
func details(h who.Holder) []string {
	var pairs, out []string
	for _, p := range []struct{ name, value string }{
		{"attributed by", attributedBy(h)}, {"project", h.Project}, {"class", h.Class},
		{"container", h.ContainerID}, {"image", h.Image},
		{"pod", strings.Trim(h.PodNamespace+"/"+h.PodName, "/")}, {"slurm job", h.SlurmJob}, {"unit", h.Unit},
	} {
		if p.value != "" {
			pairs = append(pairs, p.name+" "+clean(p.value))
		}
	}
	if h.UID != nil {
		pairs = append(pairs, "uid "+strconv.FormatInt(*h.UID, 10))
	}
	if len(pairs) > 0 {
		out = append(out, strings.Join(pairs, ", "))
	}
	if used := resources(h.Resources); used != "" {
		out = append(out, used)
	}
	if h.CommandLine != nil {
		out = append(out, "$ "+clean(*h.CommandLine))
	}
	return out
}

// resources say what the workload uses of the node beside its cards.
func resources(r *who.Resources) string {
	if r == nil {
		return ""
	}
	var parts []string
	if r.CPUPercent != nil {
		parts = append(parts, "cpu "+percent(r.CPUPercent))
	}
	if r.ResidentMemoryBytes != nil {
		parts = append(parts, bytes(r.ResidentMemoryBytes)+" resident")
	}
	if r.ReadBytesPerSecond != nil {
		parts = append(parts, "reads "+rate(*r.ReadBytesPerSecond))
	}
	if r.WrittenBytesPerSecond != nil {
		parts = append(parts, "writes "+rate(*r.WrittenBytesPerSecond))
	}
	return strings.Join(parts, ", ")
}

// rate is in the units that disks are sold by.
func rate(bytesPerSecond int64) string {
	const mega = 1_000_000
	switch {
	case bytesPerSecond >= 10*mega:
		return fmt.Sprintf("%d MB/s", bytesPerSecond/mega)
	case bytesPerSecond >= mega/10:
		return fmt.Sprintf("%.1f MB/s", float64(bytesPerSecond)/mega)
	}
	return fmt.Sprintf("%d kB/s", bytesPerSecond/1000)
}

// since is when the process can have begun to hold the device: not before
// itself, and not before its workload did.
func since(h who.Holder, at time.Time, zone *time.Location) string {
	from := holdingSince(h)
	if from == nil {
		return unknown
	}
	then, now := from.In(zone), at.In(zone)
	switch {
	case then.Format(time.DateOnly) == now.Format(time.DateOnly):
		return then.Format("15:04")
	case now.Sub(then) < 6*24*time.Hour && now.After(then):
		return then.Format("Mon 15:04")
	}
	return then.Format(time.DateOnly)
}

func holdingSince(h who.Holder) *time.Time {
	if h.HeldSince == nil || h.StartedAt != nil && h.StartedAt.After(*h.HeldSince) {
		return h.StartedAt
	}
	return h.HeldSince
}

func percent(p *int64) string { return unit(p, " %") }

func unit(v *int64, suffix string) string {
	if v == nil {
		return unknown
	}
	return strconv.FormatInt(*v, 10) + suffix
}

func power(watts, limit *float64) string {
	switch {
	case watts == nil:
		return unknown
	case limit == nil:
		return fmt.Sprintf("%.0f W", *watts)
	}
	return fmt.Sprintf("%.0f/%.0f W", *watts, *limit)
}

const gib = 1 << 30

func memory(used, total *uint64) string {
	switch {
	case used == nil && total == nil:
		return unknown
	case total == nil:
		return bytes(used)
	case used == nil:
		return "?/" + bytes(total)
	}
	return fmt.Sprintf("%.1f/%.1f GiB", float64(*used)/gib, float64(*total)/gib)
}

func bytes(b *uint64) string {
	switch {
	case b == nil:
		return unknown
	case *b < gib:
		return fmt.Sprintf("%d MiB", *b>>20)
	}
	return fmt.Sprintf("%.1f GiB", float64(*b)/gib)
}

func duration(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}
