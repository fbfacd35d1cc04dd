package accounting

import (
	"context"
	"errors"
	"time"
)

// RetireNode ends the time in service of all cards of a node, at the end of the
// bucket that at falls in, and returns when that is.
func RetireNode(ctx context.Context, config *Config, node string, at, now time.Time) (when time.Time, err error) {
	store, err := openLedger(ctx, config)
	if err != nil {
		return when, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return store.RetireNode(ctx, node, at, now)
}

// RetireDevice ends the time in service of one card, by its UUID, at the end of
// the bucket that at falls in, and returns when that is.
func RetireDevice(ctx context.Context, config *Config, card string, at, now time.Time) (when time.Time, err error) {
	store, err := openLedger(ctx, config)
	if err != nil {
		return when, err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	return store.RetireDevice(ctx, card, at, now)
}
