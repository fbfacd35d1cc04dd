package passthrough

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/procfs"
)

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

func realProc(t testing.TB) *procfs.FS {
	t.Helper()
	fs, err := procfs.Open("")
	if errors.Is(err, procfs.ErrNotInitialPIDNamespace) {
		missing(t, "the initial PID namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

// tree is a sysfs as far as it is read.
type tree struct {
	testing.TB
	root string
}

func newTree(t testing.TB) tree { return tree{t, t.TempDir()} }

func (s tree) write(name, content string) {
	s.Helper()
	path := filepath.Join(s.root, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content+"\n"), 0o644)); err != nil {
		s.Fatal(err)
	}
}

func (s tree) link(name, target string) {
	s.Helper()
	path := filepath.Join(s.root, name)
	_ = os.Remove(path) // it may be another one's already
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.Symlink(target, path)); err != nil {
		s.Fatal(err)
	}
}

// device is a PCI function; group 0 is none.
func (s tree) device(busID, vendor, class, device, driver string, group int) {
	s.Helper()
	at := "bus/pci/devices/" + busID + "/"
	s.write(at+"vendor", vendor)
	s.write(at+"class", class)
	s.write(at+"device", device)
	if driver != "" {
		s.link(at+"driver", "../../../bus/pci/drivers/"+driver)
	}
	if group > 0 {
		s.link(at+"iommu_group", fmt.Sprintf("../../../kernel/iommu_groups/%d", group))
	}
}

func (s tree) group(name string, number procfs.DeviceNumber) {
	s.write("class/vfio/"+name+"/dev", fmt.Sprintf("%d:%d", number.Major, number.Minor))
}

const (
	nvidia     = "0x10de"
	compute    = "0x030200"
	display    = "0x030000"
	unknownGPU = "0xfffe" // on no list of PCI devices
)

