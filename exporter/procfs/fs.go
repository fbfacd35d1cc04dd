// Package procfs reads who a PID is: when it started, its uids, its cgroups
// and its program.
//
// A process is read through one handle on its /proc/PID directory. Once the
// process is gone every read through the handle fails with ESRCH, even if the
// number has been given to another process, so what is read through one
// handle is always of one process.
package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrGone says that the process no longer exists (ENOENT, ESRCH).
	ErrGone = errors.New("process is gone")
	// ErrHidden says that the process exists and may not be looked at (EPERM,
	// EACCES, or hidepid).
	ErrHidden = errors.New("process is hidden")
	// ErrNotInitialPIDNamespace says that the numbers in a procfs are not those
	// that the GPU driver reports.
	ErrNotInitialPIDNamespace = errors.New("not the procfs of the initial PID namespace")
)

// Inode numbers of the initial namespaces (include/linux/proc_ns.h).
const (
	initialPIDNamespace    = 4026531836
	initialCgroupNamespace = 4026531835
)

const remedy = "the GPU driver reports host PIDs, so no PID could be attributed: run gpu-exporter on the host, " +
	"or in a container with --pid=host, or mount the host's /proc and name it with --path.procfs"

// FS is one mounted procfs of the initial PID namespace.
type FS struct {
	root       string
	bootID     string
	clockTicks int64 // per second
	// sameNamespace says that PIDs given to system calls mean the same
	// processes as PIDs in this procfs.
	sameNamespace          bool
	initialCgroupNamespace bool

	mutex    sync.Mutex
	bootTime time.Time
	bootRead time.Time
}

// Open opens the procfs mounted on root ("" means /proc). It refuses one that
// is not of the initial PID namespace with ErrNotInitialPIDNamespace, whose
// text says what to do.
func Open(root string) (*FS, error) {
	if root == "" {
		root = "/proc"
	}
	fs := &FS{root: root, clockTicks: clockTicks()}
	bootID, err := readSmall(filepath.Join(root, "sys/kernel/random/boot_id"))
	if err != nil {
		return nil, fmt.Errorf("open procfs %s: %w; is it a mounted procfs?", root, err)
	}
	fs.bootID = strings.TrimSpace(string(bootID))
	if err := fs.checkNamespace(); err != nil {
		return nil, fmt.Errorf("open procfs %s: %w", root, err)
	}
	if inode, err := namespaceInode(filepath.Join(root, "self/ns/cgroup")); err == nil {
		fs.initialCgroupNamespace = inode == initialCgroupNamespace
	}
	if _, err := fs.readBootTime(); err != nil {
		return nil, fmt.Errorf("open procfs %s: %w", root, err)
	}
	return fs, nil
}

// checkNamespace proves that the procfs is of the initial PID namespace, by
// the first of these that can be had:
//
//   - we are in the initial namespace, and the procfs knows us (its "self"
//     resolves, so its namespace is ours or one above ours);
//   - the namespace of its PID 1, which needs privilege over that process;
//   - its PID 2 is a kernel thread: these exist in the initial namespace only.
func (fs *FS) checkNamespace() error {
	if inode, err := namespaceInode(filepath.Join(fs.root, "self/ns/pid")); err == nil && inode == initialPIDNamespace {
		fs.sameNamespace = true
		return nil
	}
	if inode, err := namespaceInode(filepath.Join(fs.root, "1/ns/pid")); err == nil {
		if inode == initialPIDNamespace {
			return nil
		}
		return fmt.Errorf("%w (its PID 1 is in pid:[%d]); %s", ErrNotInitialPIDNamespace, inode, remedy)
	}
	data, err := readSmall(filepath.Join(fs.root, "2/stat"))
	if err == nil {
		if s, err := ParseStat(data); err == nil && s.flags&flagKernelThread != 0 {
			return nil
		}
		return fmt.Errorf("%w (its PID 2 is not the kernel's); %s", ErrNotInitialPIDNamespace, remedy)
	}
	return fmt.Errorf("%w, or it cannot be told because PID 1 and PID 2 may not be read (%v); %s",
		ErrNotInitialPIDNamespace, err, remedy)
}

