package journal

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// DefaultLockPath is the lock that a second exporter on the same node finds:
// in /run, or in the directory for temporary files, per user, where /run can't
// be written.
func DefaultLockPath() string { return lockPathIn(defaultLockDir) }

const (
	defaultLockDir = "/run/gpu-exporter"
	lockName       = "gpu-exporter.lock"
)

func lockPathIn(dir string) string {
	if err := os.MkdirAll(dir, 0o755); err == nil && unix.Access(dir, unix.W_OK) == nil {
		return filepath.Join(dir, lockName)
	}
	return temporaryLockPath()
}

func temporaryLockPath() string {
	return filepath.Join(os.TempDir(), "gpu-exporter-"+strconv.Itoa(os.Getuid())+".lock")
}

// lock takes the node, and the state directory: two exporters may see
// different /run directories and yet share the state.
func (j *Journal) lock() error {
	path := j.options.LockPath
	if path == "" {
		path = DefaultLockPath()
	}
	for _, path := range []string{path, j.dirLockPath()} {
		file, err := takeLock(path)
		if err != nil {
			return err
		}
		j.locks = append(j.locks, file)
	}
	return nil
}

func (j *Journal) dirLockPath() string { return filepath.Join(j.options.Dir, "journal.lock") }

// relock takes the state directory again if its lock's file is gone.
func (j *Journal) relock() error {
	last := len(j.locks) - 1
	held, err := j.locks[last].Stat()
	if err != nil {
		return err
	}
	if now, err := os.Stat(j.dirLockPath()); err == nil && os.SameFile(now, held) {
		return nil
	}
	file, err := takeLock(j.dirLockPath())
	if err != nil {
		return err
	}
	j.locks[last].Close()
	j.locks[last] = file
	return nil
}

// unlock lets go. The files stay: to remove a lock file would let two
// processes hold two files of one name.
func (j *Journal) unlock() {
	for _, file := range j.locks {
		file.Close()
	}
	j.locks = nil
}

// takeLock holds path until the file is closed or the process ends, however it
// ends. The descriptor is closed on exec, so that no child keeps it.
func takeLock(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	err = unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		defer file.Close()
		return nil, fmt.Errorf("%w: another gpu-exporter, PID %s, holds %s; one node is metered by one exporter: stop that one (systemctl stop gpu-exporter, or kill it), or use the one that runs",
			ErrLocked, holder(file), path)
	}
	if err == nil {
		err = file.Truncate(0)
	}
	if err == nil {
		_, err = file.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	// A full disk must not keep the exporter from running: the PID in the file
	// is for people only.
	if err != nil && !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		file.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return file, nil
}

func holder(file *os.File) string {
	text := make([]byte, 32)
	n, err := file.ReadAt(text, 0)
	if err != nil && err != io.EOF {
		return "unknown"
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text[:n])))
	if err != nil {
		return "unknown"
	}
	return strconv.Itoa(pid)
}
