package procfs

import (
	"bytes"
	"strconv"
)

// maxUIDMapBytes is more than the kernel's 340 lines of a map can take.
const maxUIDMapBytes = 16 << 10

// UserNamespace is how a process's user namespace maps onto ours.
type UserNamespace struct {
	// RootUID is our number of the namespace's uid 0; -1 if that is mapped to
	// none of ours.
	RootUID int64
}

// readUserNamespace reads /proc/PID/uid_map; nil if the process is in our own
// user namespace, or the map cannot be read.
func (h *Handle) readUserNamespace() *UserNamespace {
	data, err := h.readFile("uid_map", maxUIDMapBytes)
	if err != nil {
		return nil
	}
	return parseUIDMap(data)
}

// parseUIDMap reads lines INSIDE OUTSIDE COUNT. One line that maps every uid to
// itself is what the host's namespace has, and any that sees its own.
func parseUIDMap(data []byte) *UserNamespace {
	const all = 1<<32 - 1
	namespace := &UserNamespace{RootUID: -1}
	lines := 0
	for line := range bytes.Lines(data) {
		fields := bytes.Fields(line)
		if len(fields) != 3 {
			continue
		}
		var numbers [3]uint64
		for i, field := range fields {
			n, err := strconv.ParseUint(string(field), 10, 32)
			if err != nil {
				return nil
			}
			numbers[i] = n
		}
		if numbers == [3]uint64{0, 0, all} {
			return nil
		}
		lines++
		if numbers[0] == 0 && numbers[2] > 0 && numbers[1] != all {
			namespace.RootUID = int64(numbers[1])
		}
	}
	if lines == 0 {
		// A namespace whose map nobody has written yet has nobody in it.
		return nil
	}
	return namespace
}
