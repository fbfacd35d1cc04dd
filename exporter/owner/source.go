package owner

import (
	"maps"
	"slices"
	"strings"
)

// labelSource begins a source that is a label of a container, or of a pod.
const labelSource = "label:"

// sources are where project and class can come from, beside labels.
var sources = map[string]func(Evidence) string{
	"slurm:account":   func(e Evidence) string { return e.slurm().Account },
	"slurm:qos":       func(e Evidence) string { return e.slurm().QOS },
	"slurm:partition": func(e Evidence) string { return e.slurm().Partition },
	"kubernetes:namespace": func(e Evidence) string {
		if e.Pod == nil {
			return ""
		}
		return e.Pod.Namespace
	},
	"kubernetes:priority_class": func(e Evidence) string {
		if e.Pod == nil {
			return ""
		}
		return e.Pod.PriorityClass
	},
}

func (e Evidence) slurm() Job {
	if e.Job == nil || e.Job.System != "slurm" {
		return Job{}
	}
	return *e.Job
}

func fixedSources() []string { return slices.Sorted(maps.Keys(sources)) }

func knownSource(source string) bool {
	key, label := strings.CutPrefix(source, labelSource)
	return label && key != "" || sources[source] != nil
}

// projectAndClass takes them from the first rule that sets them, else from the
// first source that is not empty.
func (c Config) projectAndClass(e Evidence, answer *Answer) {
	for _, last := range []bool{false, true} {
		for _, rule := range c.Rules {
			if rule.Last != last || rule.Project == "" && rule.Class == "" || !rule.matches(e) {
				continue
			}
			if answer.Project == "" {
				answer.Project = rule.Project
			}
			if answer.Class == "" {
				answer.Class = rule.Class
			}
		}
		if !last {
			fromSources(e, c.ProjectSources, &answer.Project)
			fromSources(e, c.ClassSources, &answer.Class)
		}
	}
}

func fromSources(e Evidence, list []string, into *string) {
	for _, source := range list {
		if *into != "" {
			return
		}
		if key, ok := strings.CutPrefix(source, labelSource); ok {
			if *into = e.Container.given(key); *into == "" && e.Pod != nil {
				*into = e.Pod.Labels[key]
			}
		} else if read := sources[source]; read != nil {
			*into = read(e)
		}
	}
}
