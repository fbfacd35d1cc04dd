package metrics

import (
	"sort"
	"strings"
	"unicode"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
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
	if len(text) > maxLabelBytes {
		cut := maxLabelBytes
		for cut > maxLabelBytes-utf8.UTFMax && !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut]
	}
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(text, string(utf8.RuneError)))
}

// labelPairs joins names and values to pairs sorted by name, which is the
// order client_golang keeps. The values are made clean.
func labelPairs(names []string, values ...string) []*dto.LabelPair {
	pairs := make([]*dto.LabelPair, len(names))
	for i, name := range names {
		pairs[i] = &dto.LabelPair{Name: proto.String(name), Value: proto.String(cleanLabel(values[i]))}
	}
	sort.Slice(pairs, func(i, j int) bool { return pairs[i].GetName() < pairs[j].GetName() })
	return pairs
}
