package billing

import (
	"fmt"
	"strings"
)

// membership says that an account pays for a user through some days.
type membership struct {
	account     string
	key         string // place in the configuration
	uid         *int64
	node        string
	from, until string // local days, half open; "" is unbounded
	// projectsOnly is a share of 0 %: the account pays for the user's rows of
	// its own projects only.
	projectsOnly bool
}

// identity is a user's name on one node, or on any if node is empty.
type identity struct{ node, user string }

func (b *Book) addAccounts(configs []AccountConfig, found *problems) {
	b.members = make(map[string][]membership)
	b.projects = make(map[string]string)
	b.costCentre = make(map[string]string)
	for i, config := range configs {
		key := fmt.Sprintf("accounts[%d]", i)
		if err := checkName(config.Name); err != nil {
			found.add(key+".name", err)
			continue
		}
		if config.Name == AccountUnassigned {
			found.addf(key+".name", "%q is the name of what nobody pays for", config.Name)
		}
		if _, ok := b.costCentre[config.Name]; ok {
			found.addf(key+".name", "account %q is there already", config.Name)
		}
		b.costCentre[config.Name] = cleanName(string(config.CostCentre))
		account := Account{
			Name: config.Name, CostCentre: cleanName(string(config.CostCentre)),
			Managers: config.Managers, Projects: config.Projects,
		}
		if config.Budget != "" {
			micros, err := parsePrice(string(config.Budget))
			if err != nil {
				found.add(key+".budget", err)
			}
			account.Budget = &Money{micros: intOf(micros)}
		}
		for j, project := range config.Projects {
			projectKey := fmt.Sprintf("%s.projects[%d]", key, j)
			if err := checkName(project); err != nil {
				found.add(projectKey, err)
			} else if other, ok := b.projects[project]; ok {
				found.addf(projectKey, "project %q belongs to account %q already", project, other)
			} else {
				b.projects[project] = config.Name
			}
		}
		for j, member := range config.Members {
			b.addMember(config.Name, fmt.Sprintf("%s.members[%d]", key, j), member, found)
		}
		b.Accounts = append(b.Accounts, account)
	}
}

func (b *Book) addMember(account, key string, config MemberConfig, found *problems) {
	if err := checkName(config.User); err != nil {
		found.add(key+".user", err)
		return
	}
	m := membership{account: account, key: key, uid: config.UID, node: config.Node, from: config.From, until: config.Until}
	if err := checkDay(m.from); err != nil {
		found.add(key+".from", err)
		return
	}
	if err := checkDay(m.until); err != nil {
		found.add(key+".until", err)
		return
	}
	if m.until != "" && m.until <= m.from {
		found.addf(key+".until", "%q is not after from %q: until is the first day on which the membership no longer holds", m.until, m.from)
		return
	}
	switch share, percent := strings.CutSuffix(config.Share, "%"); {
	case config.Share == "":
	case !percent:
		found.addf(key+".share", `%q is not a percentage such as "100%%"`, config.Share)
		return
	default:
		micros, err := parsePrice(share)
		switch {
		case err != nil || micros > 100_000_000:
			found.addf(key+".share", `%q is not a percentage from "0%%" to "100%%"`, config.Share)
			return
		case micros == 0:
			m.projectsOnly = true
		case micros < 100_000_000:
			found.addf(key+".share", "a share of %s is %w; an account pays for all of a user (100%%) or for its own projects only (0%%)", config.Share, ErrNotSupported)
			return
		}
	}
	for _, other := range b.members[config.User] {
		if !m.overlaps(other) {
			continue
		}
		switch {
		case other.account == account:
			found.addf(key, "user %q is a member of account %q already through some of these days (%s)", config.User, account, other.key)
		case !m.projectsOnly && !other.projectsOnly:
			found.addf(key, "user %q would be paid for in full by both %q (%s) and %q through some days: end one membership with until, or make it share: 0%%", config.User, other.account, other.key, account)
		default:
			continue
		}
		return
	}
	b.members[config.User] = append(b.members[config.User], m)
}

// overlaps reports whether some row could belong to both.
func (m membership) overlaps(other membership) bool {
	switch {
	case m.uid != nil && other.uid != nil && *m.uid != *other.uid,
		m.node != "" && other.node != "" && m.node != other.node,
		m.until != "" && m.until <= other.from,
		other.until != "" && other.until <= m.from:
		return false
	}
	return true
}

func (m membership) covers(uid int64, node, day string) bool {
	return (m.uid == nil || *m.uid == uid) && (m.node == "" || m.node == node) &&
		m.from <= day && (m.until == "" || day < m.until)
}

// payer is the account that pays for a user's usage: the one that lists its
// project if the user is a member then, else the one that the user is a member
// of, else AccountUnassigned.
func (b *Book) payer(user string, uid int64, node, project, day string) string {
	account := AccountUnassigned
	owner, listed := b.projects[project]
	for _, m := range b.members[user] {
		if !m.covers(uid, node, day) {
			continue
		}
		if listed && project != "" && m.account == owner {
			return owner
		}
		if !m.projectsOnly {
			account = m.account
		}
	}
	return account
}

func (b *Book) addIdentities(configs []IdentityConfig, found *problems) {
	b.identities = make(map[identity]string)
	for i, config := range configs {
		key := fmt.Sprintf("identities[%d]", i)
		if err := checkName(config.User); err != nil {
			found.add(key+".user", err)
			continue
		}
		if err := checkName(config.As); err != nil {
			found.add(key+".as", err)
			continue
		}
		from := identity{config.Node, config.User}
		if as, ok := b.identities[from]; ok {
			found.addf(key, "user %q of node %q is known as %q already", config.User, config.Node, as)
			continue
		}
		b.identities[from] = config.As
	}
}

// knownAs is the name under which a node's user is billed. Names are followed
// one step only, and a node's own entry comes before one for any node.
func (b *Book) knownAs(node, user string) string {
	if len(b.identities) == 0 {
		return user
	}
	if as, ok := b.identities[identity{node, user}]; ok {
		return as
	}
	if as, ok := b.identities[identity{"", user}]; ok {
		return as
	}
	return user
}
