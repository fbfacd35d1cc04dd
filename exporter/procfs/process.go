package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
)

// Bounds on what is read of one process.
const (
	maxStatBytes        = 4 << 10
	maxStatusBytes      = 16 << 10
	maxCgroupBytes      = 64 << 10
	maxCommandLineBytes = 64 << 10
	maxNameBytes        = 256
)

// Flags of field 9 of /proc/PID/stat (include/linux/sched.h).
const (
	flagExiting      = 0x00000004
	flagKernelThread = 0x00200000
)

// Process is what /proc tells of one process.
type Process struct {
	PID uint32
	Stat
	// RealUID, EffectiveUID and SavedUID are as seen from our own user
	// namespace.
	RealUID, EffectiveUID, SavedUID uint32
	// NSPID are the process's numbers from this procfs's namespace inwards; one
	// alone is a process in no PID namespace of its own. Empty before Linux 4.1.
	NSPID []uint32
	// Cgroup is the whole text of /proc/PID/cgroup, bounded.
	Cgroup string
	// Executable is the program's path in its own mount namespace, empty if it
	// may not be read.
	Executable string
	// ExecutableUID owns the program's file; -1 if unknown.
	ExecutableUID int64
	// LoginUID is the uid that the login session was opened for; -1 if unset or
	// unknown.
	LoginUID int64
	// UserNamespace is the process's; nil if it is our own, or not known.
	UserNamespace *UserNamespace
}

// Stat is what /proc/PID/stat tells.
type Stat struct {
	Command    string // comm: at most 15 bytes, chosen by the process itself
	State      byte   // R, S, D, Z, …
	ParentPID  uint32
	Threads    int    // those that live, and the first one even if it has ended
	StartTicks uint64 // field 22: clock ticks since boot
	flags      uint64

	userTicks, systemTicks uint64
}

// Zombie reports a process that has ended and was not reaped.
func (s Stat) Zombie() bool { return s.State == 'Z' || s.State == 'X' || s.State == 'x' }

// Exiting reports a process on its way out, whose cgroup v1 paths have become
// "/" or are about to.
func (s Stat) Exiting() bool { return s.Zombie() || s.flags&flagExiting != 0 }

// KernelThread reports a thread of the kernel itself.
func (s Stat) KernelThread() bool { return s.flags&flagKernelThread != 0 }

// Handle is one process, held by its /proc directory. It does not keep the
// process alive, and never comes to mean another process.
type Handle struct {
	fs        *FS
	pid       uint32
	directory int
	pidfd     int // -1 if it could not be had
}

// Process opens a handle on pid. The error is ErrGone or ErrHidden, or says
// what else is wrong.
//
// The directory is opened before the pidfd: a read through the directory that
// succeeds after both proves that both are of the same process.
func (fs *FS) Process(pid uint32) (*Handle, error) {
	path := filepath.Join(fs.root, strconv.FormatUint(uint64(pid), 10))
	directory, err := retry(func() (int, error) {
		return unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	})
	if err != nil {
		return nil, fs.classify(path, pid, err)
	}
	h := &Handle{fs: fs, pid: pid, directory: directory, pidfd: -1}
	if fs.sameNamespace {
		if pidfd, err := unix.PidfdOpen(int(pid), 0); err == nil {
			h.pidfd = pidfd // ENOSYS, EMFILE and the like: the directory alone has to do
		}
	}
	return h, nil
}

// PIDFD is a descriptor that polls readable once the process has ended; -1 if
// none could be had, and Alive has to be asked.
func (h *Handle) PIDFD() int { return h.pidfd }

// ClosePIDFD gives the pidfd back: a process that has ended would poll
// readable for ever.
func (h *Handle) ClosePIDFD() {
	if h.pidfd >= 0 {
		unix.Close(h.pidfd)
		h.pidfd = -1
	}
}

// Close gives the handle's descriptors back.
func (h *Handle) Close() {
	h.ClosePIDFD()
	if h.directory >= 0 {
		unix.Close(h.directory)
		h.directory = -1
	}
}

