package procfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
)

// Bounds on what is read of one process's open files and mappings. What lies
// beyond is not looked at.
const (
	maxProcesses      = 1 << 20
	maxDescriptors    = 1 << 14
	maxThreads        = 1 << 12
	maxFDInfoBytes    = 256 // position, flags and mount stand first
	maxMountInfoBytes = 1 << 20
	maxMapsBytes      = 8 << 20
	maxStackBytes     = 8 << 10
	maxDevicesBytes   = 64 << 10
)

// DeviceNumber is what makes a file a certain device, whatever it is called
// and wherever it lies.
type DeviceNumber struct{ Major, Minor uint32 }

// OpenDevice is a character device that a process has open or mapped.
type OpenDevice struct {
	Number DeviceNumber
	// Path is the file's name as the process sees it.
	Path string
	// Mapped says that it is known from a mapping and not from a descriptor.
	Mapped bool
}

// PIDs lists the processes that the procfs shows, in ascending order. Those
// that hidepid hides are not among them.
func (fs *FS) PIDs() ([]uint32, error) {
	pids, err := numbersIn(func() (int, error) {
		return unix.Open(fs.root, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	}, fs.root, maxProcesses)
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	slices.Sort(pids)
	return pids, nil
}

// SameNamespace reports whether system calls of ours take the numbers of this
// procfs.
func (fs *FS) SameNamespace() bool { return fs.sameNamespace }

// HidesProcesses reports whether the procfs is mounted with hidepid, so that
// only root and its like see everybody's processes. What can't be read is no
// reason to say so.
func (fs *FS) HidesProcesses() bool {
	data, err := readWhole(filepath.Join(fs.root, "self/mountinfo"), maxMountInfoBytes)
	if err != nil {
		return false
	}
	return hidesProcesses(data, fs.root)
}

// hidesProcesses looks for hidepid in the options of the mount on root; of
// several the last is on top.
func hidesProcesses(mountinfo []byte, root string) bool {
	hides := false
	for line := range bytes.Lines(mountinfo) {
		mount, ok := parseMount(string(line))
		if !ok || mount.target != root || mount.fileSystem != "proc" {
			continue
		}
		hides = false
		for option := range strings.SplitSeq(mount.options, ",") {
			if value, ok := strings.CutPrefix(option, "hidepid="); ok {
				hides = value != "0" && value != "off"
			}
		}
	}
	return hides
}

// CharacterMajors are the major numbers of the kernel's character devices by
// the names that /proc/devices gives them.
func (fs *FS) CharacterMajors() (map[string]uint32, error) {
	name := filepath.Join(fs.root, "devices")
	data, err := readWhole(name, maxDevicesBytes)
	if err != nil {
		return nil, fmt.Errorf("read device numbers: %w", err)
	}
	return parseDevices(data), nil
}

func parseDevices(data []byte) map[string]uint32 {
	majors := map[string]uint32{}
	character := false
	for line := range bytes.Lines(data) {
		fields := bytes.Fields(line)
		switch {
		case len(fields) == 2 && string(fields[1]) == "devices:":
			character = string(fields[0]) == "Character"
		case len(fields) == 2 && character:
			if major, err := strconv.ParseUint(string(fields[0]), 10, 32); err == nil {
				majors[string(fields[1])] = uint32(major)
			}
		}
	}
	return majors
}

// OpenDevices lists the character devices that the process's descriptors stand
// for. Nothing is opened, and no file system that may be far away is asked.
//
// A process's threads share its descriptors; those that made themselves a
// table of their own are looked at too, and so are those that outlive the
// first thread: then /proc/PID/fd is empty.
func (h *Handle) OpenDevices() ([]OpenDevice, error) {
	found := &deviceList{handle: h}
	err := found.addDescriptors("")
	if err != nil {
		return nil, err
	}
	stat, err := h.Stat()
	if err != nil || stat.Threads <= 1 {
		return found.devices, err
	}
	for _, thread := range h.threads() {
		if thread != h.pid && (stat.Zombie() || h.ownDescriptors(thread)) {
			// A thread that has just ended has nothing open.
			_ = found.addDescriptors("task/" + strconv.FormatUint(uint64(thread), 10) + "/")
		}
	}
	return found.devices, nil
}

// MappedDevices lists the character devices that the process has mapped: a
// mapping outlives the descriptor that it was made through. It costs more than
// OpenDevices.
//
// The number of a mapped file can be had with CAP_SYS_ADMIN or
// CAP_CHECKPOINT_RESTORE only; without these a name has to do, and the number
// is that which byName gives it, if any.
func (h *Handle) MappedDevices(byName func(path string) (DeviceNumber, bool)) ([]OpenDevice, error) {
	stat, err := h.Stat()
	if err != nil {
		return nil, err
	}
	within := ""
	if stat.Zombie() { // its threads, if any live, have the memory
		for _, thread := range h.threads() {
			if thread != h.pid {
				within = "task/" + strconv.FormatUint(uint64(thread), 10) + "/"
				break
			}
		}
	}
	data, err := h.readFile(within+"maps", maxMapsBytes)
	if err != nil {
		return nil, err
	}
	return mappedDevices(data, func(addresses string) (DeviceNumber, bool, error) {
		// map_files is of the process: its threads' directories have none.
		return deviceAt(h.directory, "map_files/"+addresses)
	}, byName), nil
}

func mappedDevices(maps []byte, number func(addresses string) (DeviceNumber, bool, error), byName func(string) (DeviceNumber, bool)) []OpenDevice {
	var found []OpenDevice
	for line := range bytes.Lines(maps) {
		addresses, name, ok := parseMapping(string(line))
		if !ok || !mayBeDevice(name) {
			continue
		}
		device, isDevice, err := number(addresses)
		if err != nil {
			device, isDevice = byName(name)
		}
		if isDevice {
			add(&found, OpenDevice{Number: device, Path: text.Clean(name, maxNameBytes), Mapped: true})
		}
	}
	return found
}

// parseMapping reads a line of /proc/PID/maps. Only a file has a name that
// begins with a slash; newlines in it are escaped.
func parseMapping(line string) (addresses, name string, ok bool) {
	fields := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 6)
	if len(fields) < 6 {
		return "", "", false
	}
	name = strings.TrimSuffix(strings.TrimLeft(fields[5], " "), " (deleted)")
	return fields[0], name, strings.HasPrefix(name, "/")
}

