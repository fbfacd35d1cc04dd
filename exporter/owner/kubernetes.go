package owner

import (
	"strings"

	"gpuledger/exporter/meter"
)

// anyName stands for the part of a namespace's name that names its user.
const anyName = "*"

// fromPod names a pod's user by its namespace, where the site says whose that
// is, else by its annotations and labels. Its uids say nothing.
func (c Config) fromPod(e Evidence) judgement {
	switch {
	case e.Kind != meter.KindKubernetes:
		return pass("it is in no pod")
	case e.Pod == nil:
		return pass("nothing is known of its pod")
	}
	if found := c.fromNamespace(e.Pod.Namespace); found.named || found.waiting {
		return found
	}
	why := "neither its namespace nor its annotations and labels name a user"
	for _, list := range []struct {
		what   string
		keys   []string
		values map[string]string
	}{
		{"annotation", c.PodOwnerAnnotations, e.Pod.Annotations}, {"label", c.PodOwnerLabels, e.Pod.Labels},
	} {
		for _, key := range list.keys {
			name := list.values[key]
			if name == "" {
				continue
			}
			found := c.podUser(name, ConfidenceMedium, list.what+" "+quoted(key)+" of the pod")
			if found.named || found.waiting {
				found.answer.Key = key
				return found
			}
			why = found.why
		}
	}
	return pass(why)
}

func (c Config) fromNamespace(namespace string) judgement {
	for _, each := range c.NamespaceUsers {
		if namespace == "" || !wildcard(each.Namespace, namespace) {
			continue
		}
		if each.User != anyName {
			return c.siteSays(each.User, StepKubernetes, "the site says whose namespaces "+quoted(each.Namespace)+" are")
		}
		before, after, _ := strings.Cut(each.Namespace, "*")
		name := strings.TrimSuffix(strings.TrimPrefix(namespace, before), after)
		if found := c.podUser(name, ConfidenceHigh, "namespace "+quoted(namespace)); found.named || found.waiting {
			return found
		}
	}
	return judgement{}
}

// podUser is whom a name in a pod's description names.
func (c Config) podUser(name string, confidence Confidence, what string) judgement {
	uid, who := c.person(name)
	switch {
	case who == person:
		return c.named(uid, StepKubernetes, confidence, what+" names the account")
	case who == unsettled:
		return waitFor("the account " + quoted(name) + " of " + what + " is being looked up")
	case who == notPerson:
		return pass(what + " names " + quoted(name) + ", which is no person's account")
	case !c.PodUsersWithoutAccount || !usable(name) || strings.HasPrefix(name, uidPrefix) || name == "":
		return pass(what + " names " + quoted(name) + ", which is no account here")
	}
	answer := Answer{User: name, UID: -1, AttributedBy: StepKubernetes, Confidence: confidence}
	return judgement{answer: answer, named: true, why: what + " names " + quoted(name) + ", who needs no account here"}
}
