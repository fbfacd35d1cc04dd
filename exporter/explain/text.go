package explain

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/procfs/text"
)

// WriteJSON writes a report as one JSON object.
func WriteJSON(w io.Writer, r Report) error {
	encoder := json.NewEncoder(w)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

// WriteText writes a report for people: the answer, the evidence, and what
// each step says.
func WriteText(w io.Writer, r Report) error {
	var out strings.Builder
	fmt.Fprintf(&out, "process %d (%s)", r.PID, r.Evidence.Command)
	if r.Zombie {
		out.WriteString(", ended and not reaped")
	}
	fmt.Fprintf(&out, ", started %s\n", r.StartedAt.Format(time.RFC3339))
	fmt.Fprintln(&out, r.Answer.sentence())
	out.WriteString("\nevidence\n")
	for _, line := range r.Evidence.lines() {
		fmt.Fprintf(&out, "  %-14s %s\n", line[0], text.Clean(line[1], 0))
	}
	out.WriteString("\nsteps\n")
	width := 0
	for _, s := range r.Steps {
		width = max(width, len([]rune(s.says())))
	}
	for _, s := range r.Steps {
		mark := " "
		if s.Decides {
			mark = "*"
		}
		says := s.says()
		fmt.Fprintf(&out, "%s %-12s %s%s  %s\n", mark, s.Step, text.Clean(says, 0), strings.Repeat(" ", width-len([]rune(says))), text.Clean(s.Why, 0))
	}
	if len(r.Unseen) > 0 {
		out.WriteString("\nnot seen\n")
		for _, line := range r.Unseen {
			fmt.Fprintf(&out, "  %s\n", text.Clean(line, 0))
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

func (s Step) says() string {
	says := "passes"
	switch {
	case s.Named:
		says = s.User
	case s.Waiting:
		says = "waits"
	}
	if !s.On {
		says += " (off)"
	}
	return says
}

func (a Answer) sentence() string {
	parts := []string{"it is the system's own, of " + a.User}
	if !a.System {
		parts = []string{"it is " + a.User + "'s"}
		if a.AttributedBy == "none" {
			parts = []string{"nobody could be named: it is " + a.User}
		}
	}
	if a.UID != nil && a.User != "uid:"+strconv.FormatInt(*a.UID, 10) {
		parts[0] += " (uid " + strconv.FormatInt(*a.UID, 10) + ")"
	}
	by := "by " + a.AttributedBy
	for _, each := range []struct{ what, value string }{{"rule", a.Rule}, {"key", a.Key}, {"confidence", a.Confidence}} {
		if each.value != "" {
			by += ", " + each.what + " " + each.value
		}
	}
	parts = append(parts, by)
	for _, each := range []struct{ what, value string }{
		{"workload", strings.TrimSpace(a.Kind + " " + a.Workload)}, {"project", a.Project}, {"class", a.Class},
	} {
		if each.value != "" {
			parts = append(parts, each.what+" "+each.value)
		}
	}
	for _, each := range []struct {
		is   bool
		text string
	}{
		{a.Review, "needs review before billing"}, {a.Disagrees, "something else of high confidence names another user"},
		{a.Pending, "names are still being looked up"},
	} {
		if each.is {
			parts = append(parts, each.text)
		}
	}
	return text.Clean(strings.Join(parts, "; "), 0)
}

func number(uid *int64) string {
	if uid == nil {
		return "not known"
	}
	return strconv.FormatInt(*uid, 10)
}

// lines are what is known, by name.
func (e Evidence) lines() [][2]string {
	var lines [][2]string
	add := func(name, value string) {
		if value != "" {
			lines = append(lines, [2]string{name, value})
		}
	}
	add("uid", number(e.ProcessUID)+", effective "+number(e.EffectiveUID))
	add("login uid", number(e.LoginUID))
	add("slice uid", number(e.SliceUID))
	program := "may not be read"
	if e.Executable != "" {
		program = e.Executable + ", of uid " + number(e.ExecutableUID)
	}
	add("program", program)
	unit := e.Unit
	if unit != "" && e.SystemSlice {
		unit += ", in a system slice"
	}
	add("unit", unit)
	add("in", strings.Join(e.Chain, " > "))
	where := "in a container, or a namespace of its own"
	if e.HostProcess {
		where = "on the host itself"
	}
	if e.EngineOfRoot {
		where += ", maybe of an engine of root's"
	}
	if e.MPSServer {
		where += "; an MPS server that root's daemon started"
	}
	add("runs", where)
	if e.UserNamespace {
		add("user namespace", "its own; uid 0 there is uid "+number(e.NamespaceRootUID))
	}
	if e.Variables != nil {
		variables := "none of those that are looked for"
		if len(e.Variables) > 0 {
			variables = strings.Join(e.Variables, ", ")
		}
		add("variables", variables)
	}
	if j := e.Job; j != nil {
		add("job", fmt.Sprintf("%s %s, of uid %s", j.System, j.ID, number(j.UID))+some(", step ", j.Step)+
			some(", account ", j.Account)+some(", partition ", j.Partition)+some(", QOS ", j.QOS))
	}
	if p := e.Pod; p != nil {
		add("pod", p.Namespace+"/"+p.Name+some(", uid ", p.UID)+some(", priority class ", p.PriorityClass)+some(", service account ", p.ServiceAccount))
		add("annotations", pairs(p.Annotations))
		add("pod labels", pairs(p.Labels))
	}
	if c := e.Container; c != nil {
		add("container", c.Name+some(", image ", c.Image)+some(", id ", c.ID))
		if c.ImageKnown {
			add("started as", strconv.Quote(c.User)+", the image says "+strconv.Quote(c.ImageUser))
		} else {
			add("started as", strconv.Quote(c.User)+", the image is not known")
		}
		add("labels", pairs(c.Labels))
		add("of the image", pairs(c.ImageLabels))
		for _, b := range c.Binds {
			add("was given", b.Path+", of uid "+number(b.OwnerUID))
		}
	}
	return lines
}

func some(name, value string) string {
	if value == "" {
		return ""
	}
	return name + value
}

func pairs(m map[string]string) string {
	var list []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		list = append(list, key+"="+strconv.Quote(m[key]))
	}
	return strings.Join(list, ", ")
}
