package main

import "strings"

// style is an SGR sequence for a terminal.
type style string

const (
	plain  style = ""
	bold   style = "1"
	faint  style = "2"
	red    style = "31"
	green  style = "32"
	cyan   style = "36"
	yellow style = "33"
)

// cell is a field of a line, already clean.
type cell struct {
	text  string
	style style
}

// column is how a column is laid out.
type column struct {
	title string
	// short stands for the title where room is short.
	short string
	right bool
	// least is the width down to which it may be cut; 0 for never.
	least int
	// drop is above 0 for a column that may be left out where room is short; the
	// highest goes first.
	drop int
	// ifAny is for a column that is left out if nothing is in it.
	ifAny bool
}

// layout is a set of columns, as wide as their widest cells.
type layout struct {
	indent  int
	columns []column
	widths  []int // 0 for a column that is left out
	content []int // of the cells, without the title
	shorten bool  // titles
}

const gap = 2

func newLayout(indent int, columns []column) *layout {
	l := &layout{indent: indent, columns: columns, widths: make([]int, len(columns)), content: make([]int, len(columns))}
	l.measure()
	return l
}

// fit makes room for a line.
func (l *layout) fit(line []cell) {
	for i, c := range line {
		l.content[i] = max(l.content[i], columns(c.text))
	}
	l.measure()
}

func (l *layout) measure() {
	for i, c := range l.columns {
		if l.widths[i] = max(columns(l.titleOf(c)), l.content[i]); c.ifAny && l.content[i] == 0 {
			l.widths[i] = 0
		}
	}
}

func (l *layout) titleOf(c column) string {
	if l.shorten && c.short != "" {
		return c.short
	}
	return c.title
}

// over is by how much a line is wider than total, with what may be cut at its
// least if squeezed.
func (l *layout) over(total int, squeezed bool) int {
	over := l.indent - gap - total
	for i, w := range l.widths {
		if w == 0 {
			continue
		}
		if least := l.columns[i].least; squeezed && least > 0 {
			w = min(w, least)
		}
		over += w + gap
	}
	return over
}

// shrink makes a line take at most total columns: it leaves out the columns
// without which the others fit, and cuts what may be cut, widest first. It does
// what it can.
func (l *layout) shrink(total int) {
	if l.over(total, true) > 0 {
		l.shorten = true
		l.measure()
	}
	for l.over(total, true) > 0 {
		first := -1
		for i, c := range l.columns {
			if l.widths[i] > 0 && c.drop > 0 && (first < 0 || c.drop > l.columns[first].drop) {
				first = i
			}
		}
		if first < 0 {
			break
		}
		l.widths[first] = 0
	}
	for over := l.over(total, false); over > 0; over-- {
		widest := -1
		for i, c := range l.columns {
			if c.least > 0 && l.widths[i] > c.least && (widest < 0 || l.widths[i] > l.widths[widest]) {
				widest = i
			}
		}
		if widest < 0 {
			return
		}
		l.widths[widest]--
	}
}

// title is the line of the columns' titles.
func (l *layout) title() []cell {
	line := make([]cell, len(l.columns))
	for i, c := range l.columns {
		line[i] = cell{l.titleOf(c), faint}
	}
	return line
}

// render is a line without its line break. With total > 0 it takes at most
// that many columns.
func (l *layout) render(line []cell, total int, colour bool) string {
	var b strings.Builder
	position := l.indent // columns taken so far, the held-back ones included
	held := l.indent     // spaces held back, so that no line ends in them
	for i, c := range line {
		width := l.widths[i]
		if width == 0 {
			continue
		}
		if total > 0 {
			width = min(width, total-position)
		}
		if width <= 0 {
			break
		}
		text := pad(cut(c.text, width), width, l.columns[i].right)
		content := strings.TrimRight(text, " ")
		position += width + gap
		if content == "" {
			held += width + gap
			continue
		}
		b.WriteString(strings.Repeat(" ", held))
		b.WriteString(paint(content, c.style, colour))
		held = len(text) - len(content) + gap
	}
	return b.String()
}

func paint(text string, s style, colour bool) string {
	if !colour || s == plain || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}
