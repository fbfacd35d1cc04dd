package owner

import (
	"path"
	"slices"
	"strconv"
	"strings"

	"gpuledger/exporter/meter"
)

func uidPart(user string) string {
	uid, _, _ := strings.Cut(user, ":")
	return uid
}

func decimal(s string) (int64, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return int64(n), err == nil
}

// fromLabel believes a label only if it names the account of a person, and
// only if whoever started the container gave it: one that comes with the image
// says who built that.
func (c Config) fromLabel(e Evidence) judgement {
	if e.Container == nil {
		return pass("it is in no container that an engine knows")
	}
	why := "the container has no label that names a user"
	for _, key := range c.OwnerLabels {
		name := e.Container.given(key)
		if name == "" {
			if e.Container.Labels[key] != "" {
				why = "label " + quoted(key) + " comes with the image, or the image is not known"
			}
			continue
		}
		uid, who := c.person(name)
		switch who {
		case unsettled:
			return waitFor("the account " + quoted(name) + " of label " + quoted(key) + " is being looked up")
		case person:
			found := c.named(uid, StepLabel, ConfidenceMedium, "label "+quoted(key)+" names the account")
			found.answer.Key = key
			return found
		case notPerson:
			why = "label " + quoted(key) + " names " + quoted(name) + ", which is no person's account"
		default:
			why = "label " + quoted(key) + " names " + quoted(name) + ", which is no account here"
		}
	}
	return pass(why)
}

// maxPathParts bounds how deep below / a home is looked for.
const maxPathParts = 8

// homeOf is the person below whose home a path lies: the account that one of
// its directories is called after and that has its home there.
func (c Config) homeOf(file string) (int64, standing) {
	waiting := stranger
	if !path.IsAbs(file) {
		return -1, stranger
	}
	parts := strings.Split(strings.TrimPrefix(path.Clean(file), "/"), "/")
	for i, part := range parts[:min(len(parts), maxPathParts)] {
		uid, home, status := c.Accounts.homeOf(part)
		if status == AccountWaiting {
			waiting = unsettled
		}
		if status == AccountFound && path.Clean(home) == "/"+strings.Join(parts[:i+1], "/") && c.Human(int64(uid)) && !c.generic(part, int64(uid)) {
			return int64(uid), person
		}
	}
	return -1, waiting
}

// fromHome names the one person whose home a container's project or files lie
// in, or who owns the files. Where these are several, nobody is named.
func (c Config) fromHome(e Evidence) judgement {
	switch {
	case e.Container == nil:
		return pass("it is in no container that an engine knows")
	case e.Kind == meter.KindKubernetes:
		return pass("a pod's files are the manifest's choice")
	}
	var people []int64
	waiting, why := false, ""
	see := func(uid int64, what string) {
		if !slices.Contains(people, uid) {
			people = append(people, uid)
		}
		if why == "" {
			why = what
		}
	}
	for _, key := range c.HomePathLabels {
		directory := e.Container.given(key)
		switch uid, who := c.homeOf(directory); who {
		case person:
			see(uid, "label "+quoted(key)+" is a directory of uid "+uidText(uid))
		case unsettled:
			waiting = true
		}
	}
	for _, bind := range e.Container.Binds {
		uid, who := c.homeOf(bind.Path)
		what := " lies in the home of uid "
		// A directory may belong to the uid that the image runs as because the
		// container gave it that.
		if who == stranger && bind.OwnerUID != e.ProcessUID && bind.OwnerUID != e.EffectiveUID {
			uid, who = bind.OwnerUID, c.somebody(bind.OwnerUID)
			what = " belongs to uid "
		}
		switch who {
		case person:
			see(uid, quoted(bind.Path)+", which the container was given,"+what+uidText(uid))
		case unsettled:
			waiting = true
		}
	}
	switch {
	case len(people) > 1:
		return pass("the container's files are of several people")
	case waiting:
		return waitFor("whose the container's files are is being looked up")
	case len(people) == 0:
		return pass("the container's files are nobody's in particular")
	}
	return c.named(people[0], StepHomePath, ConfidenceMedium, why)
}

// maxPrefixes bounds how many beginnings of a name are looked up.
const maxPrefixes = 4

// machineKinds are workloads whose own name somebody chose, as one chooses a
// container's.
var machineKinds = []string{meter.KindLXC, meter.KindNspawn, meter.KindVM}

// fromName reads USER-… and USER_…. A container called after its image says
// nothing, even if there is an account of that name.
func (c Config) fromName(e Evidence) judgement {
	name, image := "", ""
	switch {
	case slices.Contains(machineKinds, e.Kind):
		name = e.Name
	case e.Kind == meter.KindKubernetes:
		return pass("a pod's name is the manifest's choice")
	case e.Container != nil:
		name, image = e.Container.Name, imageName(e.Container.Image)
	}
	if name == "" {
		return pass("it is in no container whose name is known")
	}
	var uid int64 = -1
	several, waiting, prefixes := false, false, 0
	for i := 1; i < len(name) && prefixes < maxPrefixes; i++ {
		if name[i] != '-' && name[i] != '_' {
			continue
		}
		prefixes++
		prefix := name[:i]
		if prefix == image || strings.HasPrefix(image, prefix+"-") || strings.HasPrefix(image, prefix+"_") {
			continue
		}
		switch candidate, who := c.person(prefix); {
		case who == unsettled:
			waiting = true
		case who == person && !c.generic(prefix, candidate):
			several = several || uid >= 0 && uid != candidate
			uid = candidate
		}
	}
	switch {
	case several:
		return pass("the name " + quoted(name) + " begins with several accounts")
	case waiting:
		return waitFor("the account that the name " + quoted(name) + " begins with is being looked up")
	case uid < 0:
		return pass("the name " + quoted(name) + " does not begin with a person's account")
	}
	return c.named(uid, StepNamePrefix, ConfidenceLow, "the name "+quoted(name)+" begins with the account")
}

// imageName is an image's name without registry, path, tag and digest.
func imageName(image string) string {
	image, _, _ = strings.Cut(image, "@")
	image = image[strings.LastIndexByte(image, '/')+1:]
	image, _, _ = strings.Cut(image, ":")
	return image
}
