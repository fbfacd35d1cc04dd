package owner

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"gpuledger/exporter/meter"
)

// Resolve names the user. The first step that can, does; whatever is found,
// root is never the answer only because a process happens to run as root.
func Resolve(e Evidence, c Config) Answer {
	if c.system(e) {
		answer := Answer{UID: e.ProcessUID, AttributedBy: StepSystem, Confidence: ConfidenceHigh, System: true}
		answer.User, answer.Waiting = c.name(uint32(e.ProcessUID))
		return answer
	}
	steps := c.Steps
	if steps == nil {
		steps = DefaultSteps
	}
	answer := Answer{User: meter.UserUnattributed, UID: -1, AttributedBy: StepNone}
	found := false
	for _, step := range steps {
		candidate, ok := c.try(step, e)
		// A label that cannot be judged yet may not be passed over for good.
		answer.Waiting = answer.Waiting || !found && candidate.Waiting
		if !ok {
			continue
		}
		if !found {
			found = true
			candidate.Waiting = answer.Waiting
			answer = candidate
		} else if candidate.Confidence == ConfidenceHigh && candidate.User != answer.User {
			answer.Disagrees = true
		}
	}
	c.projectAndClass(e, &answer)
	return answer
}

// try asks one step. A candidate that is not ok may still say Waiting.
func (c Config) try(step Step, e Evidence) (Answer, bool) {
	switch step {
	case StepRule, StepRuleLast:
		for _, rule := range c.Rules {
			if rule.User != "" && rule.Last == (step == StepRuleLast) && rule.matches(e) {
				answer := Answer{User: rule.User, UID: -1, AttributedBy: step, Confidence: ConfidenceHigh, Rule: rule.Name}
				uid, status := c.Accounts.uidOf(rule.User)
				if status == AccountFound {
					answer.UID = int64(uid)
				}
				answer.Waiting = status == AccountWaiting
				return answer, true
			}
		}
	case StepScheduler:
		if e.JobUID > 0 {
			return c.byUID(e.JobUID, step, ConfidenceHigh), true
		}
	case StepUserSlice:
		return c.fromSlice(e)
	case StepLabel:
		return c.fromLabel(e)
	case StepProcessUID:
		return c.fromProcess(e)
	case StepLoginUID:
		if e.HostProcess && e.Kind == meter.KindHost && e.ProcessUID == 0 && c.human(e.LoginUID) {
			return c.byUID(e.LoginUID, step, ConfidenceMedium), true
		}
	}
	return Answer{}, false
}

func (c Config) fromSlice(e Evidence) (Answer, bool) {
	uid := e.SliceUID
	if uid < 0 || slices.Contains(c.LauncherUIDs, uint32(uid)) {
		return Answer{}, false
	}
	if uid == 0 && c.human(e.LoginUID) {
		uid = e.LoginUID // root's slice, entered by a person
	}
	return c.byUID(uid, StepUserSlice, ConfidenceHigh), true
}

// fromLabel believes a label only if it names the account of a person, and
// only if whoever started the container gave it: one that comes with the image
// says who built that.
func (c Config) fromLabel(e Evidence) (Answer, bool) {
	if e.Container == nil {
		return Answer{}, false
	}
	for _, key := range c.OwnerLabels {
		name := e.Container.Labels[key]
		if inherited, ok := e.Container.ImageLabels[key]; name == "" || ok && inherited == name {
			continue
		}
		uid, status := c.Accounts.uidOf(name)
		if status == AccountWaiting {
			return Answer{Waiting: true}, false
		}
		if status == AccountFound && c.human(int64(uid)) {
			answer := c.byUID(int64(uid), StepLabel, ConfidenceMedium)
			answer.LabelKey = key
			return answer, true
		}
	}
	return Answer{}, false
}

func (c Config) fromProcess(e Evidence) (Answer, bool) {
	if e.HostProcess {
		// A service's own account is an honest answer. Root is not: everything
		// that nobody cared to give an account runs as root.
		if e.ProcessUID > 0 {
			return c.byUID(e.ProcessUID, StepProcessUID, ConfidenceHigh), true
		}
		return Answer{}, false
	}
	// In a container a uid is the image author's choice, and the common 1000 is
	// also the host's first person. Only a number given when the container was
	// started is evidence, and a name would be looked up in the image.
	if e.Container == nil || !e.Container.ImageKnown || e.Container.User == e.Container.ImageUser {
		return Answer{}, false
	}
	given, _, _ := strings.Cut(e.Container.User, ":")
	imageUser, _, _ := strings.Cut(e.Container.ImageUser, ":")
	uid, err := strconv.ParseUint(given, 10, 32)
	if err != nil || given == imageUser || int64(uid) != e.ProcessUID || !c.human(int64(uid)) {
		return Answer{}, false
	}
	return c.byUID(int64(uid), StepProcessUID, ConfidenceMedium), true
}

// system reports the system's own processes: a name on the list, a program
// that is root's, and a place or uid that only the system has. The name is
// that of the program's file, which a process cannot choose, and none of this
// counts in a container, where everybody is root.
func (c Config) system(e Evidence) bool {
	if !e.HostProcess || e.SliceUID > 0 && e.ProcessUID != 0 || e.ExecutableUID != 0 || e.ProcessUID < 0 || e.Executable == "" {
		return false
	}
	return slices.Contains(c.SystemCommands, path.Base(e.Executable)) &&
		(e.SystemSlice || uint64(e.ProcessUID) < uint64(c.minimumHuman()))
}

func (c Config) minimumHuman() uint32 {
	if c.MinimumHumanUID == 0 {
		return 1000
	}
	return c.MinimumHumanUID
}

// human reports uids that can be a person's.
func (c Config) human(uid int64) bool {
	return uid >= int64(c.minimumHuman()) && uid < 1<<32-1 && !slices.Contains(c.NobodyUIDs, uint32(uid))
}

func (c Config) byUID(uid int64, step Step, confidence Confidence) Answer {
	answer := Answer{UID: uid, AttributedBy: step, Confidence: confidence}
	answer.User, answer.Waiting = c.name(uint32(uid))
	return answer
}

// name is the account's name, or uid:N if it has none or none that can be told
// apart from our own words.
func (c Config) name(uid uint32) (name string, waiting bool) {
	name, status := c.Accounts.nameOf(uid)
	if status != AccountFound || name == "" || name == meter.UserUnattributed || strings.HasPrefix(name, "uid:") {
		return "uid:" + strconv.FormatUint(uint64(uid), 10), status == AccountWaiting
	}
	return name, false
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

func fromSources(e Evidence, sources []string, into *string) {
	if e.Container == nil {
		return
	}
	for _, source := range sources {
		if key, ok := strings.CutPrefix(source, "label:"); ok && *into == "" {
			*into = e.Container.Labels[key]
		}
	}
}
