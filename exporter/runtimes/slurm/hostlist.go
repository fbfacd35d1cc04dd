package slurm

import (
	"fmt"
	"strconv"
	"strings"
)

// maxExpanded bounds what a list of names can stand for.
const maxExpanded = 4096

// expand writes out a list of names as Slurm writes them: gpu[01-03,7],login.
// Names have one bracket at most, at their end or in their middle.
func expand(list string) ([]string, error) {
	var names []string
	for list != "" {
		end := comma(list)
		item := list[:end]
		list = strings.TrimPrefix(list[end:], ",")
		prefix, rest, bracket := strings.Cut(item, "[")
		if !bracket {
			names = append(names, item)
			continue
		}
		ranges, suffix, closed := strings.Cut(rest, "]")
		if !closed {
			return nil, fmt.Errorf("%.100q: a bracket that is not closed", item)
		}
		for part := range strings.SplitSeq(ranges, ",") {
			low, high, isRange := strings.Cut(part, "-")
			if !isRange {
				high = low
			}
			from, errFrom := strconv.ParseUint(low, 10, 32)
			to, errTo := strconv.ParseUint(high, 10, 32)
			if errFrom != nil || errTo != nil || from > to || to-from >= maxExpanded || len(names)+int(to-from) >= maxExpanded {
				return nil, fmt.Errorf("%.100q: %.40q is no range of numbers", item, part)
			}
			for n := from; n <= to; n++ {
				names = append(names, fmt.Sprintf("%s%0*d%s", prefix, len(low), n, suffix))
			}
		}
	}
	return names, nil
}

// comma is where the first comma outside brackets is.
func comma(list string) int {
	inside := false
	for i, c := range list {
		switch {
		case c == '[':
			inside = true
		case c == ']':
			inside = false
		case c == ',' && !inside:
			return i
		}
	}
	return len(list)
}
