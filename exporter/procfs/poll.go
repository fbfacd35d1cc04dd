package procfs

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Ended asks, in one system call, which of the handles' processes have ended.
// pidfds holds descriptors of Handle.PIDFD; the answer holds the positions of
// those that have.
func Ended(pidfds []unix.PollFd) ([]int, error) {
	for i := range pidfds {
		pidfds[i].Events, pidfds[i].Revents = unix.POLLIN, 0
	}
	n, err := retry(func() (int, error) { return unix.Ppoll(pidfds, &unix.Timespec{}, nil) })
	if err != nil {
		return nil, fmt.Errorf("poll %d pidfds: %w", len(pidfds), err)
	}
	if n == 0 {
		return nil, nil
	}
	ended := make([]int, 0, n)
	for i := range pidfds {
		if pidfds[i].Revents != 0 {
			ended = append(ended, i)
		}
	}
	return ended, nil
}
