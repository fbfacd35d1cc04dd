package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"gpuledger/exporter/history"
	"gpuledger/exporter/who"
)

// sleeper is a workload that holds a device, or was given it, and does nothing
// there.
type sleeper struct {
	held             // one of its processes
	pids    []uint32 // of all of them
	memory  *uint64  // of all of them, nil if not known of one
	seconds int64    // for how long
}

// sleepers are the workloads that have done nothing on a device for at least so
// long, the longest first, and how many there are of which that is not known.
func sleepers(a who.Answer, least time.Duration) (asleep []sleeper, untold int) {
	type key struct {
		device, user, kind, workload string
		uid                          int64
	}
	type group struct {
		sleeper
		known bool
	}
	var order []key
	groups := map[key]*group{}
	for _, h := range everyHolder(a) {
		if !h.holder.Holds && !h.holder.Assigned || h.holder.System {
			continue
		}
		k := key{h.device.UUID, h.holder.User, h.holder.Kind, h.holder.Workload, -1}
		if h.holder.UID != nil {
			k.uid = *h.holder.UID
		}
		idle := idleFor(h.holder, a.At)
		g := groups[k]
		if g == nil {
			g = &group{sleeper: sleeper{held: h, memory: new(uint64(0))}, known: true}
			if idle != nil {
				g.seconds = *idle
			}
			groups[k], order = g, append(order, k)
		}
		if h.holder.PID != nil {
			g.pids = append(g.pids, *h.holder.PID)
			switch {
			case h.holder.MemoryBytes == nil:
				g.memory = nil
			case g.memory != nil:
				*g.memory += *h.holder.MemoryBytes
			}
		}
		if idle == nil {
			g.known = false
		} else if *idle <= g.seconds {
			g.seconds, g.holder = *idle, h.holder // the one that last did something
		}
	}
	for _, k := range order {
		switch g := groups[k]; {
		case !g.known:
			untold++
		case g.seconds >= int64(least/time.Second):
			asleep = append(asleep, g.sleeper)
		}
	}
	slices.SortStableFunc(asleep, func(x, y sleeper) int { return cmp.Compare(y.seconds, x.seconds) })
	return asleep, untold
}

// idleFor is for how many seconds a holder has done nothing. A workload without
// a process has done nothing since it was given the device, began, or was last
// seen active, whichever came last.
func idleFor(h who.Holder, at time.Time) *int64 {
	if h.PID != nil {
		return h.IdleSeconds
	}
	var from time.Time
	for _, t := range []*time.Time{h.HeldSince, h.StartedAt, h.LastActiveAt} {
		if t != nil && t.After(from) {
			from = *t
		}
	}
	if from.IsZero() {
		return nil
	}
	return new(max(0, int64(at.Sub(from)/time.Second)))
}

// keepIdle keeps the holders of a that have done nothing for so long.
func keepIdle(a who.Answer, least time.Duration) who.Answer {
	asleep, _ := sleepers(a, least)
	cards := []who.Card{}
	for _, c := range a.Cards {
		devices := []who.Device{}
		for _, d := range c.Devices {
			d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h who.Holder) bool {
				return !slices.ContainsFunc(asleep, func(s sleeper) bool {
					return s.device.UUID == d.UUID && s.holder.User == h.User && s.holder.Kind == h.Kind && s.holder.Workload == h.Workload && !h.System
				})
			})
			if len(d.Holders) > 0 {
				devices = append(devices, d)
			}
		}
		if c.Devices = devices; len(devices) > 0 {
			c.Suspects, c.SuspectsVerdict, c.SuspectsMessage, c.SuspectsRemedies = []who.Suspect{}, "", "", []string{}
			cards = append(cards, c)
		}
	}
	a.Cards = cards
	return a
}

// idlePage shows who holds something and does nothing with it.
func idlePage(a who.Answer, least time.Duration, o tableOptions) page {
	layout := newLayout(0, []column{
		{title: "IDLE", right: true}, {title: "GPU"}, {title: "USER", least: 8}, {title: "WORKLOAD", least: 12}, {title: "COMMAND", least: 8, drop: 4},
		{title: "PID", drop: 3}, {title: "MEMORY", right: true}, {title: "SINCE", drop: 1}, {title: "NOTE", least: 8, drop: 2, ifAny: true},
	})
	var lines []line
	asleep, untold := sleepers(a, least)
	users := map[string]bool{}
	memory := uint64(0)
	for _, s := range asleep {
		cells := holderLine(a, s.holder, o.Zone)
		pids := "-"
		if len(s.pids) > 0 {
			pids = strconv.FormatUint(uint64(s.pids[0]), 10)
		}
		if more := len(s.pids) - 1; more > 0 {
			pids += fmt.Sprintf(" +%d", more)
		}
		held := cell{"-", plain}
		if len(s.pids) > 0 {
			held.text = bytes(s.memory)
		}
		cells = []cell{{duration(time.Duration(s.seconds) * time.Second), yellow}, {deviceName(s.card, s.device), bold}, cells[0], cells[1], cells[2], {pids, plain}, held, cells[6], cells[8]}
		layout.fit(cells)
		lines = append(lines, line{layout: layout, cells: cells})
		if o.Verbose {
			for _, text := range details(s.holder) {
				lines = append(lines, line{text: cell{"       " + text, faint}})
			}
		}
		users[s.holder.User] = true
		if s.memory != nil {
			memory += *s.memory
		}
	}
	p := page{heading: bounded(heading(a, o), faint, o), missing: missing(a, o)}
	if o.Width > 0 {
		layout.shrink(o.Width)
	}
	if len(lines) > 0 {
		p.titles = []string{layout.render(layout.title(), o.Width, o.Colour)}
	}
	for _, l := range lines {
		p.body = append(p.body, l.render(o)...)
	}
	sum := "Nobody has held a GPU for " + history.FormatLength(least) + " and done nothing."
	if len(asleep) > 0 {
		sum = fmt.Sprintf("%s of %s, idle for %s or longer, %s of memory.", plural(len(asleep), "workload"), plural(len(users), "user"), history.FormatLength(least), bytes(&memory))
	}
	p.foot = whole(sum, faint, o)
	if untold > 0 {
		p.foot = append(p.foot, whole(fmt.Sprintf("Of %s it is not known whether it does anything.", plural(untold, "more workload")), faint, o)...)
	}
	return p
}
