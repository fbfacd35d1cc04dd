package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"gpuledger/exporter/history"
	"gpuledger/exporter/usage"
)

// historyTimeout is how long a month of a busy node may take to be read.
const historyTimeout = 30 * time.Second

// showHistory shows who held the cards before. The first selector may be the
// length of time that --history was to have.
func showHistory(ctx context.Context, o options, selectors []string, stdout io.Writer) (int, error) {
	length, err := history.ParseLength(o.history)
	if err != nil {
		return exitOK, exit{exitUsage, fmt.Errorf("--history: %w", err)}
	}
	if len(selectors) > 0 && o.history == defaultHistory {
		if given, err := history.ParseLength(selectors[0]); err == nil {
			length, selectors = given, selectors[1:]
		}
	}
	a, err := askHistory(ctx, o, length)
	if err != nil {
		return exitOK, err
	}
	whole := a
	a, unknown := history.Filter{Cards: o.cards}.Apply(a)
	if len(unknown) > 0 {
		return exitOK, exit{exitUsage, fmt.Errorf("--gpu %s: no such card in this history; there is %s", strings.Join(unknown, ","), historyCards(whole))}
	}
	a, nothing := selectHistory(a, selectors)
	code := exitOK
	if !a.Complete() {
		code = exitMissing
	}
	text := ""
	if o.json {
		body, err := json.MarshalIndent(a, "", "  ")
		if err != nil {
			return exitOK, exit{exitMissing, fmt.Errorf("print the history: %w", err)}
		}
		text = string(body) + "\n"
	} else {
		width, terminal := terminalWidth(stdout)
		text = historyTable(a, tableOptions{Width: width, Verbose: o.verbose, Zone: time.Local,
			Colour: terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"})
		for _, name := range nothing {
			text += clean(name) + ": held no GPU here in this time\n"
		}
	}
	if _, err := io.WriteString(stdout, text); err != nil {
		return exitOK, exit{exitMissing, fmt.Errorf("print the history: %w", err)}
	}
	return code, nil
}

// askHistory asks the exporter, which alone has any.
func askHistory(ctx context.Context, o options, length time.Duration) (history.Answer, error) {
	path := history.Path + "?since=" + history.FormatLength(length)
	where := o.socket
	var transport *http.Transport
	var request *http.Request
	var err error
	switch {
	case o.url != "":
		if transport, request, err = urlRequest("--url", o.url, path, o.tokenFile); err != nil {
			return history.Answer{}, exit{exitUsage, err}
		}
		where = redacted(o.url)
	case o.socket == "":
		return history.Answer{}, exit{exitMissing, errors.New("history is what gpu-exporter has written down: it can't be read without one (--socket, --url)")}
	default:
		if transport, request, err = socketRequest(o.socket, path); err != nil {
			return history.Answer{}, exit{exitMissing, err}
		}
	}
	defer transport.CloseIdleConnections()
	body, err := fetchBody(ctx, transport, request, asked{"gpu-exporter", historyTimeout, maxAnswer})
	var a history.Answer
	var no refused
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) && o.url == "":
		return a, exit{exitMissing, fmt.Errorf("history is what gpu-exporter has written down, and there is none at %s: %w", where, errNoExporter)}
	case errors.As(err, &no) && no.status == http.StatusNotFound:
		err = errors.New("it has no history: it is older than this gwho, or is no gpu-exporter")
	case err == nil:
		if err = json.Unmarshal(body, &a); err != nil {
			err = fmt.Errorf("the answer is not one of gpu-exporter: %w", err)
		} else {
			err = checkVersion("exporter", a.Version, history.Version)
		}
	}
	if err != nil {
		return a, exit{exitMissing, fmt.Errorf("gpu-exporter at %s: %w", where, err)}
	}
	return a, nil
}

