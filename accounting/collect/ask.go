package collect

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

// ErrNotATarget says that nothing is collected from an address (any more).
var ErrNotATarget = errors.New("nothing is collected from this target")

// Targets are the addresses that are collected from now, in order.
func (c *Collector) Targets() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Sorted(maps.Keys(c.targets))
}

// Get asks a target for a path, as pulls ask it: over the same connections and
// with the same certificates and tokens. The caller closes the answer's body
// and bounds the time.
func (c *Collector) Get(ctx context.Context, target, path string) (*http.Response, error) {
	client, err := c.client(target)
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, client.base+path, nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", target, err)
	}
	return client.http.Do(request)
}

// client is the one of a target, made when it is first needed: its certificates
// and passwords may be files that come later.
func (c *Collector) client(target string) (*client, error) {
	c.mu.Lock()
	made, is := c.targets[target]
	c.mu.Unlock()
	if made != nil {
		return made, nil
	}
	if !is {
		return nil, fmt.Errorf("%s: %w", target, ErrNotATarget)
	}
	// Without the lock: it reads files, which may be on a file system that hangs.
	made, err := newClient(target, c.options.HTTP)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	other, is := c.targets[target]
	switch {
	case !is:
		return nil, fmt.Errorf("%s: %w", target, ErrNotATarget)
	case other != nil:
		return other, nil // somebody was faster; this one has no connection yet
	}
	c.targets[target] = made
	return made, nil
}

func (c *Collector) watch(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, is := c.targets[target]; !is {
		c.targets[target] = nil
	}
}

func (c *Collector) unwatch(target string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if gone := c.targets[target]; gone != nil {
		gone.http.CloseIdleConnections()
	}
	delete(c.targets, target)
}
