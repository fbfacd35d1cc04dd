package who

import (
	"slices"
	"strconv"
	"strings"
)

// Select keeps what the selectors name, and returns also those that name
// nothing. A selector that is a card's index or UUID, or an instance's UUID,
// chooses cards; any other chooses holders and suspects, by Named. Of several
// of one sort each adds; cards and people together mean these people on these
// cards. "gpu:" in front makes a selector a card's whatever else has its name.
func Select(a Answer, selectors []string) (Answer, []string) {
	var cards, people, nothing []string
	for _, each := range selectors {
		name, isCard := strings.CutPrefix(each, "gpu:")
		switch _, unknown := (Filter{Cards: []string{name}}).Apply(a); {
		case len(unknown) == 0:
			cards = append(cards, name)
		case isCard:
			nothing = append(nothing, each)
		default:
			people = append(people, each)
		}
	}
	noSuchCard := len(nothing) > 0
	if len(cards) > 0 {
		a, _ = Filter{Cards: cards}.Apply(a)
	}
	if len(people) > 0 {
		var unnamed []string
		a, unnamed = selectPeople(a, people)
		nothing = append(nothing, unnamed...)
	}
	if noSuchCard && len(cards) == 0 {
		a.Cards = []Card{}
	}
	return a, nothing
}

func selectPeople(a Answer, people []string) (Answer, []string) {
	found := map[string]bool{}
	named := func(is func(string) bool) bool {
		any := false
		for _, name := range people {
			if is(name) {
				any, found[name] = true, true
			}
		}
		return any
	}
	cards := []Card{}
	for _, c := range a.Cards {
		devices := []Device{}
		for _, d := range c.Devices {
			d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h Holder) bool { return !named(h.Named) })
			if len(d.Holders) > 0 {
				devices = append(devices, d)
			}
		}
		c.Devices = devices
		c.Suspects = slices.DeleteFunc(slices.Clone(c.Suspects), func(s Suspect) bool { return !named(s.Named) })
		if len(c.Devices) > 0 || len(c.Suspects) > 0 {
			cards = append(cards, c)
		}
	}
	a.Cards = cards
	return a, slices.DeleteFunc(slices.Clone(people), func(name string) bool { return found[name] })
}

// minPrefix is from how many characters on the beginning of an id stands for
// it: fewer could be a slip.
const minPrefix = 8

// identity is what a holder and a suspect can be named by.
type identity struct {
	user, kind, workload                                  string
	containerID, containerName, namespace, pod, job, unit string
	uid                                                   *int64
	pid                                                   *uint32
}

// Named reports whether the selector means h: its user or uid, its workload
// ("train", "docker:train"), container (name, or 8 and more characters of its
// id), pod ("pod", "namespace/pod"), Slurm job, unit (with or without
// ".service"), or PID. "user:" and "pid:" in front allow only that.
func (h Holder) Named(selector string) bool {
	return identity{
		h.User, h.Kind, h.Workload, h.ContainerID, h.ContainerName, h.PodNamespace, h.PodName, h.SlurmJob, h.Unit, h.UID, h.PID,
	}.named(selector)
}

// Named reports whether the selector means s, as Holder.Named does.
func (s Suspect) Named(selector string) bool {
	return identity{
		s.User, s.Kind, s.Workload, s.ContainerID, s.ContainerName, s.PodNamespace, s.PodName, s.SlurmJob, s.Unit, s.UID, &s.PID,
	}.named(selector)
}

func (i identity) named(selector string) bool {
	if selector == "" {
		return false
	}
	if name, ok := strings.CutPrefix(selector, "user:"); ok {
		return name == i.user || isNumber(i.uid, name)
	}
	if name, ok := strings.CutPrefix(selector, "pid:"); ok {
		return isNumber(i.pid, name)
	}
	for _, name := range []string{i.user, i.workload, i.containerName, i.pod, i.job, i.unit, strings.TrimSuffix(i.unit, ".service")} {
		if selector == name {
			return true
		}
	}
	switch {
	case i.workload != "" && selector == i.kind+":"+i.workload,
		i.containerName != "" && selector == i.kind+":"+i.containerName,
		i.pod != "" && selector == i.namespace+"/"+i.pod,
		isNumber(i.uid, selector), isNumber(i.pid, selector):
		return true
	}
	return len(selector) >= minPrefix && i.containerID != "" && strings.HasPrefix(i.containerID, strings.ToLower(selector))
}

func isNumber[N int64 | uint32](n *N, text string) bool {
	return n != nil && strconv.FormatInt(int64(*n), 10) == text
}
