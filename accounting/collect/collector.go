package collect

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/common/config"

	"gpuledger/accounting/ledger"
)

// Ledger is where rows go.
type Ledger interface {
	Target(ctx context.Context, url string) (ledger.Target, error)
	InsertPage(ctx context.Context, page ledger.Page, now time.Time) (ledger.Result, error)
	RecordFailure(ctx context.Context, url, reason string, at time.Time) error
}

// Observer is told what happens. Its methods may be called from several
// goroutines.
type Observer interface {
	// Pulled is called after each pull of a target, with its duration.
	Pulled(target string, result ledger.Result, took time.Duration, err error)
	// Watching is called whenever the list of targets may have changed.
	Watching(targets []string)
	// DiscoveryFailed is called when a file_sd file can't be read.
	DiscoveryFailed(err error)
}

// Options configure a Collector.
type Options struct {
	Interval time.Duration
	Targets  []string // as ParseTarget returns them
	FileSD   []string // patterns of files, read anew at every interval
	HTTP     config.HTTPClientConfig
	Ledger   Ledger
	Observer Observer
	Log      *slog.Logger
	Now      func() time.Time
}

// maxAtOnce bounds how many pages are on their way at the same time.
const maxAtOnce = 16

// Collector pulls from every target at an interval. Each target has its own
// loop, so that one in trouble keeps no other waiting.
type Collector struct {
	options Options
	slots   chan struct{}

	mu      sync.Mutex
	targets map[string]*client // nil until it could be made
}

// New returns a collector.
func New(options Options) *Collector {
	c := &Collector{options: options, slots: make(chan struct{}, maxAtOnce), targets: map[string]*client{}}
	for _, target := range options.Targets {
		c.targets[target] = nil
	}
	return c
}

// Run pulls until the context is done.
func (c *Collector) Run(ctx context.Context) {
	var loops sync.WaitGroup
	defer loops.Wait()
	running := map[string]context.CancelFunc{}
	defer func() {
		for target, cancel := range running {
			cancel()
			c.unwatch(target)
		}
	}()
	var found []string
	ticker := time.NewTicker(c.options.Interval)
	defer ticker.Stop()
	for {
		list, err := discover(c.options.FileSD)
		if err != nil {
			// A file half written must not end the pulls of its targets.
			c.options.Log.Error("Target files can't be read, their targets of before are kept", "err", err)
			c.options.Observer.DiscoveryFailed(err)
			list = append(list, found...)
		}
		found = list
		wanted := map[string]bool{}
		for _, target := range append(append([]string{}, c.options.Targets...), found...) {
			wanted[target] = true
			if running[target] == nil {
				c.watch(target)
				var loopCtx context.Context
				loopCtx, running[target] = context.WithCancel(ctx)
				loops.Go(func() { c.loop(loopCtx, target) })
			}
		}
		names := make([]string, 0, len(wanted))
		for target, cancel := range running {
			if wanted[target] {
				names = append(names, target)
				continue
			}
			cancel()
			delete(running, target)
			c.unwatch(target)
		}
		c.options.Observer.Watching(names)
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// loop pulls from one target, at a moment of the interval that is its own.
func (c *Collector) loop(ctx context.Context, target string) {
	sum := fnv.New64a()
	sum.Write([]byte(target))
	wait := time.Duration(sum.Sum64() % uint64(max(1, min(c.options.Interval, 10*time.Second))))
	timer := time.NewTimer(wait)
	defer timer.Stop()
	failing := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		began := time.Now()
		var result ledger.Result
		client, err := c.client(target)
		if err == nil {
			result, err = c.pull(ctx, client)
		}
		if ctx.Err() != nil {
			return
		}
		c.options.Observer.Pulled(target, result, time.Since(began), err)
		switch {
		case err != nil:
			if !failing {
				c.options.Log.Warn("Pull failed; it is tried again at every interval", "target", target, "err", err)
			}
			c.fail(ctx, target, err)
		case failing:
			c.options.Log.Info("Pull works again", "target", target)
		}
		failing = err != nil
		if result.Quarantined > 0 {
			c.options.Log.Error("Rows were quarantined: see gpu-accounting verify", "target", target, "rows", result.Quarantined)
		}
		timer.Reset(c.options.Interval)
	}
}

func (c *Collector) fail(ctx context.Context, target string, reason error) {
	if err := c.options.Ledger.RecordFailure(ctx, target, reason.Error(), c.options.Now()); err != nil && ctx.Err() == nil {
		c.options.Log.Error("A failure can't be recorded", "target", target, "err", err)
	}
}

// pull takes page after page until the target has no more rows. Each page and
// the cursor after it enter the ledger together, so that an end anywhere loses
// nothing and counts nothing twice.
func (c *Collector) pull(ctx context.Context, client *client) (total ledger.Result, err error) {
	known, err := c.options.Ledger.Target(ctx, client.target)
	if err != nil {
		return total, err
	}
	cursor, restarted := known.Cursor, false
	for {
		page, err := c.page(ctx, client, cursor)
		if errors.Is(err, errGone) && cursor != "" && !restarted {
			// Lost or restored: what is in the ledger already changes nothing.
			c.options.Log.Warn("The journal was begun anew; reading it from its start", "target", client.target)
			cursor, restarted = "", true
			continue
		}
		if err != nil {
			return total, err
		}
		rows := len(page.Rows) + len(page.BadLines)
		if rows > 0 && page.Cursor == cursor {
			return total, fmt.Errorf("%s serves rows and does not move its cursor", client.target)
		}
		result, err := c.options.Ledger.InsertPage(ctx, page, c.options.Now())
		if err != nil {
			return total, err
		}
		total = total.Plus(result)
		cursor = page.Cursor
		if rows == 0 {
			return total, nil
		}
	}
}

func (c *Collector) page(ctx context.Context, client *client, cursor string) (ledger.Page, error) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	case <-ctx.Done():
		return ledger.Page{}, ctx.Err()
	}
	return client.page(ctx, cursor)
}