func TestScan(t *testing.T) {
	s := newTree(t)
	s.device("0000:81:00.0", nvidia, compute, "0x20b0", "vfio-pci", 42)
	s.device("0000:82:00.0", nvidia, display, "0x2204", "nvgrace-gpu-vfio-pci", 43)
	s.device("0000:83:00.0", nvidia, compute, "0x20b0", "nvidia", 44)
	s.device("0000:84:00.0", nvidia, "0x040300", "0x1aef", "vfio-pci", 42) // its sound
	s.device("0000:85:00.0", "0x1002", display, "0x73bf", "vfio-pci", 45)
	s.device("0000:86:00.0", nvidia, compute, "0x20b0", "", 0)
	s.device("0000:87:00.0", nvidia, compute, "0x20b0", "vfio-pci", 46)
	s.group("42", procfs.DeviceNumber{Major: 241, Minor: 0})
	s.group("noiommu-43", procfs.DeviceNumber{Major: 241, Minor: 1})
	s.write("bus/pci/devices/0000:87:00.0/vfio-dev/vfio3/dev", "240:3")
	got, err := scan(s.root)
	want := []card{
		{"0000:81:00.0", "20b0", []procfs.DeviceNumber{{Major: 241, Minor: 0}}},
		{"0000:82:00.0", "2204", []procfs.DeviceNumber{{Major: 241, Minor: 1}}},
		{"0000:87:00.0", "20b0", []procfs.DeviceNumber{{Major: 240, Minor: 3}}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(card{})); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if got, err := scan(t.TempDir()); got != nil || err != nil {
		t.Errorf("without PCI: %+v, %v", got, err)
	}
}

func TestName(t *testing.T) {
	list := filepath.Join(t.TempDir(), "pci.ids")
	content := "# list\n\n1002  AMD\n\t20b0  Not ours\n10de  NVIDIA Corporation\n\t20b0  GA100 [A100 SXM4 40GB]\n\t\t10de 144d  a board\n\t2335  GH100\x1b\n1102  Creative\n\t9999  Sound\n"
	if err := os.WriteFile(list, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"20b0": "NVIDIA A100 SXM4 40GB", "2335": "NVIDIA GH100\ufffd", "9999": unnamed, "144d": unnamed} {
		if got := nameOf(id, []string{"/nonexistent", list}); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
}

func TestMerge(t *testing.T) {
	now := time.Now()
	nvml := gpu.Card{UUID: "GPU-a", Name: "NVIDIA A100", PCIBusID: "00000000:81:00.0", Index: 0, Minor: gpu.Some[int64](0)}
	other := gpu.Card{UUID: "GPU-b", PCIBusID: "00000000:C1:00.0", Index: 1}
	at := gpu.Instant{MonotonicUS: 5, WallUS: 6}
	pass := func(state gpu.State) gpu.Pass {
		return gpu.Pass{At: at, Expected: 2, Hung: []string{"GPU-x"}, Readings: []gpu.Reading{{Card: nvml, State: state}, {Card: other}}}
	}
	ours := &seen{at: now, cards: []seenCard{{busID: "0000:81:00.0", name: "NVIDIA GA100", holders: []uint32{7, 8}}}}
	known := map[string]gpu.Card{}

	if got := merge(pass(gpu.StateGood), ours, known, now); len(got.Readings) != 2 || got.Expected != 2 ||
		slices.ContainsFunc(got.Readings, func(r gpu.Reading) bool { return r.Card.PassedThrough }) {
		t.Errorf("NVML reads it: %+v", got)
	}
	// It was taken away: NVML calls it lost, then does not list it.
	lost := merge(pass(gpu.StateDown), ours, known, now)
	away := gpu.Pass{At: at, Expected: 1, Hung: []string{"GPU-a"}, Readings: []gpu.Reading{{Card: other}}}
	gone := merge(away, ours, known, now)
	for name, got := range map[string]gpu.Pass{"lost": lost, "gone": gone} {
		want := gpu.Reading{
			Card: gpu.Card{UUID: "GPU-a", Name: "NVIDIA A100", PCIBusID: "00000000:81:00.0", PassedThrough: true}, At: at,
			Processes: []gpu.Process{{PID: 7, Compute: true}, {PID: 8, Compute: true}},
		}
		if diff := cmp.Diff(want, got.Readings[len(got.Readings)-1]); diff != "" || len(got.Readings) != 2 || got.Expected != 2 || slices.Contains(got.Hung, "GPU-a") {
			t.Errorf("%s: %+v\n%s", name, got, diff)
		}
	}
	if len(away.Readings) != 1 || len(away.Hung) != 1 {
		t.Error("the pass given was changed")
	}
	// Never seen by NVML, which may not even be there.
	fresh := merge(gpu.Pass{Error: "no driver"}, ours, map[string]gpu.Card{}, now)
	if r := fresh.Readings[0]; r.Card.UUID != "PCI-0000:81:00.0" || r.Card.Name != "NVIDIA GA100" || !r.Card.PassedThrough || fresh.Expected != 1 || fresh.Error == "" {
		t.Errorf("%+v", fresh)
	}
	for name, test := range map[string]struct {
		seen *seen
		at   time.Time
	}{
		"old":     {ours, now.Add(staleAfter + time.Second)},
		"unknown": {&seen{at: now, cards: []seenCard{{busID: "0000:81:00.0", unknown: "because"}}}, now},
	} {
		if r := merge(gpu.Pass{}, test.seen, map[string]gpu.Card{}, test.at).Readings[0]; r.State != gpu.StateFailed || r.Reason == "" || len(r.Processes) > 0 {
			t.Errorf("%s: %+v", name, r)
		}
	}
	if got := merge(pass(gpu.StateGood), nil, known, now); len(got.Readings) != 2 {
		t.Errorf("before the first look: %+v", got)
	}
}

// machine starts a process that has the device open, as a virtual machine
// monitor has its group's.
func machine(t testing.TB, number procfs.DeviceNumber) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root, to make a device node")
	}
	path := filepath.Join(t.TempDir(), "42")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(number.Major, number.Minor))); errors.Is(err, unix.EPERM) {
		missing(t, "CAP_MKNOD")
	} else if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0) // takes no driver
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	command := exec.Command("sleep", "1000")
	command.ExtraFiles = []*os.File{file}
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	return command
}

