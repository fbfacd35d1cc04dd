package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/who"
)

// view is which part of an answer is shown, and how.
type view struct {
	selectors []string
	free      bool
	idle      time.Duration // 0 for everybody
	sortKey   string
	reverse   bool
	text      string // what has to stand in a line
}

// selection is the part of an answer that is shown.
type selection struct {
	who.Answer
	offer   *offer   // of what is free, where that was asked for
	nothing []string // selectors that name nothing
	code    int
}

// choose takes the part of an answer that was asked for.
func choose(a who.Answer, o options, v view) (selection, error) {
	filtered, unknown := who.Filter{Cards: o.cards}.Apply(a)
	if len(unknown) > 0 && a.Error == "" {
		return selection{}, exit{exitUsage, fmt.Errorf("--gpu %s: no such card here; there is %s", strings.Join(unknown, ","), cardList(a))}
	}
	filtered, nothing := who.Select(filtered, v.selectors)
	for _, name := range nothing {
		if strings.HasPrefix(name, "gpu:") && a.Error == "" {
			return selection{}, exit{exitUsage, fmt.Errorf("%s: no such card here; there is %s", name, cardList(a))}
		}
	}
	if v.free && a.Error == "" {
		for _, name := range v.selectors {
			if _, unknown := (who.Filter{Cards: []string{strings.TrimPrefix(name, "gpu:")}}).Apply(a); len(unknown) > 0 {
				return selection{}, exit{exitUsage, fmt.Errorf("%s: no such card here, and nobody holds what is free; there is %s", name, cardList(a))}
			}
		}
	}
	s := selection{Answer: filtered, nothing: nothing, code: judge(a, filtered)}
	if v.idle > 0 {
		s.Answer = keepIdle(s.Answer, v.idle)
		if a.Source == who.SourceDirect && s.code == exitOK {
			s.code = exitMissing
			s.Missing = append(slices.Clone(s.Missing), who.Missing{What: who.MissingExporter,
				Message: "for how long anybody has done nothing is known to gpu-exporter alone, and there is none here"})
		}
	}
	if v.text != "" {
		s.Answer = containing(s.Answer, v.text)
	}
	if v.free {
		offered := offerOf(s.Answer, o.count)
		s.offer, s.Answer = &offered, offered.Answer
		switch {
		case s.code == exitNoGPU:
		case !offered.enough():
			s.code = exitNotFree
		case !slices.ContainsFunc(a.Missing, func(m who.Missing) bool { return m.What == who.MissingStale }):
			s.code = exitOK // what is not known of other cards makes these no less free
		}
	}
	return s, nil
}

// page lays out what was chosen.
func (s selection) page(whole who.Answer, v view, o tableOptions) page {
	o.Free = freeCount(whole)
	switch {
	case s.offer != nil:
		return freePage(*s.offer, o)
	case v.idle > 0:
		return idlePage(s.Answer, v.idle, o)
	case v.sortKey != "" && v.sortKey != byCard:
		return sortedPage(s.Answer, v.sortKey, v.reverse, o)
	}
	return cardsPage(s.Answer, o)
}

func (o options) view(selectors []string) view {
	return view{selectors: selectors, free: o.free, idle: time.Duration(o.idle), sortKey: o.sort}
}

// show answers once, or again and again until ctx ends.
func show(ctx context.Context, o options, selectors []string, stdout, stderr io.Writer) (int, error) {
	v := o.view(selectors)
	_, terminal := terminalWidth(stdout)
	if o.watch > 0 && terminal && !o.json && !dumb() {
		return watch(ctx, o, v, stdout)
	}
	a, err := ask(ctx, o)
	if err != nil {
		return exitOK, err
	}
	for {
		s, err := choose(a, o, v)
		if err != nil {
			return exitOK, err
		}
		if s.code == exitNoGPU && len(a.Cards) == 0 && !o.json {
			fmt.Fprintln(stderr, "gwho: "+clean(noGPU(a)))
		} else if err := print(o, v, a, s, stdout, stderr); err != nil {
			return exitOK, exit{exitMissing, fmt.Errorf("print the answer: %w", err)}
		}
		if s.offer != nil && s.code == exitNotFree && !o.json {
			fmt.Fprintln(stderr, "gwho: "+s.offer.shortage())
		}
		if o.watch == 0 {
			return s.code, nil
		}
		next, err := o.next(ctx, a, stdout)
		if err != nil {
			return exitOK, exit{exitMissing, fmt.Errorf("print the answer: %w", err)}
		}
		if next == nil {
			return s.code, nil
		}
		a = *next
	}
}