// mayBeDevice keeps the thousands of mapped libraries from being asked what
// they are.
func mayBeDevice(name string) bool {
	return strings.HasPrefix(name, "/dev/") || strings.HasPrefix(path.Base(name), "nvidia")
}

// KernelStack is where in the kernel the process, or the thread of it that
// sleeps deepest, waits: one function a line, the innermost first. It is empty
// where that may not be read.
func (h *Handle) KernelStack() string {
	var stacks []byte
	for _, thread := range h.threads() {
		name := "task/" + strconv.FormatUint(uint64(thread), 10)
		data, err := h.readFile(name+"/stat", maxStatBytes)
		if err != nil {
			continue
		}
		if stat, err := ParseStat(data); err != nil || stat.State != 'D' {
			continue
		}
		data, err = h.readFile(name+"/stack", maxStackBytes)
		if err != nil {
			data, err = h.readFile(name+"/wchan", maxNameBytes)
		}
		if err == nil {
			stacks = append(append(stacks, bytes.TrimSpace(data)...), '\n')
		}
		if len(stacks) > 4*maxStackBytes {
			break
		}
	}
	return string(stacks)
}

// threads lists the process's threads; none if they can't be had.
func (h *Handle) threads() []uint32 {
	threads, err := numbersIn(func() (int, error) { return h.open("task", unix.O_RDONLY|unix.O_DIRECTORY) }, h.path("task"), maxThreads)
	if err != nil {
		return nil // it has just ended, or is not ours to look at
	}
	return threads
}

// ownDescriptors reports a thread with a table of descriptors of its own.
func (h *Handle) ownDescriptors(thread uint32) bool {
	const kcmpFiles = 2 // KCMP_FILES
	if !h.fs.sameNamespace {
		return false
	}
	different, _, errno := unix.Syscall6(unix.SYS_KCMP, uintptr(h.pid), uintptr(thread), kcmpFiles, 0, 0, 0)
	return errno == 0 && different != 0
}

func (h *Handle) open(name string, flags int) (int, error) {
	if h.directory < 0 {
		return -1, unix.ESRCH
	}
	return retry(func() (int, error) { return unix.Openat(h.directory, name, flags|unix.O_CLOEXEC, 0) })
}

// deviceList collects the devices of one process.
type deviceList struct {
	handle  *Handle
	devices []OpenDevice
	mounts  map[string]string // file system by id of mount; nil until needed
}

