// Package server runs a simulated GPU server: real processes under real users,
// in real cgroups and containers, and a scenario that says what each of them
// does on which card.
package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// commLength is what the kernel keeps of a process's name.
const commLength = 15

// Work is what a worker process does: it takes a name and waits until its
// standard input ends, which it does when whoever started it is gone, killed
// or not.
func Work(ctx context.Context, name string, stdin io.Reader) error {
	name = strings.ToValidUTF8(name, "?")
	if len(name) > commLength {
		name = name[:commLength]
	}
	if err := os.WriteFile("/proc/self/comm", []byte(name), 0); err != nil {
		return fmt.Errorf("worker: take the name %q: %w", name, err)
	}
	gone := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, stdin)
		gone <- err
	}()
	select {
	case <-ctx.Done():
		return nil
	case err := <-gone:
		if err != nil && !errors.Is(err, os.ErrClosed) {
			return fmt.Errorf("worker: standard input: %w", err)
		}
		return nil
	}
}
