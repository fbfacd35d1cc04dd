package main

import (
	"cmp"
	"fmt"
	"strconv"

	"gpuledger/exporter/who"
)

// mostSuspects is how many suspects are shown without -v.
const mostSuspects = 8

// taken are the lines about memory of a card that no listed process explains:
// who may have it and why, or what releases it.
func taken(c who.Card, verbose bool) []cell {
	if c.SuspectsVerdict == "" {
		return nil
	}
	lines := []cell{{clean(c.SuspectsMessage), yellow}}
	watching, left := 0, 0
	for _, s := range c.Suspects {
		switch {
		case s.Strength == "none" && !verbose:
			watching++
		case len(lines) > mostSuspects && !verbose:
			left++
		default:
			lines = append(lines, cell{"  " + suspectLine(s), plain})
			if verbose {
				for _, text := range suspectDetails(s) {
					lines = append(lines, cell{"    " + text, faint})
				}
			}
		}
	}
	if left > 0 {
		lines = append(lines, cell{fmt.Sprintf("  and %d more: gwho -v", left), faint})
	}
	if watching > 0 && c.SuspectsVerdict != who.SuspectsFound {
		text := "1 program has it open to watch it or to keep it ready"
		if watching > 1 {
			text = fmt.Sprintf("%d programs have it open to watch it or to keep it ready", watching)
		}
		lines = append(lines, cell{"  " + text + ": gwho -v", faint})
	}
	for _, remedy := range c.SuspectsRemedies {
		lines = append(lines, cell{"  - " + clean(remedy), plain})
	}
	return lines
}

func suspectLine(s who.Suspect) string {
	workload := cmp.Or(clean(s.Kind), unknown)
	if s.Workload != "" {
		workload += ":" + clean(s.Workload)
	}
	user := cmp.Or(clean(s.User), unknown)
	if s.Pending {
		user, workload = "looking up", "-"
	}
	text := fmt.Sprintf("%s  %s  %s  PID %s  %s", user, workload, cmp.Or(clean(s.Command), unknown), strconv.FormatUint(uint64(s.PID), 10), clean(s.Why))
	if s.Strength == "weak" {
		text += " (weak)"
	}
	return text
}

// suspectDetails are what -v adds below a suspect.
func suspectDetails(s who.Suspect) []string {
	return details(who.Holder{
		AttributedBy: s.AttributedBy, ContainerID: s.ContainerID, Image: s.Image, PodNamespace: s.PodNamespace, PodName: s.PodName,
		SlurmJob: s.SlurmJob, Unit: s.Unit, UID: s.UID, CommandLine: s.CommandLine,
	})
}
