package owner

import (
	"slices"

	"gpuledger/exporter/meter"
)

// fromJob is the owner of a batch job.
func (c Config) fromJob(e Evidence) judgement {
	switch {
	case e.Job == nil:
		return pass("it is in no batch job")
	case !isUID(e.Job.UID):
		return pass("who owns job " + e.Job.ID + " is not known")
	case e.Job.UID == 0:
		return pass("job " + e.Job.ID + " is root's")
	}
	return c.named(e.Job.UID, StepScheduler, ConfidenceHigh, "job "+e.Job.ID+" is of uid "+uidText(e.Job.UID))
}

func (c Config) fromSlice(e Evidence) judgement {
	uid := e.SliceUID
	if !isUID(uid) {
		return pass("it runs in nobody's slice")
	}
	why := "it runs in the slice of uid " + uidText(uid)
	if slices.Contains(c.LauncherUIDs, uint32(uid)) {
		return pass(why + ", who runs other people's jobs")
	}
	if uid == 0 {
		switch {
		case c.Human(e.LoginUID):
			uid = e.LoginUID // root's slice, entered by a person
			why = "it runs in root's slice, which uid " + uidText(uid) + " logged in to"
		case e.HostProcess && c.Human(e.ProcessUID):
			return pass("it runs in root's slice, and root runs it as somebody else")
		}
	}
	return c.named(uid, StepUserSlice, ConfidenceHigh, why)
}

func (c Config) fromProcess(e Evidence) judgement {
	if e.HostProcess {
		// A service's own account is an honest answer. Root is not: everything
		// that nobody cared to give an account runs as root.
		switch {
		case !isUID(e.ProcessUID):
			return pass("its uid is not known")
		case e.ProcessUID == 0:
			return pass("it runs as root, which says nothing of who started it")
		}
		return c.named(e.ProcessUID, StepProcessUID, ConfidenceHigh, "it is a process of the host and runs as uid "+uidText(e.ProcessUID))
	}
	// In a container a uid is the image author's choice, and the common 1000 is
	// also the host's first person. Only a number given when the container was
	// started is evidence, and a name would be looked up in the image. In a pod
	// the number is the manifest's, which is the image author's again.
	switch {
	case e.Kind == meter.KindKubernetes:
		return pass("a uid in a pod is the image's or the manifest's choice")
	case e.Container == nil:
		return pass("it is no process of the host alone, and no engine says whether its uid was given")
	case !e.Container.ImageKnown:
		return pass("the image is not known, so its uid may be the image's choice")
	}
	given, imageUser := uidPart(e.Container.User), uidPart(e.Container.ImageUser)
	uid, ok := decimal(given)
	switch {
	case given == imageUser:
		return pass("its uid is the image's choice")
	case !ok || uid != e.ProcessUID:
		return pass("the container was started as " + quoted(given) + ", which is not the number that it runs as")
	case !c.Human(uid):
		return pass("uid " + given + ", which the container was given, is no person's")
	}
	return c.named(uid, StepProcessUID, ConfidenceMedium, "the container was given uid "+given+", and the image has another")
}

// daemonless are the kinds whose containers are started by the caller's own
// processes, which carry the login's uid on; a daemon's have the daemon's.
var daemonless = []string{meter.KindPodman, meter.KindLXC, meter.KindNspawn}

func (c Config) fromLogin(e Evidence) judgement {
	switch {
	case !isUID(e.LoginUID):
		return pass("no login is recorded for it")
	case !c.Human(e.LoginUID):
		return pass("the login is of uid " + uidText(e.LoginUID) + ", which is no person's")
	case slices.Contains(daemonless, e.Kind):
		return c.named(e.LoginUID, StepLoginUID, ConfidenceMedium, "the container was started from a login of uid "+uidText(e.LoginUID))
	case !e.HostProcess || e.Kind != meter.KindHost:
		return pass("a login says nothing of who uses a service or a daemon's container")
	case e.ProcessUID != 0:
		return pass("it does not run as root")
	}
	return c.named(e.LoginUID, StepLoginUID, ConfidenceMedium, "root's process of a login of uid "+uidText(e.LoginUID))
}

// fromEnvironment believes a variable only if it names the account of a
// person. Values are shown to nobody: what names no account may be anything.
func (c Config) fromEnvironment(e Evidence) judgement {
	for _, key := range c.EnvironmentKeys {
		value, ok := e.Environment[key]
		if !ok {
			continue
		}
		uid, who := c.person(value)
		switch who {
		case person:
			found := c.named(uid, StepEnvironment, ConfidenceLow, "its variable "+key+" names an account")
			found.answer.Key = key
			return found
		case unsettled:
			return waitFor("the account that its variable " + key + " names is being looked up")
		}
	}
	switch {
	case e.Environment == nil:
		return pass("its variables were not looked at, or may not be")
	case len(e.Environment) == 0:
		return pass("it has none of the variables that are looked for")
	}
	return pass("none of its variables names a person's account")
}
