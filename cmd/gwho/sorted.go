package main

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/who"
)

// What holders are sorted by.
const (
	byCard     = "gpu" // not sorted: under their cards
	byUser     = "user"
	byMemory   = "memory"
	byActivity = "activity"
	byIdle     = "idle"
	bySince    = "since"
)

var sortKeys = []string{byCard, byUser, byMemory, byActivity, byIdle, bySince}

// held is a holder and what it is on.
type held struct {
	card   *who.Card
	device *who.Device
	holder who.Holder
}

func everyHolder(a who.Answer) []held {
	var all []held
	for i := range a.Cards {
		for j := range a.Cards[i].Devices {
			d := &a.Cards[i].Devices[j]
			for _, h := range d.Holders {
				all = append(all, held{&a.Cards[i], d, h})
			}
		}
	}
	return all
}

// sortHolders puts those first who are looked for by that key: the most memory
// and activity, the longest time. What is not known comes last either way.
func sortHolders(all []held, key string, reverse bool) {
	slices.SortStableFunc(all, func(x, y held) int {
		var order int
		switch key {
		case byUser:
			order = cmp.Or(cmp.Compare(x.holder.User, y.holder.User), cmp.Compare(x.holder.Kind, y.holder.Kind), cmp.Compare(x.holder.Workload, y.holder.Workload))
			if reverse {
				order = -order
			}
		case byMemory:
			order = compareKnown(x.holder.MemoryBytes, y.holder.MemoryBytes, !reverse)
		case byActivity:
			order = compareKnown(x.holder.ActivityPercent, y.holder.ActivityPercent, !reverse)
		case byIdle:
			order = compareKnown(x.holder.IdleSeconds, y.holder.IdleSeconds, !reverse)
		case bySince:
			order = compareKnown(seconds(holdingSince(x.holder)), seconds(holdingSince(y.holder)), reverse)
		}
		return order
	})
}

func compareKnown[T cmp.Ordered](x, y *T, most bool) int {
	switch {
	case x == nil && y == nil:
		return 0
	case x == nil:
		return 1
	case y == nil:
		return -1
	case most:
		return cmp.Compare(*y, *x)
	}
	return cmp.Compare(*x, *y)
}

func seconds(t *time.Time) *int64 {
	if t == nil {
		return nil
	}
	return new(t.Unix())
}

// sortedPage shows the holders of all cards as one list.
func sortedPage(a who.Answer, key string, reverse bool, o tableOptions) page {
	all := everyHolder(a)
	sortHolders(all, key, reverse)
	layout := newLayout(0, slices.Insert(holderColumns(), 0, column{title: "GPU"}))
	var lines []line
	for _, h := range all {
		cells := slices.Insert(holderLine(a, h.holder, o.Zone), 0, cell{deviceName(h.card, h.device), bold})
		layout.fit(cells)
		lines = append(lines, line{layout: layout, cells: cells})
		if o.Verbose {
			for _, text := range details(h.holder) {
				lines = append(lines, line{text: cell{"       " + text, faint}})
			}
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
	return p
}

// deviceName is a card's index, with an instance's place on it: "4", "4/1/0".
func deviceName(c *who.Card, d *who.Device) string {
	name := unknown
	if c.Index >= 0 {
		name = strconv.Itoa(c.Index)
	}
	if d.GPUInstance != nil && d.ComputeInstance != nil {
		return fmt.Sprintf("%s/%d/%d", name, *d.GPUInstance, *d.ComputeInstance)
	}
	return name
}

// containing keeps the holders, and the cards without any, in which text
// stands, in upper or lower case.
func containing(a who.Answer, text string) who.Answer {
	text = strings.ToLower(text)
	has := func(values ...string) bool {
		return slices.ContainsFunc(values, func(v string) bool { return strings.Contains(strings.ToLower(v), text) })
	}
	cards := []who.Card{}
	for _, c := range a.Cards {
		devices := []who.Device{}
		for _, d := range c.Devices {
			all := has(c.Name, c.UUID, d.UUID, d.Profile)
			d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h who.Holder) bool {
				pid := ""
				if h.PID != nil {
					pid = strconv.FormatUint(uint64(*h.PID), 10)
				}
				return !all && !has(h.User, h.Kind+":"+h.Workload, h.Command, pid, h.Project, h.ContainerID, h.ContainerName, h.Image, h.PodNamespace+"/"+h.PodName, h.SlurmJob, h.Unit, notes(h))
			})
			if all || len(d.Holders) > 0 {
				devices = append(devices, d)
			}
		}
		c.Devices = devices
		c.Suspects = slices.DeleteFunc(slices.Clone(c.Suspects), func(s who.Suspect) bool {
			return !has(s.User, s.Kind+":"+s.Workload, s.Command, strconv.FormatUint(uint64(s.PID), 10))
		})
		if len(c.Suspects) == 0 {
			c.SuspectsVerdict = "" // a line about nobody who is looked for
		}
		if len(devices) > 0 || len(c.Suspects) > 0 {
			cards = append(cards, c)
		}
	}
	a.Cards = cards
	return a
}
