package who

import (
	"slices"
	"strconv"
	"strings"
)

// Filter narrows an answer. The zero value keeps everything.
type Filter struct {
	// Cards are indexes, PCI bus ids, UUIDs of cards or MIG instances, or
	// beginnings of UUIDs of at least 8 characters.
	Cards []string
	// Users are user names, or uids.
	Users []string
}

// Apply returns the part of a that the filter asks for, and the cards asked
// for that a does not have. With users, cards and devices without any of them
// are left out.
func (f Filter) Apply(a Answer) (Answer, []string) {
	var unknown []string
	matched := make([]bool, len(f.Cards))
	concerned := map[int]bool{}
	cards := []Card{}
	for _, c := range a.Cards {
		if len(f.Cards) > 0 {
			var whole bool
			wanted := map[string]bool{}
			for i, want := range f.Cards {
				if want == strconv.Itoa(c.Index) || matchesUUID(c.UUID, want) || c.PCIBusID != "" && strings.EqualFold(c.PCIBusID, want) {
					matched[i], whole = true, true
				}
				for _, d := range c.Devices {
					if matchesUUID(d.UUID, want) {
						matched[i], wanted[d.UUID] = true, true
					}
				}
			}
			if !whole {
				c.Devices = slices.DeleteFunc(slices.Clone(c.Devices), func(d Device) bool { return !wanted[d.UUID] })
				if len(c.Devices) == 0 {
					continue
				}
			}
		}
		concerned[c.Index] = true
		if len(f.Users) > 0 {
			devices := []Device{}
			for _, d := range c.Devices {
				d.Holders = slices.DeleteFunc(slices.Clone(d.Holders), func(h Holder) bool { return !f.wants(h.User, h.UID) })
				if len(d.Holders) > 0 {
					devices = append(devices, d)
				}
			}
			c.Devices = devices
			c.Suspects = slices.DeleteFunc(slices.Clone(c.Suspects), func(s Suspect) bool { return !f.wants(s.User, s.UID) })
			if len(c.Devices) == 0 && len(c.Suspects) == 0 {
				continue
			}
		}
		cards = append(cards, c)
	}
	for i, ok := range matched {
		if !ok {
			unknown = append(unknown, f.Cards[i])
		}
	}
	if len(f.Cards) > 0 { // what other cards lack is no concern of this answer
		a.Missing = slices.DeleteFunc(slices.Clone(a.Missing), func(m Missing) bool {
			return m.Card != nil && !concerned[*m.Card]
		})
	}
	a.Cards = cards
	return a, unknown
}

func (f Filter) wants(user string, uid *int64) bool {
	return slices.Contains(f.Users, user) || uid != nil && slices.Contains(f.Users, strconv.FormatInt(*uid, 10))
}

// matchesUUID takes a whole UUID or a beginning long enough not to be a slip.
func matchesUUID(uuid, want string) bool {
	return uuid == want || len(want) >= minPrefix && strings.HasPrefix(strings.ToLower(uuid), strings.ToLower(want))
}
