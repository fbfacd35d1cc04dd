package cgroup

import (
	"slices"
	"strings"
)

// Place is where a cgroup is in one hierarchy.
type Place struct {
	// Controllers are the hierarchy's, in the words of /proc/PID/cgroup
	// ("cpu,cpuacct", "name=systemd"); empty for the unified hierarchy.
	Controllers string
	// Path is the cgroup's, from the hierarchy's root.
	Path string
}

// Own finds the cgroup that holds all of what a process belongs to and nothing
// else: that of its job, else its container, else its pod, else its unit. It
// is where every line says the same; a hierarchy in which that cgroup was not
// made (its controller is not in use there) is left out. There is none for a
// process that is in nothing of its own, or whose path can't be followed.
func Own(content string) []Place {
	chain := Parse(content)
	if chain.Ambiguous || chain.Relative || chain.Deleted || chain.guess {
		return nil
	}
	belongs := owning(chain)
	if belongs == nil {
		return nil
	}
	var places []Place
	for raw := range strings.SplitSeq(content[:min(len(content), maxText)], "\n") {
		l, _, ok := parseLine(raw)
		if !ok || l.chain.Relative || l.chain.Deleted {
			continue
		}
		for end := 1; end <= len(l.path); end++ {
			if belongs(walkPath(l.path[:end], false)) {
				controllers := strings.SplitN(raw, ":", 3)[1]
				places = append(places, Place{Controllers: controllers, Path: "/" + strings.Join(l.path[:end], "/")})
				break
			}
		}
	}
	return places
}

// owning tells the chains of the cgroups that hold what chain belongs to.
func owning(chain Chain) func(Chain) bool {
	level, found := Level{}, false
	if len(chain.Levels) > 0 && chain.Levels[0].Kind == LevelJob {
		level, found = chain.Levels[0], true
	} else if level, found = chain.Container(); !found {
		level, found = chain.Outermost()
	}
	switch {
	case found && level.ID == "":
		return nil // a monitor of all its runtime's containers
	case found:
		return func(c Chain) bool {
			return slices.ContainsFunc(c.Levels, func(l Level) bool { return l.Kind == level.Kind && l.ID == level.ID })
		}
	case chain.Unit == "" || chain.Unit == initScope || len(chain.Levels) > 0:
		return nil
	}
	return func(c Chain) bool { return c.Unit == chain.Unit }
}
