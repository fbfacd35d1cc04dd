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
	return c.judge(e, func(Verdict) {})
}

// Explain is what each step says: those in use in their order, then those that
// are switched off. The verdict that decides is Resolve's answer; where the
// system's own processes are concerned there is that verdict alone.
func Explain(e Evidence, c Config) []Verdict {
	var verdicts []Verdict
	answer := c.judge(e, func(v Verdict) { verdicts = append(verdicts, v) })
	for i := range verdicts {
		if verdicts[i].Decides {
			verdicts[i].Answer = answer // with what the later steps say of it
		}
	}
	if answer.System {
		return verdicts
	}
	for _, step := range DefaultSteps {
		if !c.Uses(step) {
			one := c.try(step, e)
			verdicts = append(verdicts, Verdict{Step: step, Off: true, Named: one.named, Answer: one.answer, Waiting: one.waiting, Why: one.why})
		}
	}
	return verdicts
}

// judgement is what one step says of one process.
type judgement struct {
	answer  Answer
	named   bool
	waiting bool // it cannot tell yet; a later step's answer may only be for now
	why     string
}

func pass(why string) judgement    { return judgement{why: why} }
func waitFor(why string) judgement { return judgement{waiting: true, why: why} }

// judge asks every step, so that those after the first that names somebody can
// disagree, and tells each one's verdict.
func (c Config) judge(e Evidence, tell func(Verdict)) Answer {
	if c.system(e) {
		answer := c.byUID(e.ProcessUID, StepSystem, ConfidenceHigh)
		answer.System = true
		tell(Verdict{Step: StepSystem, Named: true, Decides: true, Answer: answer,
			Why: path.Base(e.Executable) + " is a program of the system, root's, and runs for the system"})
		return answer
	}
	answer := Answer{User: meter.UserUnattributed, UID: -1, AttributedBy: StepNone}
	found := false
	for _, step := range c.steps() {
		one := c.try(step, e)
		tell(Verdict{Step: step, Named: one.named, Decides: one.named && !found, Answer: one.answer, Waiting: one.waiting, Why: one.why})
		switch {
		case !found && one.named:
			found = true
			// What could not be judged yet may not be passed over for good.
			one.answer.Waiting = one.answer.Waiting || answer.Waiting
			answer = one.answer
			answer.Review = !c.trusts(step)
		case !found:
			answer.Waiting = answer.Waiting || one.waiting
		case one.named && one.answer.Confidence == ConfidenceHigh && !samePerson(one.answer, answer):
			answer.Disagrees = true
		}
	}
	c.projectAndClass(e, &answer)
	return answer
}

// try asks one step.
func (c Config) try(step Step, e Evidence) judgement {
	switch step {
	case StepRule, StepRuleLast:
		return c.fromRule(step, e)
	case StepScheduler:
		return c.fromJob(e)
	case StepKubernetes:
		return c.fromPod(e)
	case StepUserSlice:
		return c.fromSlice(e)
	case StepLabel:
		return c.fromLabel(e)
	case StepUIDMap:
		return c.fromUIDMap(e)
	case StepProcessUID:
		return c.fromProcess(e)
	case StepLoginUID:
		return c.fromLogin(e)
	case StepHomePath:
		return c.fromHome(e)
	case StepNamePrefix:
		return c.fromName(e)
	case StepEnvironment:
		return c.fromEnvironment(e)
	}
	return pass("there is no such step")
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

func uidText(uid int64) string { return strconv.FormatInt(uid, 10) }

func quoted(s string) string { return strconv.Quote(s) }

func (c Config) byUID(uid int64, step Step, confidence Confidence) Answer {
	answer := Answer{UID: uid, AttributedBy: step, Confidence: confidence}
	answer.User, answer.Waiting = c.name(uint32(uid))
	return answer
}

func (c Config) named(uid int64, step Step, confidence Confidence, why string) judgement {
	return judgement{answer: c.byUID(uid, step, confidence), named: true, why: why}
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

// standing is what can be said of a name that somebody wrote down.
type standing uint8

const (
	stranger  standing = iota // no account of the host
	notPerson                 // an account, and no person's
	person                    // the account of a person
	unsettled                 // not known yet
)

// person looks up whom a name names. Only accounts of people count: anybody
// can write down root.
func (c Config) person(name string) (int64, standing) {
	if name == "" {
		return -1, stranger
	}
	uid, status := c.Accounts.uidOf(name)
	switch {
	case status == AccountWaiting:
		return -1, unsettled
	case status != AccountFound:
		return -1, stranger
	case !c.Human(int64(uid)):
		return int64(uid), notPerson
	}
	return int64(uid), person
}

// generic reports accounts that stand for everybody's containers.
func (c Config) generic(name string, uid int64) bool {
	return slices.ContainsFunc(c.GenericOwners, func(g string) bool {
		number, ok := uidNotation(g)
		return ok && number == uid || name != "" && g == name
	})
}

// somebody reports the uid of a person who has an account and is not generic.
func (c Config) somebody(uid int64) standing {
	if !c.Human(uid) {
		return notPerson
	}
	name, status := c.Accounts.nameOf(uint32(uid))
	switch {
	case status == AccountWaiting:
		return unsettled
	case c.generic(name, uid):
		return notPerson
	case status != AccountFound:
		return stranger
	}
	return person
}
