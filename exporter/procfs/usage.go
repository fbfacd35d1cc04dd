package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strconv"

	"golang.org/x/sys/unix"
)

// CPUTicks is the CPU time that the process used in both modes, all its
// threads together, in ticks (FS.ClockTicks). That of its children is not in it.
func (s Stat) CPUTicks() uint64 { return s.userTicks + s.systemTicks }

// IO is how many bytes a process made storage read and write so far (what the
// page cache had is not in it). Only root and the process's owner may see it:
// ErrHidden else.
func (h *Handle) IO() (read, written uint64, err error) {
	data, err := h.readFile("io", maxStatBytes)
	if err != nil {
		return 0, 0, err
	}
	read, okRead := lineValue(data, "read_bytes:")
	written, okWritten := lineValue(data, "write_bytes:")
	if !okRead || !okWritten {
		return 0, 0, fmt.Errorf("%s has no read_bytes and write_bytes", h.path("io"))
	}
	return read, written, nil
}

// ResidentBytes is the memory of a process that no file is behind: its own
// and what it shares, without mapped files and the page cache. A process that
// has ended has none. The kernel tells since Linux 4.5.
func (h *Handle) ResidentBytes() (uint64, error) {
	data, err := h.readFile("status", maxStatusBytes)
	if err != nil {
		return 0, err
	}
	anonymous, known := lineValue(data, "RssAnon:")
	if !known {
		if !bytes.Contains(data, []byte("\nVmRSS:")) {
			return 0, nil // a zombie or a kernel thread: no memory of its own
		}
		return 0, errors.New(h.path("status") + " has no RssAnon")
	}
	shared, _ := lineValue(data, "RssShmem:")
	return (anonymous + shared) << 10, nil
}

// lineValue is the number behind the word that a line begins with.
func lineValue(data []byte, word string) (uint64, bool) {
	for line := range bytes.Lines(data) {
		if rest, ok := bytes.CutPrefix(line, []byte(word)); ok {
			fields := bytes.Fields(rest)
			if len(fields) == 0 {
				return 0, false
			}
			value, err := strconv.ParseUint(string(fields[0]), 10, 64)
			return value, err == nil
		}
	}
	return 0, false
}

// NowTicks is the time since boot in ticks, as Stat.StartTicks counts them.
func (fs *FS) NowTicks() uint64 {
	var boot unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil {
		return math.MaxUint64 // nothing has begun since then
	}
	return uint64(boot.Nano()) / (1_000_000_000 / uint64(fs.clockTicks))
}
