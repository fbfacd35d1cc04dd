package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"gpuledger/exporter/procfs/text"
)

// ReportVersion is the version of the JSON form. Fields are added without
// raising it.
const ReportVersion = 1

// WriteJSON writes findings as one JSON object.
func WriteJSON(w io.Writer, findings []Finding) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(struct {
		Version  int       `json:"version"`
		OK       int       `json:"ok"`
		Warnings int       `json:"warnings"`
		Problems int       `json:"problems"`
		Findings []Finding `json:"findings"`
	}{ReportVersion, Count(findings, OK), Count(findings, Warning), Count(findings, Problem), findings})
}

// WriteText writes findings for people: a line for each, what comes of it and
// what to do below, and a line that sums up.
func WriteText(w io.Writer, findings []Finding) error {
	width := 0
	for _, one := range findings {
		width = max(width, len(one.Check))
	}
	var out strings.Builder
	for _, one := range findings {
		fmt.Fprintf(&out, "%-8s %-*s  %s\n", one.Level, width, one.Check, text.Clean(one.Found, 0))
		indent := strings.Repeat(" ", 8+1+width+2)
		if one.Consequence != "" {
			fmt.Fprintf(&out, "%sso:  %s\n", indent, text.Clean(one.Consequence, 0))
		}
		if one.Remedy != "" {
			fmt.Fprintf(&out, "%sdo:  %s\n", indent, text.Clean(one.Remedy, 0))
		}
	}
	fmt.Fprintf(&out, "\n%d ok, %s, %s\n", Count(findings, OK), counted(Count(findings, Warning), "warning"), counted(Count(findings, Problem), "problem"))
	_, err := io.WriteString(w, out.String())
	return err
}

func counted(count int, what string) string {
	if count == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", count, what)
}