// addDescriptors looks at the descriptors of the process, or of the thread
// that within names.
func (l *deviceList) addDescriptors(within string) error {
	h := l.handle
	descriptors, err := numbersIn(func() (int, error) {
		return h.open(within+"fd", unix.O_RDONLY|unix.O_DIRECTORY)
	}, h.path(within+"fd"), maxDescriptors)
	if err != nil {
		return h.fs.classify(h.path(within+"fd"), h.pid, err)
	}
	buffer := make([]byte, 4096)
	for _, descriptor := range descriptors {
		number := strconv.FormatUint(uint64(descriptor), 10)
		link := within + "fd/" + number
		n, err := unix.Readlinkat(h.directory, link, buffer)
		if err != nil || n <= 0 || buffer[0] != '/' {
			continue // closed meanwhile; or a socket, a pipe, …: no file of a file system
		}
		name := string(buffer[:n])
		if !strings.HasPrefix(name, "/dev/") && !l.near(within, number) {
			continue
		}
		if device, is, err := deviceAt(h.directory, link); err == nil && is {
			add(&l.devices, OpenDevice{Number: device, Path: text.Clean(strings.TrimSuffix(name, " (deleted)"), maxNameBytes)})
		}
	}
	return nil
}

func add(devices *[]OpenDevice, device OpenDevice) {
	if !slices.ContainsFunc(*devices, func(d OpenDevice) bool { return d.Number == device.Number }) {
		*devices = append(*devices, device)
	}
}

// farFileSystems may have to ask a server what a file is, which may never
// answer. No device lies there that anybody could open.
var farFileSystems = []string{
	"nfs", "cifs", "smb", "fuse", "ceph", "lustre", "gpfs", "beegfs", "9p", "virtiofs", "afs", "glusterfs", "autofs", "coda", "orangefs", "pvfs",
}

// near reports a descriptor whose file the kernel knows without asking anybody.
func (l *deviceList) near(within, descriptor string) bool {
	data, err := l.handle.readFile(within+"fdinfo/"+descriptor, maxFDInfoBytes)
	if err != nil {
		return false
	}
	id := ""
	for line := range bytes.Lines(data) {
		if rest, ok := bytes.CutPrefix(line, []byte("mnt_id:")); ok {
			id = string(bytes.TrimSpace(rest))
			break
		}
	}
	if l.mounts == nil {
		l.mounts = map[string]string{}
		// A first thread that has ended has no mounts.
		mountinfo, err := l.handle.readFile(within+"mountinfo", maxMountInfoBytes)
		if err != nil {
			return false
		}
		for line := range bytes.Lines(mountinfo) {
			if mount, ok := parseMount(string(line)); ok {
				l.mounts[mount.id] = mount.fileSystem
			}
		}
	}
	fileSystem, known := l.mounts[id]
	return known && !slices.ContainsFunc(farFileSystems, func(far string) bool { return strings.HasPrefix(fileSystem, far) })
}

type mount struct{ id, target, fileSystem, options string }

// parseMount reads a line of /proc/PID/mountinfo.
func parseMount(line string) (mount, bool) {
	before, after, ok := strings.Cut(line, " - ")
	fields, rest := strings.Fields(before), strings.Fields(after)
	if !ok || len(fields) < 5 || len(rest) < 1 {
		return mount{}, false
	}
	m := mount{id: fields[0], target: fields[4], fileSystem: rest[0]}
	if len(rest) >= 3 {
		m.options = rest[2]
	}
	return m, true
}

// deviceAt says which character device a link of a process's directory leads
// to. Nothing but the kind of file is asked for, so no server is.
func deviceAt(directory int, link string) (DeviceNumber, bool, error) {
	var stat unix.Statx_t
	if err := unix.Statx(directory, link, unix.AT_STATX_DONT_SYNC|unix.AT_NO_AUTOMOUNT, 0, &stat); err != nil {
		return DeviceNumber{}, false, err
	}
	return DeviceNumber{Major: stat.Rdev_major, Minor: stat.Rdev_minor}, stat.Mode&unix.S_IFMT == unix.S_IFCHR, nil
}

// numbersIn lists the entries of a directory that are numbers, at most limit.
func numbersIn(open func() (int, error), name string, limit int) ([]uint32, error) {
	fd, err := open()
	if err != nil {
		return nil, err
	}
	directory := os.NewFile(uintptr(fd), name)
	defer directory.Close()
	var numbers []uint32
	for len(numbers) < limit {
		names, err := directory.Readdirnames(1024)
		for _, name := range names {
			if number, err := strconv.ParseUint(name, 10, 32); err == nil {
				numbers = append(numbers, uint32(number))
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return numbers, err
		}
	}
	return numbers[:min(len(numbers), limit)], nil
}

// readWhole reads a file that belongs to no process, at most limit bytes.
func readWhole(name string, limit int64) ([]byte, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return io.ReadAll(io.LimitReader(file, limit))
}
