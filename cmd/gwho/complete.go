package main

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"gpuledger/exporter/who"
)

// completePatience is how long somebody who pressed the tab key waits. Only the
// exporter is asked: reading NVML takes longer.
const completePatience = 300 * time.Millisecond

// offered are the cards and holders that a word on the command line can mean;
// none if they can't be had in time.
func offered(ctx context.Context, o options) []who.Card {
	ctx, cancel := context.WithTimeout(ctx, completePatience)
	defer cancel()
	var a who.Answer
	var err error
	if o.url != "" {
		a, err = askURL(ctx, o)
	} else {
		a, err = askSocket(ctx, o.socket)
	}
	if err != nil {
		return nil // a shell has no place for it
	}
	return a.Cards
}

func completeCards(ctx context.Context, o options) []cobra.Completion {
	var words []cobra.Completion
	for _, c := range offered(ctx, o) {
		words = append(words, cobra.CompletionWithDesc(cardName(c), clean(c.Name)))
	}
	return words
}

// cardName is what a card is named by: its UUID while it has not said its index.
func cardName(c who.Card) string {
	if c.Index < 0 {
		return c.UUID
	}
	return strconv.Itoa(c.Index)
}

// harmless reports whether a name from outside is one word to every shell and
// to the scripts that complete for it: names can be chosen to be commands.
func harmless(word string) bool {
	return !strings.HasPrefix(word, "-") && !strings.ContainsFunc(word, func(r rune) bool {
		return r == unicode.ReplacementChar || !unicode.IsLetter(r) && !unicode.IsDigit(r) && !strings.ContainsRune("-_.:/@+", r)
	})
}

// complete are the users, cards and workloads that are not on the command line
// yet.
func complete(ctx context.Context, o options, given []string) []cobra.Completion {
	var words []cobra.Completion
	seen := map[string]bool{"": true}
	add := func(word, description string) {
		if harmless(word) && !seen[word] && !slices.Contains(given, word) {
			seen[word] = true
			words = append(words, cobra.CompletionWithDesc(word, description))
		}
	}
	for _, c := range offered(ctx, o) {
		add(cardName(c), clean(c.Name))
		for _, d := range c.Devices {
			if d.UUID != c.UUID {
				add(d.UUID, "MIG "+clean(d.Profile)+" of GPU "+cardName(c))
			}
			if o.free {
				continue // nobody holds what is free
			}
			for _, h := range d.Holders {
				add(h.User, "user")
				if h.Workload != "" {
					add(h.Workload, clean(h.Kind)+" of "+clean(h.User))
				}
			}
		}
	}
	return words
}