// selectHistory keeps what the selectors name: cards, people, and one's own
// workloads. It returns also those that name nothing.
func selectHistory(a history.Answer, selectors []string) (history.Answer, []string) {
	var cards, people, nothing []string
	for _, each := range selectors {
		if _, unknown := (history.Filter{Cards: []string{each}}).Apply(a); len(unknown) == 0 {
			cards = append(cards, each)
		} else {
			people = append(people, each)
		}
	}
	a, _ = history.Filter{Cards: cards}.Apply(a)
	if len(people) == 0 {
		return a, nil
	}
	found := map[string]bool{}
	named := []history.Card{}
	for _, c := range a.Cards {
		c.Stretches = slices.DeleteFunc(slices.Clone(c.Stretches), func(s history.Stretch) bool {
			matches := false
			for _, name := range people {
				if s.State == usage.StateHeld && (s.User == name || s.UID != nil && strconv.FormatInt(*s.UID, 10) == name || s.Detail != nil && s.Detail.Workload == name) {
					matches, found[name] = true, true
				}
			}
			return !matches
		})
		if len(c.Stretches) > 0 {
			named = append(named, c)
		}
	}
	for _, name := range people {
		if !found[name] {
			nothing = append(nothing, name)
		}
	}
	a.Cards = named
	return a, nothing
}

