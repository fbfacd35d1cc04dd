package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"gpuledger/exporter/history"
	"gpuledger/exporter/who"
)

// screen is the live view: the newest answer, and how it is looked at.
type screen struct {
	ctx   context.Context
	o     options
	view  view
	now   func() time.Time
	stops stops

	width, height int
	answer        *who.Answer // nil before the first
	answeredAt    time.Time
	failure       error // of the newest question, nil if it was answered
	code          int
	fatal         error // ends the view
	first         int   // line of the body that is at the top
	typing        bool  // of the text to look for
	help          bool
}

// answered is the end of one question.
type answered struct {
	answer who.Answer
	err    error
}

type askNow struct{}

// watch shows a live view until it is quit, and returns the exit code of what
// was shown last.
func watch(ctx context.Context, o options, v view, stdout io.Writer) (int, error) {
	s := &screen{ctx: ctx, o: o, view: v, now: time.Now}
	program := tea.NewProgram(s, tea.WithContext(ctx), tea.WithOutput(stdout), tea.WithoutSignalHandler())
	defer s.stops.handle(program)()
	_, err := program.Run()
	switch {
	case s.fatal != nil:
		return exitOK, s.fatal
	case errors.Is(err, tea.ErrInterrupted), ctx.Err() != nil:
		return s.code, nil
	case err != nil:
		return exitOK, exit{exitMissing, fmt.Errorf("the live view (without --watch there is none): %w", err)}
	}
	return s.code, nil
}

// Init asks for the first answer.
func (s *screen) Init() tea.Cmd { return s.ask() }

// ask asks beside what the keys do, so with the flags as they are now.
func (s *screen) ask() tea.Cmd {
	ctx, o, last := s.ctx, s.o, s.answer
	return func() tea.Msg {
		if last != nil {
			a, err := o.askAgain(ctx, *last)
			return answered{a, err}
		}
		a, err := ask(ctx, o)
		return answered{a, err}
	}
}

// Update takes in a key, a new size or an answer.
func (s *screen) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	switch message := message.(type) {
	case tea.WindowSizeMsg:
		s.width, s.height = message.Width, message.Height
	case askNow:
		return s, s.ask()
	case answered:
		return s, s.take(message)
	case stopNow:
		return s, tea.Exec(&s.stops, nil)
	case tea.KeyPressMsg:
		return s, s.key(message)
	}
	return s, nil
}

// take keeps an answer. One that can't be had leaves the one before on the
// screen, unless asking again can't help.
func (s *screen) take(got answered) tea.Cmd {
	if s.failure = got.err; got.err == nil {
		chosen, err := choose(got.answer, s.o, s.view)
		if err != nil {
			s.fatal = err
			return tea.Quit
		}
		s.answer, s.answeredAt, s.code = &got.answer, s.now(), chosen.code
	} else {
		s.code = exitMissing
		if usage := (exit{}); errors.As(got.err, &usage) && usage.code == exitUsage {
			s.fatal = got.err
			return tea.Quit
		}
	}
	return tea.Tick(time.Duration(s.o.watch), func(time.Time) tea.Msg { return askNow{} })
}

func (s *screen) key(key tea.KeyPressMsg) tea.Cmd {
	name := key.String()
	switch name {
	case "ctrl+c":
		return tea.Quit
	case "ctrl+z":
		return func() tea.Msg { return stopNow{} }
	}
	if s.typing {
		s.typed(name, key.Key().Text)
		return nil
	}
	page := max(1, s.height-6)
	switch name {
	case "q":
		return tea.Quit
	case "esc":
		s.help, s.view.text, s.first = false, "", 0
	case "?", "h":
		s.help = !s.help
	case "/":
		s.typing, s.help, s.view.text = true, false, ""
	case "up", "k":
		s.first--
	case "down", "j":
		s.first++
	case "pgup":
		s.first -= page
	case "pgdown", "space":
		s.first += page
	case "home", "g":
		s.first = 0
	case "end", "G":
		s.first = 1 << 30 // View brings it back to the last line
	case "f":
		s.view.free, s.view.idle, s.first = !s.view.free, 0, 0
	case "i":
		s.view.free, s.first = false, 0
		if s.view.idle > 0 {
			s.view.idle = 0
		} else if s.view.idle = time.Duration(s.o.idle); s.view.idle == 0 {
			s.view.idle = defaultIdle
		}
	case "v":
		s.o.verbose = !s.o.verbose
	case "s":
		s.sortBy(sortKeys[(slices.Index(sortKeys, s.view.sortKey)+1+len(sortKeys))%len(sortKeys)])
	case "r":
		s.view.reverse = !s.view.reverse
	case "c":
		s.sortBy(byCard)
	case "u":
		s.sortBy(byUser)
	case "m":
		s.sortBy(byMemory)
	case "a":
		s.sortBy(byActivity)
	case "d":
		s.sortBy(byIdle)
	case "t":
		s.sortBy(bySince)
	}
	s.first = max(0, s.first)
	return nil
}

