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
		} else if candidate.Confidence == ConfidenceHigh && !samePerson(candidate, answer) {
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
				if uid, ok := uidNotation(rule.User); ok {
					answer.UID = uid
					return answer, true
				}
				uid, status := c.Accounts.uidOf(rule.User)
				if status == AccountFound {
					answer.UID = int64(uid)
				}
				answer.Waiting = status == AccountWaiting
				return answer, true
			}
		}
	case StepScheduler:
		if e.Job != nil && e.Job.UID > 0 && isUID(e.Job.UID) {
			return c.byUID(e.Job.UID, step, ConfidenceHigh), true
		}
	case StepUserSlice:
		return c.fromSlice(e)
	case StepLabel:
		return c.fromLabel(e)
	case StepProcessUID:
		return c.fromProcess(e)
	case StepLoginUID:
		if e.HostProcess && e.Kind == meter.KindHost && e.ProcessUID == 0 && c.Human(e.LoginUID) {
			return c.byUID(e.LoginUID, step, ConfidenceMedium), true
		}
	}
	return Answer{}, false
}

func (c Config) fromSlice(e Evidence) (Answer, bool) {
	uid := e.SliceUID
	if !isUID(uid) || slices.Contains(c.LauncherUIDs, uint32(uid)) {
		return Answer{}, false
	}
	if uid == 0 {
		switch {
		case c.Human(e.LoginUID):
			uid = e.LoginUID // root's slice, entered by a person
		case e.HostProcess && c.Human(e.ProcessUID):
			return Answer{}, false // root's slice says nothing of whom root ran it for
		}
	}
	return c.byUID(uid, StepUserSlice, ConfidenceHigh), true
}

// fromLabel believes a label only if it names the account of a person, and
// only if whoever started the container gave it: one that comes with the image
// says who built that.
func (c Config) fromLabel(e Evidence) (Answer, bool) {
	for _, key := range c.OwnerLabels {
		name := e.Container.given(key)
		if name == "" {
			continue
		}
		uid, status := c.Accounts.uidOf(name)
		if status == AccountWaiting {
			return Answer{Waiting: true}, false
		}
		if status == AccountFound && c.Human(int64(uid)) {
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
		if e.ProcessUID > 0 && isUID(e.ProcessUID) {
			return c.byUID(e.ProcessUID, StepProcessUID, ConfidenceHigh), true
		}
		return Answer{}, false
	}
	// In a container a uid is the image author's choice, and the common 1000 is
	// also the host's first person. Only a number given when the container was
	// started is evidence, and a name would be looked up in the image. In a pod
	// the number is the manifest's, which is the image author's again.
	if e.Container == nil || e.Kind == meter.KindKubernetes || !e.Container.ImageKnown || e.Container.User == e.Container.ImageUser {
		return Answer{}, false
	}
	given, _, _ := strings.Cut(e.Container.User, ":")
	imageUser, _, _ := strings.Cut(e.Container.ImageUser, ":")
	uid, err := strconv.ParseUint(given, 10, 32)
	if err != nil || given == imageUser || int64(uid) != e.ProcessUID || !c.Human(int64(uid)) {
		return Answer{}, false
	}
	return c.byUID(int64(uid), StepProcessUID, ConfidenceMedium), true
}

// system reports the system's own processes: a name on the list, a program
// that is root's, and a place or uid that only the system has. The name is
// that of the program's file, which takes more than a rename to choose: a
// person can mount any of root's programs under any name in a namespace of
// their own. So a person's uid is never the system's, wherever it runs: cron
// runs people's jobs in a system slice too. And none of this counts in a
// container, where everybody is root. The exception is what the system starts
// under a person's uid without the person's having a say in it.
func (c Config) system(e Evidence) bool {
	if !e.HostProcess || e.ExecutableUID != 0 || !isUID(e.ProcessUID) || !slices.Contains(c.SystemCommands, path.Base(e.Executable)) {
		return false
	}
	dynamic := e.ProcessUID >= firstDynamicUID && e.ProcessUID <= lastDynamicUID
	return e.SystemLaunched || e.ProcessUID < int64(c.minimumHuman()) || e.SystemSlice && (dynamic || !c.Human(e.ProcessUID))
}

// systemd gives these uids to services with DynamicUser= (systemd's
// UIDS-GIDS.md).
const firstDynamicUID, lastDynamicUID = 61184, 65519

func (c Config) minimumHuman() uint32 {
	if c.MinimumHumanUID == 0 {
		return 1000
	}
	return c.MinimumHumanUID
}

// isUID reports what can be a uid at all: -1 is not known, and 4294967295 is
// the kernel's own word for none.
func isUID(uid int64) bool { return uid >= 0 && uid < 1<<32-1 }

// Human reports uids that can be a person's.
func (c Config) Human(uid int64) bool {
	return isUID(uid) && uid >= int64(c.minimumHuman()) && !slices.Contains(c.NobodyUIDs, uint32(uid))
}

// samePerson compares by uid where both have one: a name may still be looked
// up, or be one of several for the uid.
func samePerson(a, b Answer) bool {
	return a.User == b.User || a.UID >= 0 && a.UID == b.UID
}

// uidNotation reads uid:N, as accounts without a name are shown.
func uidNotation(name string) (int64, bool) {
	number, ok := strings.CutPrefix(name, uidPrefix)
	uid, err := strconv.ParseUint(number, 10, 32)
	return int64(uid), ok && err == nil && uid < 1<<32-1 && strconv.FormatUint(uid, 10) == number
}

const uidPrefix = "uid:"

func (c Config) byUID(uid int64, step Step, confidence Confidence) Answer {
	answer := Answer{UID: uid, AttributedBy: step, Confidence: confidence}
	answer.User, answer.Waiting = c.name(uint32(uid))
	return answer
}

// name is the account's name, or uid:N if it has none or none that can be told
// apart from our own words.
func (c Config) name(uid uint32) (name string, waiting bool) {
	name, status := c.Accounts.nameOf(uid)
	if status != AccountFound || name == "" || name == meter.UserUnattributed || strings.HasPrefix(name, uidPrefix) {
		return uidPrefix + strconv.FormatUint(uint64(uid), 10), status == AccountWaiting
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
	for _, source := range sources {
		if key, ok := strings.CutPrefix(source, labelSource); ok && *into == "" {
			*into = e.Container.given(key)
		}
	}
}