// next waits for the next answer of a watch without a screen. While there is
// none it says so, and goes on: what reads the output is to outlive a restart of
// the exporter. It returns nil when ctx ends.
func (o options) next(ctx context.Context, last who.Answer, stdout io.Writer) (*who.Answer, error) {
	answeredAt := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil, nil
		case <-time.After(time.Duration(o.watch)):
		}
		a, err := o.askAgain(ctx, last)
		if err == nil {
			return &a, nil
		}
		if ctx.Err() != nil {
			return nil, nil
		}
		without := last
		without.AnsweredAt, without.Cards = time.Now().UTC(), []who.Card{}
		without.Missing = []who.Missing{{What: who.MissingExporter, Message: fmt.Sprintf("no answer for %s: %v", time.Since(answeredAt).Round(time.Second), err)}}
		text := strings.Join(missing(without, tableOptions{}), "\n")
		if o.json {
			line, err := json.Marshal(without)
			if err != nil {
				return nil, err
			}
			text = string(line)
		}
		if _, err := io.WriteString(stdout, text+"\n"); err != nil {
			return nil, err
		}
	}
}

// askAgain asks where the last answer came from. An exporter that restarts is
// waited for: reading NVML beside it each time would say less and cost more.
func (o options) askAgain(ctx context.Context, last who.Answer) (who.Answer, error) {
	if last.Source == who.SourceExporter && o.url == "" {
		a, err := askSocket(ctx, o.socket)
		if err != nil {
			err = fmt.Errorf("gpu-exporter at %s: %w", o.socket, err)
		}
		return a, err
	}
	return ask(ctx, o)
}

func print(o options, v view, whole who.Answer, s selection, stdout, stderr io.Writer) error {
	if o.json {
		for _, name := range s.nothing {
			fmt.Fprintln(stderr, "gwho: "+clean(name)+": on no GPU here")
		}
		encoder := json.NewEncoder(stdout)
		if o.watch == 0 { // with --watch, an answer is a line
			encoder.SetIndent("", "  ")
		}
		if s.offer != nil {
			return encoder.Encode(s.offer)
		}
		return encoder.Encode(s.Answer)
	}
	width, terminal := terminalWidth(stdout)
	text := s.page(whole, v, o.table(width, terminal)).String()
	if len(whole.Cards) > 0 {
		for _, name := range s.nothing {
			text += clean(name) + ": on no GPU here\n"
		}
	}
	if o.watch > 0 {
		text += "\n" // between two answers
	}
	_, err := io.WriteString(stdout, text)
	return err
}

func (o options) table(width int, terminal bool) tableOptions {
	return tableOptions{
		Width: width, Colour: terminal && os.Getenv("NO_COLOR") == "" && !dumb(),
		Bars: terminal, Verbose: o.verbose, Zone: time.Local,
	}
}

// dumb says that the terminal can do nothing but print lines.
func dumb() bool { return slices.Contains([]string{"", "dumb"}, os.Getenv("TERM")) }

// judge is the exit code for an answer.
func judge(whole, filtered who.Answer) int {
	switch {
	case whole.Error != "", whole.Expected == 0 && len(whole.Cards) == 0:
		return exitNoGPU
	case !filtered.Complete():
		return exitMissing
	}
	return exitOK
}

func noGPU(a who.Answer) string {
	if a.Error != "" {
		return a.Error
	}
	return "the driver is loaded, but NVML counts no GPU; see lspci and dmesg"
}

func cardList(a who.Answer) string {
	if len(a.Cards) == 0 {
		return "none"
	}
	names := make([]string, len(a.Cards))
	for i, c := range a.Cards {
		names[i] = fmt.Sprint(c.Index)
	}
	return strings.Join(names, ", ")
}

// terminalWidth is how wide the terminal behind w is; false if there is none.
func terminalWidth(w io.Writer) (int, bool) {
	file, ok := w.(*os.File)
	if !ok {
		return 0, false
	}
	if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err != nil {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, true // a terminal that does not say: nothing is cut
	}
	return int(size.Col), true
}
