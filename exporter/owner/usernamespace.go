package owner

import "slices"

// fromUIDMap names the person as whom uid 0 of the process's user namespace
// counts on the host, or to whom that number is lent. Only privileged programs
// (newuidmap) can map anything but the caller's own uid.
func (c Config) fromUIDMap(e Evidence) judgement {
	if e.UserNamespace == nil {
		return pass("it is in the host's user namespace, as far as can be seen")
	}
	uid := e.UserNamespace.RootUID
	switch {
	case !isUID(uid):
		return pass("its user namespace has no uid 0")
	case uid == 0:
		return pass("uid 0 of its user namespace is the host's root")
	}
	why := "uid 0 of its user namespace is uid " + uidText(uid)
	owners, status := c.Accounts.subIDOwners(uint32(uid))
	if status == AccountWaiting {
		return waitFor(why + "; /etc/subuid is being read")
	}
	direct := c.somebody(uid)
	if direct == unsettled {
		return waitFor(why + ", whose name is being looked up")
	}
	if len(owners) > 0 {
		if direct == person {
			return pass(why + ", which is an account and lent by /etc/subuid as well")
		}
		return c.fromSubIDs(owners, why)
	}
	switch {
	case direct != person:
		return pass(why + ", which is no person's and not lent to one")
	case e.EngineOfRoot:
		// Whoever the image runs as can make such a namespace, and the common
		// 1000 is also the host's first person.
		return pass(why + ", which may be the image's choice")
	}
	return c.named(uid, StepUIDMap, ConfidenceHigh, why)
}

// fromSubIDs names the one person among the owners of a range: names or
// numbers, as /etc/subuid has them.
func (c Config) fromSubIDs(owners []string, why string) judgement {
	var people []int64
	for _, name := range owners {
		uid, who := int64(-1), notPerson
		if number, ok := decimal(name); ok {
			uid, who = number, c.somebody(number)
		} else if uid, who = c.person(name); who == person && c.generic(name, uid) {
			who = notPerson
		}
		switch {
		case who == unsettled:
			return waitFor(why + ", which is lent to " + quoted(name) + ", who is being looked up")
		case who == person && !slices.Contains(people, uid):
			people = append(people, uid)
		}
	}
	switch len(people) {
	case 0:
		return pass(why + ", which is lent to " + quoted(owners[0]) + " and to no person")
	case 1:
		return c.named(people[0], StepUIDMap, ConfidenceMedium, why+", which /etc/subuid lends to uid "+uidText(people[0]))
	}
	return pass(why + ", which is lent to several people")
}
