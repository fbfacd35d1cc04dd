package procfs

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// The test binary is also a process whose first thread ends before the others.
func init() {
	path := os.Getenv("PROCFS_TEST_HEADLESS")
	if path == "" {
		return
	}
	runtime.LockOSThread() // in init this is the first thread
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil || fd < 0 {
		os.Exit(3)
	}
	go func() {
		time.Sleep(time.Hour)
		os.Exit(0)
	}()
	_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // of this thread alone
}

// node makes a device node; opening it takes no driver as long as nothing is
// read or written through it.
func node(t *testing.T, number DeviceNumber) string {
	t.Helper()
	// Not named as the driver does: a container may call it anything.
	path := filepath.Join(t.TempDir(), "card")
	err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(number.Major, number.Minor)))
	if errors.Is(err, unix.EPERM) {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs CAP_MKNOD")
		}
		t.Skip("needs CAP_MKNOD")
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func openPath(t *testing.T, path string) *os.File {
	t.Helper()
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), path)
}

func handle(t *testing.T, pid int) *Handle {
	t.Helper()
	h, err := real(t).Process(uint32(pid))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	return h
}

func has(devices []OpenDevice, number DeviceNumber) bool {
	return slices.ContainsFunc(devices, func(d OpenDevice) bool { return d.Number == number })
}

func TestDeviceIsKnownByItsNumber(t *testing.T) {
	number := DeviceNumber{195, 7}
	path := node(t, number)
	file := openPath(t, path)
	command := exec.Command("sleep", "1000")
	command.ExtraFiles = []*os.File{file}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = command.Process.Kill(); _ = command.Wait() }()
	file.Close()
	devices, err := handle(t, command.Process.Pid).OpenDevices()
	if err != nil {
		t.Fatal(err)
	}
	at := slices.IndexFunc(devices, func(d OpenDevice) bool { return d.Number == number })
	if at < 0 || devices[at].Path != path || devices[at].Mapped {
		t.Errorf("%+v, want %s among them", devices, path)
	}
	if devices, err := handle(t, os.Getpid()).OpenDevices(); err != nil || has(devices, number) {
		t.Errorf("we closed it and have %+v, %v", devices, err)
	}
}

func TestThreadWithDescriptorsOfItsOwn(t *testing.T) {
	number := DeviceNumber{195, 8}
	path := node(t, number)
	opened, done := make(chan error), make(chan struct{})
	defer close(done)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with this
		if err := unix.Unshare(unix.CLONE_FILES); err != nil {
			opened <- err
			return
		}
		_, err := unix.Open(path, unix.O_PATH, 0)
		opened <- err
		<-done
	}()
	if err := <-opened; err != nil {
		t.Fatal(err)
	}
	devices, err := handle(t, os.Getpid()).OpenDevices()
	if err != nil || !has(devices, number) {
		t.Errorf("%+v, %v: the thread's device is not among them", devices, err)
	}
}

func TestThreadsThatOutliveTheFirst(t *testing.T) {
	number := DeviceNumber{195, 9}
	command := exec.Command("/proc/self/exe")
	command.Env = append(os.Environ(), "PROCFS_TEST_HEADLESS="+node(t, number))
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = command.Process.Kill(); _ = command.Wait() }()
	h := handle(t, command.Process.Pid)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		stat, err := h.Stat()
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%+v, %v", stat, err)
		}
		if stat.Zombie() {
			if stat.Threads < 2 {
				t.Fatalf("%d threads are left", stat.Threads)
			}
			break
		}
	}
	devices, err := h.OpenDevices()
	if err != nil || !has(devices, number) {
		t.Errorf("%+v, %v: the device of the threads left is not among them", devices, err)
	}
}

func TestMappingOutlivesTheDescriptor(t *testing.T) {
	zero := DeviceNumber{1, 5}
	file, err := os.OpenFile("/dev/zero", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE)
	file.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(mapped) }()
	h := handle(t, os.Getpid())
	if devices, err := h.OpenDevices(); err != nil || has(devices, zero) {
		t.Fatalf("open: %+v, %v", devices, err)
	}
	byName := func(name string) (DeviceNumber, bool) { return zero, name == "/dev/zero" } // without root
	devices, err := h.MappedDevices(byName)
	if err != nil || !slices.Contains(devices, OpenDevice{zero, "/dev/zero", true}) {
		t.Errorf("mapped: %+v, %v", devices, err)
	}
}

