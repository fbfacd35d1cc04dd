package history

import (
	"slices"
	"strconv"
	"strings"
)

// Filter narrows an answer. The zero value keeps everything.
type Filter struct {
	// Cards are indexes, or UUIDs of cards or MIG instances, or beginnings of
	// UUIDs of at least 8 characters.
	Cards []string
	// Users are user names, or uids. With users, only what they held is kept.
	Users []string
}

// Apply returns the part of a that the filter asks for, and the cards asked for
// that a does not have. The answer given is not changed.
func (f Filter) Apply(a Answer) (Answer, []string) {
	matched := make([]bool, len(f.Cards))
	cards := []Card{}
	for _, c := range a.Cards {
		if len(f.Cards) > 0 {
			whole, devices := false, map[string]bool{}
			for i, want := range f.Cards {
				if want == strconv.Itoa(c.Index) || matchesUUID(c.UUID, want) {
					matched[i], whole = true, true
				}
				for _, s := range c.Stretches {
					if matchesUUID(s.Device, want) {
						matched[i], devices[s.Device] = true, true
					}
				}
			}
			if !whole && len(devices) == 0 {
				continue
			}
			if !whole {
				c.Stretches = kept(c.Stretches, func(s Stretch) bool { return devices[s.Device] })
			}
		}
		if len(f.Users) > 0 {
			c.Stretches = kept(c.Stretches, f.wantsUser)
			if len(c.Stretches) == 0 {
				continue
			}
		}
		cards = append(cards, c)
	}
	a.Cards = cards
	var unknown []string
	for i, ok := range matched {
		if !ok {
			unknown = append(unknown, f.Cards[i])
		}
	}
	return a, unknown
}

func (f Filter) wantsUser(s Stretch) bool {
	return s.User != "" && slices.Contains(f.Users, s.User) ||
		s.UID != nil && slices.Contains(f.Users, strconv.FormatInt(*s.UID, 10))
}

func kept(list []Stretch, keep func(Stretch) bool) []Stretch {
	return slices.DeleteFunc(slices.Clone(list), func(s Stretch) bool { return !keep(s) })
}

// matchesUUID takes a whole UUID or a beginning long enough not to be a slip.
func matchesUUID(uuid, want string) bool {
	return uuid == want || len(want) >= 8 && strings.HasPrefix(strings.ToLower(uuid), strings.ToLower(want))
}