func (s *screen) sortBy(key string) {
	s.view.sortKey, s.view.free, s.view.idle, s.first = key, false, 0, 0
}

// typed takes a key of the text to look for.
func (s *screen) typed(name, text string) {
	switch name {
	case "enter":
		s.typing = false
	case "esc":
		s.typing, s.view.text = false, ""
	case "backspace":
		if runes := []rune(s.view.text); len(runes) > 0 {
			s.view.text = string(runes[:len(runes)-1])
		}
	case "ctrl+u":
		s.view.text = ""
	default:
		if len(s.view.text)+len(text) <= 64 {
			s.view.text += text
		}
	}
	s.first = 0
}

const keys = `q        quit                    /  show what holds a text (esc: all)
arrows, j k, space, g G: scroll    f  only what is free
s        sort by the next column    i  only who does nothing (1h)
u m a d t  sort by user, memory, activity, idle, since
c        back to the cards          v  all there is to know
r        the other way round        ?  this help`

// View draws the screen: as many lines as there is room for.
func (s *screen) View() tea.View {
	v := tea.NewView(strings.Join(s.lines(), "\n"))
	v.AltScreen, v.WindowTitle = true, "gwho"
	return v
}

func (s *screen) lines() []string {
	if s.width <= 0 || s.height <= 0 {
		return nil
	}
	o := s.o.table(s.width, true)
	o.Wrap = true
	foot := []string{bounded(s.status(), faint, o)}
	if s.failure != nil {
		foot = append(whole("! "+clean(s.failure.Error()), red, o), foot...)
	}
	if s.help {
		foot = append(strings.Split(keys, "\n"), foot...)
		for i := range foot {
			foot[i] = bounded(foot[i], plain, o)
		}
	}
	var head, body []string
	if s.answer == nil {
		head = []string{bounded("asking who holds what", faint, o)}
	} else if chosen, err := choose(*s.answer, s.o, s.view); err != nil {
		body = whole(clean(err.Error()), red, o)
	} else {
		p := chosen.page(*s.answer, s.view, o)
		head = append([]string{p.heading}, p.titles...)
		body = append(p.body, p.foot...)
		for _, name := range chosen.nothing {
			body = append(body, bounded(clean(name)+": on no GPU here", plain, o))
		}
		if chosen.offer != nil && !chosen.offer.enough() {
			body = append(body, whole(chosen.offer.shortage(), yellow, o)...)
		}
		if chosen.code == exitNoGPU && len(s.answer.Cards) == 0 {
			body = append(body, whole(clean(noGPU(*s.answer)), red, o)...)
		}
		if len(body) == 0 {
			body = []string{bounded("nothing to show", faint, o)}
		}
		body = append(body, p.missing...)
	}
	// Of a low terminal the answer gets more than what is around it.
	foot = foot[max(0, len(foot)-max(1, s.height/2)):]
	head = head[:min(len(head), max(0, s.height-len(foot)-1))]
	room := max(0, s.height-len(foot)-len(head))
	s.first = min(s.first, max(0, len(body)-room))
	below := body[s.first:]
	if len(below) > room {
		below = below[:room]
	}
	lines := append(head, below...)
	for len(lines)+len(foot) < s.height {
		lines = append(lines, "")
	}
	return append(lines, foot...)[:s.height]
}

// status is the line at the bottom.
func (s *screen) status() string {
	if s.typing {
		return "/" + s.view.text + "_   enter: keep, esc: all"
	}
	parts := []string{"q quit", "? keys"}
	if s.view.text != "" {
		parts = append(parts, "with "+s.view.text)
	}
	if s.view.sortKey != "" && s.view.sortKey != byCard && !s.view.free && s.view.idle == 0 {
		parts = append(parts, "by "+s.view.sortKey)
	}
	if s.view.free {
		parts = append(parts, "free only")
	}
	if s.view.idle > 0 {
		parts = append(parts, "idle for "+history.FormatLength(s.view.idle))
	}
	if s.failure != nil && s.answer != nil {
		parts = append(parts, fmt.Sprintf("no answer; this one is %s old", s.now().Sub(s.answeredAt).Round(time.Second)))
	}
	return strings.Join(append(parts, "/ look for", "s sort", "f free", "i idle", "v more"), "  ")
}
