package procfs

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
)

const (
	maxEnvironmentBytes = 4 << 20 // the kernel takes up to 6 MiB of arguments and environment
	maxVariableBytes    = 4 << 10 // longer ones are passed over
	maxVariableValue    = 256
)

// Environment reads, of the variables that the process was started with, those
// called one of keys, and keeps no others: the rest is nobody's business. A
// value that is too long or unfit to be a name is left out. It needs the
// process's own uid or CAP_SYS_PTRACE; without, the error is ErrHidden.
//
// The kernel reads the process's own memory for it, which can take as long as
// the process can make it take: never call it where that matters.
func (h *Handle) Environment(keys []string) (map[string]string, error) {
	if h.directory < 0 {
		return nil, fmt.Errorf("%s: %w", h.path("environ"), ErrGone)
	}
	fd, err := retry(func() (int, error) { return unix.Openat(h.directory, "environ", unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		return nil, h.fs.classify(h.path("environ"), h.pid, err)
	}
	defer unix.Close(fd)
	found, err := variables(io.LimitReader(descriptor(fd), maxEnvironmentBytes), keys)
	if err != nil {
		return nil, classify(h.path("environ"), err)
	}
	return found, nil
}

// descriptor is a file descriptor as a reader.
type descriptor int

func (d descriptor) Read(p []byte) (int, error) {
	n, err := retry(func() (int, error) { return unix.Read(int(d), p) })
	switch {
	case err != nil:
		return 0, err
	case n == 0:
		return 0, io.EOF
	}
	return n, nil
}

// variables finds keys in NUL-terminated KEY=VALUE. Of two with one key the
// first counts, as for getenv.
func variables(from io.Reader, keys []string) (map[string]string, error) {
	found := map[string]string{}
	reader := bufio.NewReaderSize(from, maxVariableBytes)
	whole := true // that what comes next begins a variable
	for {
		part, err := reader.ReadSlice(0)
		// What has no end may have been cut.
		if whole && err == nil {
			keep(found, bytes.TrimSuffix(part, []byte{0}), keys)
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			whole = false
		case errors.Is(err, io.EOF):
			return found, nil
		case err != nil:
			return nil, err
		default:
			whole = true
		}
	}
}

func keep(found map[string]string, variable []byte, keys []string) {
	key, value, ok := bytes.Cut(variable, []byte{'='})
	if !ok || len(value) > maxVariableValue || !slices.Contains(keys, string(key)) {
		return
	}
	if _, there := found[string(key)]; !there && text.Clean(string(value), 0) == string(value) {
		found[string(key)] = string(value)
	}
}
