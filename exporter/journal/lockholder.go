package journal

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxLocksBytes bounds what is read of the kernel's list of locks.
const maxLocksBytes = 16 << 20

// LockHolder returns the PID of the exporter that holds the lock file path, 0
// if none does. It looks at the kernel's list, and never takes the lock, not
// even for a moment: an exporter that starts just then must get it.
func LockHolder(path string) (int, error) {
	var stat unix.Stat_t
	err := unix.Stat(path, &stat)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("look at lock %s: %w", path, err)
	}
	file, err := os.Open("/proc/locks")
	if err != nil {
		return 0, fmt.Errorf("who holds %s: %w", path, err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxLocksBytes))
	if err != nil {
		return 0, fmt.Errorf("who holds %s: %w", path, err)
	}
	return lockHolder(string(text), uint64(stat.Dev), stat.Ino), nil
}

// lockHolder finds a lock in text of the form
// "1: FLOCK  ADVISORY  WRITE 708 00:1b:19422 0 EOF".
func lockHolder(text string, device, inode uint64) int {
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(device), unix.Minor(device), inode)
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[1] != "FLOCK" || fields[5] != want {
			continue
		}
		if pid, err := strconv.Atoi(fields[4]); err == nil && pid > 0 {
			return pid
		}
	}
	return 0
}

// LockPaths are where the locks of an exporter are that keeps its state in dir
// and was given the lock file chosen ("" for none). Nothing is made.
func LockPaths(chosen, dir string) []string {
	of := (&Journal{options: Options{Dir: dir}}).dirLockPath()
	if chosen != "" {
		return []string{chosen, of}
	}
	return []string{filepath.Join(defaultLockDir, lockName), temporaryLockPath(), of}
}
