package owner

import (
	"slices"
	"strings"
)

// Rule is one site rule. Every condition that is given has to hold; those that
// are lists hold if one entry does. A rule without a user may still set project
// and class.
type Rule struct {
	Name string `yaml:"name"`
	// Last tries the rule after all other evidence and not before it.
	Last bool `yaml:"last"`

	Kinds      []string          `yaml:"kind"`
	Workloads  []string          `yaml:"workload"`  // patterns: * is anything
	Containers []string          `yaml:"container"` // patterns of the container's name
	Images     []string          `yaml:"image"`     // patterns
	Namespaces []string          `yaml:"namespace"` // patterns of the pod's namespace
	Pods       []string          `yaml:"pod"`       // patterns of the pod's name
	Units      []string          `yaml:"unit"`      // patterns
	Paths      []string          `yaml:"path"`      // patterns of the program's file
	Labels     map[string]string `yaml:"label"`     // key: pattern
	UIDs       []uint32          `yaml:"uid"`       // real uid of the process

	User    string `yaml:"user"`
	Project string `yaml:"project"`
	Class   string `yaml:"class"`
}

// matches reports whether every condition that the rule gives holds.
func (r Rule) matches(e Evidence) bool {
	var container Container
	if e.Container != nil {
		container = *e.Container
	}
	var pod Pod
	if e.Pod != nil {
		pod = *e.Pod
	}
	if len(r.Kinds) > 0 && !slices.Contains(r.Kinds, e.Kind) ||
		!anyPattern(r.Workloads, e.Name) || !anyPattern(r.Containers, container.Name) ||
		!anyPattern(r.Images, container.Image) || !anyPattern(r.Units, e.Unit) || !anyPattern(r.Paths, e.Executable) ||
		!anyPattern(r.Namespaces, pod.Namespace) || !anyPattern(r.Pods, pod.Name) {
		return false
	}
	for key, pattern := range r.Labels {
		value, ok := container.Labels[key]
		if !ok {
			value, ok = pod.Labels[key]
		}
		if !ok || !wildcard(pattern, value) {
			return false
		}
	}
	return len(r.UIDs) == 0 || isUID(e.ProcessUID) && slices.Contains(r.UIDs, uint32(e.ProcessUID))
}

// fromRule is the first rule that names a user and matches.
func (c Config) fromRule(step Step, e Evidence) judgement {
	for _, rule := range c.Rules {
		if rule.User == "" || rule.Last != (step == StepRuleLast) || !rule.matches(e) {
			continue
		}
		found := c.siteSays(rule.User, step, "rule "+quoted(rule.Name)+" matches")
		found.answer.Rule = rule.Name
		return found
	}
	return pass("no rule that names a user matches")
}

// siteSays is a user whom the site's own configuration names. It may be any
// name, of an account or not.
func (c Config) siteSays(user string, step Step, why string) judgement {
	answer := Answer{User: user, UID: -1, AttributedBy: step, Confidence: ConfidenceHigh}
	if uid, ok := uidNotation(user); ok {
		answer.UID = uid
		return judgement{answer: answer, named: true, why: why}
	}
	uid, status := c.Accounts.uidOf(user)
	if status == AccountFound {
		answer.UID = int64(uid)
	}
	answer.Waiting = status == AccountWaiting
	return judgement{answer: answer, named: true, why: why}
}

func anyPattern(patterns []string, s string) bool {
	return len(patterns) == 0 || s != "" && slices.ContainsFunc(patterns, func(p string) bool { return wildcard(p, s) })
}

// wildcard matches * with any run of bytes, slashes too.
func wildcard(pattern, s string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, first)
	if !ok {
		return false
	}
	for {
		piece, after, star := strings.Cut(rest, "*")
		if !star {
			return strings.HasSuffix(s, piece)
		}
		i := strings.Index(s, piece)
		if i < 0 {
			return false
		}
		s, rest = s[i+len(piece):], after
	}
}
