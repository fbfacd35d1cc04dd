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
	right bool
	// least is the width down to which it may be cut; 0 for never.
	least int
}

// layout is a set of columns, as wide as their widest cells.
type layout struct {
	indent  int
	columns []column
	widths  []int
}

const gap = 2

func newLayout(indent int, columns []column) *layout {
	l := &layout{indent: indent, columns: columns, widths: make([]int, len(columns))}
	for i, c := range columns {
		l.widths[i] = len(c.title)
	}
	return l
}

// fit makes room for a line.
func (l *layout) fit(line []cell) {
	for i, c := range line {
		l.widths[i] = max(l.widths[i], columns(c.text))
	}
}

// shrink cuts what may be cut, widest first, until a line takes at most total
// columns. It does what it can.
func (l *layout) shrink(total int) {
	over := l.indent - gap - total
	for _, w := range l.widths {
		over += w + gap
	}
	for ; over > 0; over-- {
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
		line[i] = cell{c.title, faint}
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