// Read reads everything but the command line. Files that may be refused to us
// (exe, loginuid) leave their fields unknown.
func (h *Handle) Read() (Process, error) {
	p := Process{PID: h.pid, ExecutableUID: -1, LoginUID: -1}
	var err error
	if p.Cgroup, err = h.Cgroup(); err != nil {
		return p, err
	}
	// stat comes after cgroup: if it does not say that the process is exiting,
	// the cgroup was that of the living process.
	if p.Stat, err = h.Stat(); err != nil {
		return p, err
	}
	status, err := h.readFile("status", maxStatusBytes)
	if err != nil {
		return p, err
	}
	if err := p.parseStatus(status); err != nil {
		return p, fmt.Errorf("%s: %w", h.path("status"), err)
	}
	if loginUID, err := h.readFile("loginuid", 32); err == nil {
		if uid, err := strconv.ParseUint(strings.TrimSpace(string(loginUID)), 10, 32); err == nil && uid != 1<<32-1 {
			p.LoginUID = int64(uid)
		}
	}
	h.readExecutable(&p)
	p.UserNamespace = h.readUserNamespace()
	return p, nil
}

// Stat reads what changes of a process and whether it is still there.
func (h *Handle) Stat() (Stat, error) {
	data, err := h.readFile("stat", maxStatBytes)
	if err != nil {
		return Stat{}, err
	}
	s, err := ParseStat(data)
	if err != nil {
		return Stat{}, fmt.Errorf("%s: %w", h.path("stat"), err)
	}
	return s, nil
}

// EffectiveUID is the process's effective uid now. It is the cheapest sign
// that a process has changed its uids.
func (h *Handle) EffectiveUID() (uint32, error) {
	if h.directory < 0 {
		return 0, fmt.Errorf("%s: %w", h.path(""), ErrGone)
	}
	var stat unix.Stat_t
	if err := unix.Fstat(h.directory, &stat); err != nil {
		return 0, h.fs.classify(h.path(""), h.pid, err)
	}
	return stat.Uid, nil
}

// Cgroup reads the text of the process's cgroup file.
func (h *Handle) Cgroup() (string, error) {
	data, err := h.readFile("cgroup", maxCgroupBytes)
	return string(data), err
}

// CommandLine reads the arguments, cleaned. They may hold what is nobody
// else's business: they are for the process's owner and root alone, and never
// for a metric, a row or a log.
func (h *Handle) CommandLine() ([]string, error) {
	data, err := h.readFile("cmdline", maxCommandLineBytes)
	if err != nil || len(data) == 0 {
		return nil, err
	}
	arguments := strings.Split(strings.TrimRight(string(data), "\x00"), "\x00")
	for i := range arguments {
		arguments[i] = text.Clean(arguments[i], 0)
	}
	return arguments, nil
}

func (h *Handle) readExecutable(p *Process) {
	buffer := make([]byte, 4096)
	n, err := unix.Readlinkat(h.directory, "exe", buffer)
	if err != nil || n <= 0 {
		return
	}
	p.Executable = text.Clean(strings.TrimSuffix(string(buffer[:n]), " (deleted)"), len(buffer))
	var stat unix.Stat_t
	if unix.Fstatat(h.directory, "exe", &stat, 0) == nil {
		p.ExecutableUID = int64(stat.Uid)
	}
}

func (h *Handle) path(name string) string {
	return filepath.Join(h.fs.root, strconv.FormatUint(uint64(h.pid), 10), name)
}

// readFile reads a whole file of the process, at most limit bytes of it.
func (h *Handle) readFile(name string, limit int) ([]byte, error) {
	if h.directory < 0 {
		return nil, fmt.Errorf("%s: %w", h.path(name), ErrGone)
	}
	fd, err := retry(func() (int, error) { return unix.Openat(h.directory, name, unix.O_RDONLY|unix.O_CLOEXEC, 0) })
	if err != nil {
		// With hidepid=2 the directory itself can be opened, and nothing in it.
		return nil, h.fs.classify(h.path(name), h.pid, err)
	}
	defer unix.Close(fd)
	buffer := make([]byte, 0, min(limit, 2048))
	for len(buffer) < limit {
		if len(buffer) == cap(buffer) {
			grown := make([]byte, len(buffer), min(limit, 4*cap(buffer)))
			copy(grown, buffer)
			buffer = grown
		}
		n, err := retry(func() (int, error) { return unix.Read(fd, buffer[len(buffer):cap(buffer)]) })
		if err != nil {
			return nil, classify(h.path(name), err)
		}
		if n <= 0 {
			break
		}
		buffer = buffer[:len(buffer)+n]
	}
	return buffer, nil
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}

