package main

import (
	"time"

	"gpuledger/exporter/history"
)

// length is a length of time that a flag takes, in days too: 2s, 12h, 3d.
type length time.Duration

// String writes it as Set reads it; empty for none.
func (l *length) String() string {
	if *l == 0 {
		return ""
	}
	return history.FormatLength(time.Duration(*l))
}

// Set reads it.
func (l *length) Set(text string) error {
	parsed, err := history.ParseLength(text)
	*l = length(parsed)
	return err
}

// Type is what --help calls it.
func (l *length) Type() string { return "duration" }