func historyCards(a history.Answer) string {
	names := make([]string, len(a.Cards))
	for i, c := range a.Cards {
		names[i] = strconv.Itoa(c.Index)
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}

// historyTable shows a history to people: for each card and instance its
// stretches, newest first.
func historyTable(a history.Answer, o tableOptions) string {
	stretches := newLayout(5, []column{
		{title: "FROM"}, {title: "TO"}, {title: "USER", least: 8}, {title: "WORKLOAD", least: 12}, {title: "TIME", right: true},
		{title: "ACTIVITY", right: true}, {title: "IDLE", right: true}, {title: "ENERGY", right: true}, {title: "PEAK MEMORY", right: true},
	})
	var lines []line
	note := func(text string, s style) { lines = append(lines, line{text: cell{text, s}}) }
	for _, c := range a.Cards {
		note(fmt.Sprintf("%3d  %s", c.Index, cmp.Or(clean(c.Model), unknown)), bold)
		if o.Verbose {
			note("     "+clean(c.UUID), faint)
		}
		for _, device := range historyDevices(c) {
			if device != c.UUID {
				profile := c.Stretches[slices.IndexFunc(c.Stretches, func(s history.Stretch) bool { return s.Device == device })].Profile
				note(strings.TrimRight("     MIG "+clean(profile), " ")+"  "+clean(device), plain)
			}
			for _, s := range c.Stretches {
				if s.Device != device || s.State != usage.StateHeld && s.Detail != nil && s.Detail.ShareUS < 1e6 {
					continue // less than a second of nothing is not worth a line
				}
				cells := stretchLine(a, s, o.Zone)
				stretches.fit(cells)
				lines = append(lines, line{layout: stretches, cells: cells})
				if text := stretchDetails(s); o.Verbose && text != "" {
					note("       "+text, faint)
				}
			}
		}
	}
	if o.Width > 0 {
		stretches.shrink(o.Width)
	}
	var b strings.Builder
	b.WriteString(bounded(historyHeading(a, o.Zone), faint, o) + "\n\n")
	if len(lines) > 0 {
		b.WriteString("GPU  NAME\n" + stretches.render(stretches.title(), o.Width, o.Colour) + "\n")
	}
	for _, l := range lines {
		if l.layout == nil {
			b.WriteString(bounded(l.text.text, l.text.style, o) + "\n")
			continue
		}
		b.WriteString(l.layout.render(l.cells, o.Width, o.Colour) + "\n")
	}
	if len(a.Missing) > 0 {
		b.WriteString("\n")
	}
	for _, m := range a.Missing {
		b.WriteString(paint("! "+clean(m.Message), red, o.Colour) + "\n")
	}
	return b.String()
}

func historyHeading(a history.Answer, zone *time.Location) string {
	text := fmt.Sprintf("%s  %s to %s", cmp.Or(clean(a.Node), unknown), a.From.In(zone).Format("2006-01-02 15:04"), a.To.In(zone).Format("2006-01-02 15:04 MST"))
	switch {
	case a.JournalBegins == nil:
		return text + "  nothing is written down yet"
	case !a.From.After(*a.JournalBegins):
		text += "  (the journal begins there)"
	}
	return text + fmt.Sprintf("  in steps of %s", duration(time.Duration(a.BucketSeconds)*time.Second))
}

// historyDevices are the card itself and its instances, in the order of their
// newest stretches.
func historyDevices(c history.Card) []string {
	devices := []string{c.UUID}
	for _, s := range c.Stretches {
		if !slices.Contains(devices, s.Device) {
			devices = append(devices, s.Device)
		}
	}
	return devices
}

func stretchLine(a history.Answer, s history.Stretch, zone *time.Location) []cell {
	to := instant(s.To, a.AnsweredAt, zone)
	if !s.To.Before(a.To) {
		to = "now"
		if !a.Complete() {
			to = instant(a.To, a.AnsweredAt, zone)
		}
	}
	cells := []cell{{instant(s.From, a.AnsweredAt, zone), plain}, {to, plain}, {}, {}, {}, {}, {}, {}, {}}
	if s.State != usage.StateHeld {
		name, how := "("+s.State+")", faint
		switch s.State {
		case usage.StateIdle:
			name, how = "(free)", green
		case usage.StateDown, history.StateUnobserved:
			how = red
		}
		cells[2] = cell{name, how}
		if s.Detail != nil {
			cells[4].text = duration(time.Duration(s.Detail.ShareUS) * time.Microsecond)
		}
		if s.Detail != nil && s.Detail.EnergyMJ > 0 {
			cells[7].text = energy(s.Detail.EnergyMJ)
		}
		return cells
	}
	cells[2] = cell{cmp.Or(clean(s.User), unknown), bold}
	cells[3].text = cmp.Or(clean(s.Kind), unknown)
	d := s.Detail
	if d == nil {
		return cells // who and when is all that is told
	}
	if d.Workload != "" {
		cells[3].text += ":" + clean(d.Workload)
	}
	cells[4].text = duration(time.Duration(d.HeldUS) * time.Microsecond)
	cells[5].text, cells[6].text, cells[8].text = unknown, unknown, unknown
	if d.ActiveKnownUS > 0 {
		cells[5].text = fmt.Sprintf("%.0f %%", float64(d.ActiveUS)/float64(d.ActiveKnownUS)*100)
		if d.Estimated {
			cells[5].text = "~" + cells[5].text
		}
		cells[6].text = duration(time.Duration(d.IdleUS) * time.Microsecond)
	}
	cells[7].text = energy(d.EnergyMJ)
	if d.MemoryKnownUS > 0 {
		peak := uint64(max(0, d.PeakMemoryBytes))
		cells[8].text = bytes(&peak)
	}
	return cells
}

func stretchDetails(s history.Stretch) string {
	if s.State != usage.StateHeld || s.Detail == nil {
		return ""
	}
	parts := []string{"share " + duration(time.Duration(s.Detail.ShareUS)*time.Microsecond)}
	if s.UID != nil {
		parts = append(parts, "uid "+strconv.FormatInt(*s.UID, 10))
	}
	for _, p := range []struct{ name, value string }{{"attributed by", s.Detail.AttributedBy}, {"project", s.Detail.Project}, {"class", s.Detail.Class}} {
		if p.value != "" {
			parts = append(parts, p.name+" "+clean(p.value))
		}
	}
	return strings.Join(parts, ", ")
}

// instant is a time as short as it can be told from now.
func instant(at, now time.Time, zone *time.Location) string {
	at, now = at.In(zone), now.In(zone)
	switch {
	case at.Format(time.DateOnly) == now.Format(time.DateOnly):
		return at.Format("15:04")
	case now.Sub(at) < 6*24*time.Hour && now.After(at):
		return at.Format("Mon 15:04")
	}
	return at.Format("2006-01-02 15:04")
}

// energy is in watt-hours, as bills have it.
func energy(mj int64) string {
	switch wattHours := float64(mj) / 3.6e6; {
	case wattHours < 10:
		return fmt.Sprintf("%.1f Wh", wattHours)
	case wattHours < 10_000:
		return fmt.Sprintf("%.0f Wh", wattHours)
	default:
		return fmt.Sprintf("%.1f kWh", wattHours/1000)
	}
}
