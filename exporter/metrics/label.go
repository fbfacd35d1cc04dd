package metrics

import (
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
)

// maxLabelBytes bounds a label value. No name the kernel, a runtime or NVML
// gives is as long; a label on a container can be.
const maxLabelBytes = 512

// cleanLabel makes any text a label value that every parser takes: valid
// UTF-8, bounded, and without control characters except newline and tab. NUL
// ends the input for Prometheus's own lexer, so escaping doesn't help.
func cleanLabel(text string) string {
	clean := len(text) <= maxLabelBytes
	for i := 0; clean && i < len(text); i++ {
		clean = text[i] >= ' ' && text[i] < 0x7f
	}
	if clean {
		return text
	}
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(text, string(utf8.RuneError)))
	if len(text) <= maxLabelBytes {
		return text
	}
	cut := maxLabelBytes
	for !utf8.RuneStart(text[cut]) {
		cut--
	}
	return text[:cut]
}

// labelPairs joins names and values to pairs sorted by name, which is the
// order client_golang keeps. The values are made clean. names must not change
// afterwards.
func labelPairs(names []string, values ...string) []*dto.LabelPair {
	cells := make([]struct {
		pair  dto.LabelPair
		value string
	}, len(names))
	pairs := make([]*dto.LabelPair, len(names))
	for i := range names {
		cell := &cells[i]
		cell.value = cleanLabel(values[i])
		cell.pair.Name, cell.pair.Value = &names[i], &cell.value
		pairs[i] = &cell.pair
	}
	slices.SortFunc(pairs, func(a, b *dto.LabelPair) int { return strings.Compare(*a.Name, *b.Name) })
	return pairs
}