// TestHolderIsFollowed wants the process found that has the group open, and
// its end seen without waiting for the next look at everybody.
func TestHolderIsFollowed(t *testing.T) {
	group, spare := procfs.DeviceNumber{Major: 241, Minor: 901}, procfs.DeviceNumber{Major: 241, Minor: 902}
	s := newTree(t)
	s.device("0000:81:00.0", nvidia, compute, unknownGPU, "vfio-pci", 901)
	s.device("0000:82:00.0", nvidia, compute, unknownGPU, "vfio-pci", 902)
	s.device("0000:83:00.0", nvidia, compute, unknownGPU, "vfio-pci", 903) // its group's device is not to be seen
	s.group("901", group)
	s.group("902", spare)
	qemu := machine(t, group)
	w := &watcher{fs: realProc(t), sysfs: s.root, names: map[string]string{}}
	now, err := w.look(t.Context())
	if err != nil || len(now.cards) != 3 {
		t.Fatalf("%+v, %v", now, err)
	}
	if c := now.cards[0]; !slices.Equal(c.holders, []uint32{uint32(qemu.Process.Pid)}) || c.unknown != "" || c.name != unnamed {
		t.Errorf("its card: %+v", c)
	}
	if c := now.cards[1]; len(c.holders) != 0 || c.unknown != "" {
		t.Errorf("a card that nobody has: %+v", c)
	}
	if c := now.cards[2]; !strings.Contains(c.unknown, "no VFIO device") {
		t.Errorf("a card of which it can't be told: %+v", c)
	}
	walked := w.walkedAt
	if _, err := w.look(t.Context()); err != nil || w.walkedAt != walked {
		t.Errorf("everybody was looked at again: %v", err)
	}
	_ = qemu.Process.Kill()
	_ = qemu.Wait()
	now, err = w.look(t.Context())
	if err != nil || len(now.cards[0].holders) != 0 || w.walkedAt == walked {
		t.Errorf("after its end: %+v, %v", now, err)
	}
	if added := Add(t.Context(), w.fs, s.root, gpu.Pass{}); len(added.Readings) != 3 || added.Readings[0].State != gpu.StateGood || added.Readings[2].State != gpu.StateFailed {
		t.Errorf("asked once: %+v", added)
	}
}

func TestHiddenProcessesMakeItUnknown(t *testing.T) {
	w := &watcher{names: map[string]string{}, walked: true}
	c := card{busID: "0000:81:00.0", deviceID: "ffff", devices: []procfs.DeviceNumber{{Major: 241}}}
	if got := w.seenCard(c); got.unknown != "" {
		t.Errorf("%+v", got)
	}
	w.result.Hidden = 3
	if got := w.seenCard(c); !strings.Contains(got.unknown, "3 processes may not be looked into") {
		t.Errorf("%+v", got)
	}
	w.walked = false
	if got := w.seenCard(c); got.unknown == "" {
		t.Error("nobody has it before all were looked at")
	}
}

// once is a source of passes that waits for its end.
type once struct{ passes chan gpu.Pass }

func (o once) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	for {
		select {
		case pass := <-o.passes:
			deliver(pass)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func TestSourceAddsToPasses(t *testing.T) {
	s := newTree(t)
	s.device("0000:81:00.0", nvidia, compute, unknownGPU, "vfio-pci", 904)
	s.group("904", procfs.DeviceNumber{Major: 241, Minor: 904})
	inner := once{make(chan gpu.Pass)}
	source := New(Options{Source: inner, FS: realProc(t), SysFS: s.root})
	ctx, cancel := context.WithCancel(t.Context())
	delivered, ended := make(chan gpu.Pass), make(chan error)
	go func() { ended <- source.Run(ctx, func(pass gpu.Pass) { delivered <- pass }) }()
	for deadline := time.Now().Add(20 * time.Second); ; {
		inner.passes <- gpu.Pass{Expected: 1, Readings: []gpu.Reading{{Card: gpu.Card{UUID: "GPU-a", PCIBusID: "00000000:01:00.0"}}}}
		pass := <-delivered
		if len(pass.Readings) == 2 && pass.Readings[1].Card.UUID == "PCI-0000:81:00.0" && pass.Readings[1].Card.Index == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v", pass)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