// classify knows, beside what classify knows, the processes that hidepid=2
// makes look as if they were not there: a signal tells them from those that
// are gone.
func (fs *FS) classify(path string, pid uint32, err error) error {
	if err == unix.ENOENT && fs.sameNamespace && unix.Kill(int(pid), 0) == unix.EPERM {
		return fmt.Errorf("%s: %w by hidepid; run as root or with CAP_SYS_PTRACE", path, ErrHidden)
	}
	return classify(path, err)
}

// classify keeps what is gone and what is hidden apart: the one is the course
// of things, the other a missing privilege.
func classify(path string, err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ESRCH):
		return fmt.Errorf("%s: %w", path, ErrGone)
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return fmt.Errorf("%s: %w (%v); run as root or with CAP_SYS_PTRACE", path, ErrHidden, err)
	}
	return &os.PathError{Op: "read", Path: path, Err: err}
}

// ParseStat reads /proc/PID/stat. The command may hold anything, parentheses
// and newlines too, so the fields are counted from the last one.
func ParseStat(data []byte) (Stat, error) {
	open, end := bytes.IndexByte(data, '('), bytes.LastIndexByte(data, ')')
	if open < 0 || end < open {
		return Stat{}, errors.New("stat without a command in parentheses")
	}
	fields := bytes.Fields(data[end+1:])
	if len(fields) < 20 || len(fields[0]) != 1 {
		return Stat{}, fmt.Errorf("stat with %d fields after the command, want 20 or more", len(fields))
	}
	s := Stat{Command: text.Clean(string(data[open+1:end]), maxNameBytes), State: fields[0][0]}
	var err error
	if s.StartTicks, err = strconv.ParseUint(string(fields[19]), 10, 64); err != nil {
		return Stat{}, fmt.Errorf("start time: %w", err)
	}
	if s.flags, err = strconv.ParseUint(string(fields[6]), 10, 64); err != nil {
		return Stat{}, fmt.Errorf("flags: %w", err)
	}
	if parent, err := strconv.ParseUint(string(fields[1]), 10, 32); err == nil {
		s.ParentPID = uint32(parent)
	}
	if threads, err := strconv.ParseUint(string(fields[17]), 10, 22); err == nil {
		s.Threads = int(threads)
	}
	if s.userTicks, err = strconv.ParseUint(string(fields[11]), 10, 64); err != nil {
		return Stat{}, fmt.Errorf("user time: %w", err)
	}
	if s.systemTicks, err = strconv.ParseUint(string(fields[12]), 10, 64); err != nil {
		return Stat{}, fmt.Errorf("system time: %w", err)
	}
	return s, nil
}

func (p *Process) parseStatus(data []byte) error {
	found := false
	for line := range strings.Lines(string(data)) {
		key, value, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		switch key {
		case "Uid":
			fields := strings.Fields(value)
			if len(fields) < 3 {
				return fmt.Errorf("status with Uid %q", value)
			}
			for i, target := range []*uint32{&p.RealUID, &p.EffectiveUID, &p.SavedUID} {
				uid, err := strconv.ParseUint(fields[i], 10, 32)
				if err != nil {
					return fmt.Errorf("status: uid: %w", err)
				}
				*target = uint32(uid)
			}
			found = true
		case "NSpid":
			for _, field := range strings.Fields(value) {
				if pid, err := strconv.ParseUint(field, 10, 32); err == nil {
					p.NSPID = append(p.NSPID, uint32(pid))
				}
			}
		}
	}
	if !found {
		return errors.New("status without Uid")
	}
	return nil
}