func TestMappingsThatAreNoDevice(t *testing.T) {
	maps := strings.Join([]string{
		"7f0000000000-7f0000001000 rw-s 00000000 00:05 712                        /dev/nvidia3",
		"7f0000001000-7f0000002000 rw-s 00001000 00:05 712                        /dev/nvidia3",
		"7f0000002000-7f0000003000 r-xp 00000000 fe:00 99                         /usr/lib/libcuda.so.1",
		"7f0000003000-7f0000004000 rw-p 00000000 00:00 0                          [heap]",
		"7f0000004000-7f0000005000 rw-p 00000000 00:00 0 ",
		"7f0000005000-7f0000006000 rw-s 00000000 fe:00 12                         /home/alice/nvidia0",
		"7f0000006000-7f0000007000 rw-s 00000000 fe:00 13                         /dev/shm/weights (deleted)",
		"7f0000007000-7f0000008000 rw-s 00000000 fe:00 14                         /srv/nvidia 9",
		"garbage", "",
	}, "\n")
	numbers := map[string]DeviceNumber{"7f0000000000-7f0000001000": {195, 3}, "7f0000001000-7f0000002000": {195, 3}}
	asked := 0
	got := mappedDevices([]byte(maps), func(addresses string) (DeviceNumber, bool, error) {
		asked++
		number, ok := numbers[addresses]
		return number, ok, nil
	}, nil)
	if diff := cmp.Diff([]OpenDevice{{DeviceNumber{195, 3}, "/dev/nvidia3", true}}, got); diff != "" {
		t.Error(diff)
	}
	if asked != 5 {
		t.Errorf("%d mappings were asked for their device, want 5", asked)
	}
	// Without the right to ask, the name decides.
	got = mappedDevices([]byte(maps), func(string) (DeviceNumber, bool, error) { return DeviceNumber{}, false, unix.EPERM },
		func(name string) (DeviceNumber, bool) { return DeviceNumber{195, 3}, name == "/dev/nvidia3" })
	if diff := cmp.Diff([]OpenDevice{{DeviceNumber{195, 3}, "/dev/nvidia3", true}}, got); diff != "" {
		t.Error(diff)
	}
}

func TestParseDevices(t *testing.T) {
	got := parseDevices([]byte("Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n507 nvidia-uvm\n\nBlock devices:\n195 md\n"))
	if diff := cmp.Diff(map[string]uint32{"mem": 1, "nvidia": 195, "nvidiactl": 195, "nvidia-uvm": 507}, got); diff != "" {
		t.Error(diff)
	}
}

func TestHidePIDIsSeen(t *testing.T) {
	const before = "22 27 0:21 / /proc rw,relatime - proc proc "
	for options, want := range map[string]bool{
		"rw": false, "rw,hidepid=0": false, "rw,hidepid=off": false, "rw,gid=4,hidepid=2": true, "rw,hidepid=invisible": true, "rw,hidepid=1": true,
	} {
		if got := hidesProcesses([]byte(before+options+"\n"), "/proc"); got != want {
			t.Errorf("%s: %v", options, got)
		}
	}
	if hidesProcesses([]byte(before+"rw,hidepid=2\n"+before+"rw\n"), "/proc") || hidesProcesses([]byte(before+"rw,hidepid=2\n"), "/host/proc") {
		t.Error("a mount that is covered, or another's, counts")
	}
}

func TestFarFilesAreNotAsked(t *testing.T) {
	directory := tree(t, map[string]string{
		"fdinfo/3": "pos:\t0\nflags:\t0100000\nmnt_id:\t41\nino:\t9\n", "fdinfo/4": "pos:\t0\nmnt_id:\t42\n", "fdinfo/5": "pos:\t0\nmnt_id:\t99\n", "fdinfo/6": "pos:\t0\n",
		"mountinfo": "41 1 0:50 / /home rw shared:1 - nfs4 server:/home rw,hard\n42 1 254:0 / / rw - ext4 /dev/vda rw\n",
	})
	fd, err := unix.Open(directory, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	h := &Handle{fs: &FS{}, directory: fd, pidfd: -1}
	defer h.Close()
	list := &deviceList{handle: h}
	for number, want := range map[string]bool{"3": false, "4": true, "5": false, "6": false, "7": false} {
		if got := list.near("", number); got != want {
			t.Errorf("descriptor %s is near: %v", number, got)
		}
	}
}

func TestPIDsListsOurselves(t *testing.T) {
	pids, err := real(t).PIDs()
	if err != nil || !slices.Contains(pids, uint32(os.Getpid())) || !slices.IsSorted(pids) {
		t.Errorf("%d PIDs, %v", len(pids), err)
	}
}

// TestStrangersFilesAreHidden wants an error and not an empty list where a
// process may not be looked into.
func TestStrangersFilesAreHidden(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	command := exec.Command("/proc/self/exe", "-test.run=^TestStrangerLooks$")
	command.Env = append(os.Environ(), "PROCFS_TEST_LOOK_AT="+strconv.Itoa(os.Getpid()))
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
	output, err := command.CombinedOutput()
	if err != nil || !strings.Contains(string(output), "hidden, as it should be") {
		t.Errorf("%v\n%s", err, output)
	}
}

func TestStrangerLooks(t *testing.T) {
	pid, err := strconv.Atoi(os.Getenv("PROCFS_TEST_LOOK_AT"))
	if err != nil {
		return // it runs in a process of its own
	}
	h := handle(t, pid)
	output := bufio.NewWriter(os.Stdout)
	defer output.Flush()
	if _, err := h.OpenDevices(); !errors.Is(err, ErrHidden) {
		t.Errorf("descriptors: %v", err)
	}
	if _, err := h.MappedDevices(nil); !errors.Is(err, ErrHidden) {
		t.Errorf("mappings: %v", err)
	}
	_, _ = output.WriteString("hidden, as it should be\n")
}