// namespaceInode reads the number in a link such as "pid:[4026531836]".
func namespaceInode(path string) (uint64, error) {
	link, err := os.Readlink(path)
	if err != nil {
		return 0, err
	}
	_, number, ok := strings.Cut(link, ":[")
	if !ok {
		return 0, fmt.Errorf("%s: %q is no namespace", path, link)
	}
	return strconv.ParseUint(strings.TrimSuffix(number, "]"), 10, 64)
}

// clockTicks is the kernel's USER_HZ, from the auxiliary vector.
func clockTicks() int64 {
	const atClockTicks = 17 // AT_CLKTCK
	if vector, err := unix.Auxv(); err == nil {
		for _, entry := range vector {
			if entry[0] == atClockTicks && entry[1] > 0 {
				return int64(entry[1])
			}
		}
	}
	return 100
}

// Root is where the procfs is mounted.
func (fs *FS) Root() string { return fs.root }

// BootID identifies the boot: PIDs and start times mean nothing beyond it.
func (fs *FS) BootID() string { return fs.bootID }

// ClockTicks is how many ticks of /proc/PID/stat a second has.
func (fs *FS) ClockTicks() int64 { return fs.clockTicks }

// InitialCgroupNamespace reports whether cgroup paths are read from the root
// of the hierarchy. Where they are not, "/" means our own cgroup.
func (fs *FS) InitialCgroupNamespace() bool { return fs.initialCgroupNamespace }

// StartTime turns ticks since boot into wall time. It is as exact as the
// kernel's btime: one second. The boot's wall time is read again every minute,
// because the kernel moves it when the clock is set.
func (fs *FS) StartTime(ticks uint64) time.Time {
	boot, err := fs.readBootTime()
	if err != nil {
		return time.Time{}
	}
	hertz := uint64(fs.clockTicks)
	return boot.Add(time.Duration(ticks/hertz)*time.Second + time.Duration(ticks%hertz)*time.Second/time.Duration(hertz))
}

// StartMonotonicUS turns ticks since boot into CLOCK_MONOTONIC microseconds,
// which differ from time since boot by the time the machine slept.
func (fs *FS) StartMonotonicUS(ticks uint64) int64 {
	var boot, monotonic unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot) != nil || unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic) != nil {
		return 0
	}
	slept := (boot.Nano() - monotonic.Nano()) / 1000
	hertz := uint64(fs.clockTicks)
	return int64(ticks/hertz*1_000_000+ticks%hertz*1_000_000/hertz) - slept
}

func (fs *FS) readBootTime() (time.Time, error) {
	fs.mutex.Lock()
	defer fs.mutex.Unlock()
	if !fs.bootRead.IsZero() && time.Since(fs.bootRead) < time.Minute {
		return fs.bootTime, nil
	}
	data, err := os.ReadFile(filepath.Join(fs.root, "stat"))
	if err != nil {
		return fs.bootTime, err
	}
	for line := range bytes.Lines(data) {
		if rest, ok := bytes.CutPrefix(line, []byte("btime ")); ok {
			seconds, err := strconv.ParseInt(string(bytes.TrimSpace(rest)), 10, 64)
			if err != nil {
				return fs.bootTime, fmt.Errorf("%s/stat: btime: %w", fs.root, err)
			}
			fs.bootTime, fs.bootRead = time.Unix(seconds, 0), time.Now()
			return fs.bootTime, nil
		}
	}
	return fs.bootTime, fmt.Errorf("%s/stat has no btime", fs.root)
}

func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	buffer := make([]byte, 4096)
	n, err := f.Read(buffer)
	if n == 0 && err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	return buffer[:n], nil
}
