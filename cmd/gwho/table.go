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
	Width   int
	Colour  bool
	Verbose bool
	// Zone is the time zone that times are shown in.
	Zone *time.Location
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

// table shows an answer to people: a line for each card, and under it who
// holds it.
func table(a who.Answer, o tableOptions) string {
	cards := newLayout(0, []column{
		{title: "GPU", right: true}, {title: "NAME", least: 10}, {title: "STATE"}, {title: "UTIL", right: true},
		{title: "MEMORY", right: true}, {title: "TEMP", right: true}, {title: "POWER", right: true},
	})
	holders := newLayout(5, []column{
		{title: "USER", least: 8}, {title: "WORKLOAD", least: 12}, {title: "COMMAND", least: 8}, {title: "PID", right: true},
		{title: "MEMORY", right: true}, {title: "ACTIVITY", right: true}, {title: "SINCE"}, {title: "IDLE", right: true}, {title: "NOTE"},
	})
	var lines []line
	add := func(l *layout, cells []cell) {
		l.fit(cells)
		lines = append(lines, line{layout: l, cells: cells})
	}
	note := func(text string, s style) {
		lines = append(lines, line{text: cell{strings.Repeat(" ", holders.indent) + text, s}})
	}
	anyHolder := false
	for _, c := range a.Cards {
		add(cards, cardLine(c))
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
				add(cards, instanceLine(d))
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
	if o.Width > 0 {
		cards.shrink(o.Width)
		holders.shrink(o.Width)
	}

	var b strings.Builder
	write := func(text string) { b.WriteString(text + "\n") }
	write(bounded(heading(a, o.Zone), faint, o))
	if len(a.Cards) > 0 {
		write("")
		write(cards.render(cards.title(), o.Width, o.Colour))
		if anyHolder {
			write(holders.render(holders.title(), o.Width, o.Colour))
		}
	}
	for _, l := range lines {
		if l.uncut {
			write(paint(l.text.text, l.text.style, o.Colour))
			continue
		}
		if l.layout == nil {
			write(bounded(l.text.text, l.text.style, o))
			continue
		}
		write(l.layout.render(l.cells, o.Width, o.Colour))
	}
	if len(a.Missing) > 0 {
		write("")
	}
	for _, m := range a.Missing {
		text := "! "
		if m.Card != nil && *m.Card >= 0 {
			text += "GPU " + strconv.Itoa(*m.Card) + ": "
		}
		// What is wrong is worth more lines than one: never cut.
		write(paint(text+clean(m.Message), red, o.Colour))
	}
	return b.String()
}

func bounded(text string, s style, o tableOptions) string {
	if o.Width > 0 {
		text = cut(text, o.Width)
	}
	return paint(text, s, o.Colour)
}

func heading(a who.Answer, zone *time.Location) string {
	parts := []string{cmp.Or(clean(a.Node), unknown), a.At.In(zone).Format("2006-01-02 15:04:05 MST")}
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
	from := h.HeldSince
	if from == nil || h.StartedAt != nil && h.StartedAt.After(*from) {
		from = h.StartedAt
	}
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
