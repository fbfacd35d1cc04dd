package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"gpuledger/exporter/who"
)

// variable is what CUDA takes the devices from that a program sees. UUIDs mean
// the same in it whatever order CUDA counts cards in.
const variable = "CUDA_VISIBLE_DEVICES"

// keepFreeHere keeps the devices of a node that nobody holds.
func keepFreeHere(a who.Answer) who.Answer {
	cards := []who.Card{}
	for _, c := range a.Cards {
		c.Devices = slices.DeleteFunc(slices.Clone(c.Devices), func(d who.Device) bool { return !d.Free })
		if len(c.Devices) > 0 {
			cards = append(cards, c)
		}
	}
	a.Cards = cards
	return a
}

// offer is what is free and what of it was asked for.
type offer struct {
	who.Answer
	// Wanted is how many were asked for; 0 for as many as there are.
	Wanted int `json:"wanted"`
	// Visible are the UUIDs to put into CUDA_VISIBLE_DEVICES, joined by commas;
	// empty if fewer are free than were asked for.
	Visible string `json:"cuda_visible_devices"`
	// cards and instances are how many are free of each.
	cards, instances int
}

// offerOf makes the offer of an answer. A program can use one MIG instance or
// any number of whole cards, so an instance is offered only where one device is
// enough and no card is free. Of more cards than wanted the emptiest are taken.
func offerOf(a who.Answer, wanted int) offer {
	type device struct {
		who.Device
		used uint64
		busy int64
	}
	o := offer{Answer: keepFreeHere(a), Wanted: wanted}
	var cards, instances []device
	for _, c := range o.Cards {
		for _, d := range c.Devices {
			one := device{Device: d}
			if d.MemoryUsedBytes != nil {
				one.used = *d.MemoryUsedBytes >> 28 // by quarters of a GiB, so that a driver's trifle doesn't decide
			}
			if d.UUID != c.UUID {
				instances = append(instances, one)
				continue
			}
			if c.UtilizationPercent != nil {
				one.busy = *c.UtilizationPercent
			}
			cards = append(cards, one)
		}
	}
	o.cards, o.instances = len(cards), len(instances)
	emptiest := func(x, y device) int { return cmp.Or(cmp.Compare(x.used, y.used), cmp.Compare(x.busy, y.busy)) }
	pick := cards
	switch {
	case len(cards) == 0 && len(instances) > 0 && wanted <= 1:
		if wanted == 1 { // the smallest will do
			slices.SortStableFunc(instances, func(x, y device) int { return cmp.Or(cmp.Compare(x.Slices, y.Slices), emptiest(x, y)) })
		}
		pick = instances[:1]
	case len(cards) < wanted:
		pick = nil
	case wanted > 0:
		slices.SortStableFunc(cards, emptiest)
		pick = cards[:wanted]
	}
	uuids := make([]string, len(pick))
	for i, d := range pick {
		uuids[i] = d.UUID
	}
	o.Visible = strings.Join(uuids, ",")
	return o
}

// enough reports whether as many are free as were asked for, at least one.
func (o offer) enough() bool { return o.Visible != "" }

// shortage says how many are free where that is not enough.
func (o offer) shortage() string {
	if o.cards+o.instances == 0 {
		return "no GPU is free; gwho --idle lists who holds one and does nothing"
	}
	text := fmt.Sprintf("%d wanted, and %s free", o.Wanted, areFree(o.cards, "GPU"))
	if o.instances > 0 {
		text += fmt.Sprintf(", with %s; a program can use one of those, or whole GPUs", plural(o.instances, "MIG instance"))
	}
	return text
}

func areFree(n int, noun string) string {
	if n == 1 {
		return "1 " + noun + " is"
	}
	return plural(n, noun) + " are"
}

// freePage shows what is free, and the line to paste.
func freePage(offered offer, o tableOptions) page {
	a := offered.Answer
	layout := newLayout(0, []column{
		{title: "GPU", right: true}, {title: "NAME", least: 8, drop: 3}, {title: "UTIL", right: true, drop: 2}, {title: "MEMORY", right: true, drop: 1}, {title: "UUID"},
	})
	var lines []line
	for _, c := range a.Cards {
		for _, d := range c.Devices {
			cells := cardLine(c)
			if d.UUID != c.UUID {
				cells = instanceLine(d)
			}
			cells = []cell{{deviceName(&c, &d), bold}, cells[1], cells[3], cells[4], {clean(d.UUID), green}}
			layout.fit(cells)
			lines = append(lines, line{layout: layout, cells: cells})
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
	if offered.enough() {
		if offered.cards == 0 && offered.instances > 1 {
			p.foot = append(p.foot, bounded("A program can use one MIG instance, or whole GPUs.", faint, o))
		}
		// To be pasted, so whole and without colours.
		p.foot = append(p.foot, whole("export "+variable+"="+offered.Visible, plain, o)...)
	}
	return p
}
