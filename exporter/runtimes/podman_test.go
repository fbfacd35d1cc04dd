package runtimes

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes/podmantest"
)

func hostProc(t *testing.T) *procfs.FS {
	t.Helper()
	proc, err := procfs.Open("/proc")
	if err != nil {
		t.Skip(err)
	}
	return proc
}

// cardFile is a device file with the numbers of /dev/nvidiaN.
func cardFile(t *testing.T, minor uint32) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "card")
	if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(nvidiaMajor, minor))); err != nil {
		t.Skipf("needs to make device files: %v", err)
	}
	return path
}

func TestRealPodman(t *testing.T) {
	engine := podmantest.New(t)
	engine.Import(t, "localhost/ofalice:1", "LABEL owner=alice", "USER 4711")
	data := t.TempDir()
	train := engine.Run(t, "--name", "train", "--label", "owner=bob", "--volume", data+":/data", "--device", cardFile(t, 3)+":/dev/nvidia0",
		"localhost/ofalice:1", "sleep", "1000")
	plain := engine.Run(t, "--name", "plain", "--user", "1234", podmantest.Image, "sleep", "1000")
	files := NewPodmanFiles(engine.RunRoot, engine.GraphRoot, hostProc(t))

	client := NewPodmanClient(engine.Socket)
	if _, err := client.Container(t.Context(), train.ID); !errors.Is(err, ErrNoEngine) {
		t.Errorf("without a service: %v", err)
	}
	engine.StartService(t)
	for name, source := range map[string]Files{"service": client, "disk": files} {
		c, err := source.Container(t.Context(), train.ID)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if c.Runtime != "podman" || c.Name != "train" || c.PID != train.PID || c.Image != "localhost/ofalice:1" || !c.ImageKnown ||
			c.ImageLabels["owner"] != "alice" || c.ImageUser != "4711" || !slices.Contains(c.Binds, data) || c.StartedAt.IsZero() {
			t.Errorf("%s: %+v", name, c)
		}
		if name == "service" && c.Labels["owner"] != "bob" {
			t.Errorf("labels %v", c.Labels)
		}
		if name == "disk" && !slices.Equal(c.Devices, []Device{ByMinor(3)}) {
			t.Errorf("devices %+v", c.Devices)
		}
		if c, err = source.Container(t.Context(), plain.ID); err != nil || c.Name != "plain" || len(c.Devices) != 0 {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
		if _, err := source.Container(t.Context(), someID); !errors.Is(err, ErrNoSuchContainer) {
			t.Errorf("%s of an unknown id: %v", name, err)
		}
	}
	own := NewPodmanFiles(engine.RunRoot, "", hostProc(t))
	if c, err := own.Container(t.Context(), train.ID); err != nil || c.Name != "train" || c.PID != train.PID {
		t.Errorf("without the storage: %+v, %v", c, err)
	}

	d := NewDirectory(WithFiles(client, files), nil)
	run(t, d)
	eventually(t, "the name is found", func() bool { c, s := d.Lookup(train.ID); return s == StatusFound && c.Labels["owner"] == "bob" })
	engine.KillService(t)
	later := engine.Run(t, "--name", "later", podmantest.Image, "sleep", "1000")
	eventually(t, "the disk tells of one that began without a service", func() bool { c, _ := d.Lookup(later.ID); return c.Name == "later" })
	if c, s := d.Lookup(train.ID); s != StatusFound || c.Labels["owner"] != "bob" {
		t.Errorf("what the service had told is lost: %+v", c)
	}
	engine.StartService(t)
	eventually(t, "the service's word replaces the disk's", func() bool { c, s := d.Lookup(later.ID); return s == StatusFound && c.Labels != nil })

	engine.Podman(t, "stop", "--time", "0", "plain")
	if ids, err := files.List(t.Context()); err != nil || !slices.Contains(ids, train.ID) {
		t.Errorf("listed %v, %v", ids, err)
	}
}

func TestAssignedOnDisk(t *testing.T) {
	engine := podmantest.New(t)
	proc := hostProc(t)
	card := cardFile(t, 0)
	given := engine.Run(t, "--name", "given", "--device", card+":/dev/nvidia0", podmantest.Image, "sleep", "1000")
	engine.Run(t, "--name", "plain", podmantest.Image, "sleep", "1000")
	a := NewAssigned(NewPodmanFiles(engine.RunRoot, engine.GraphRoot, proc), runsIn(proc), nil)
	if err := a.list(t.Context()); err != nil {
		t.Fatal(err)
	}
	grants := a.Grants()
	if len(grants) != 1 || grants[0].Levels[0].ID != given.ID || grants[0].PID != given.PID || grants[0].Exclusive || grants[0].UID != -1 ||
		!slices.Equal(grants[0].Devices, []Device{ByMinor(0)}) || grants[0].Since.IsZero() {
		t.Errorf("grants %+v", grants)
	}
	engine.Podman(t, "rm", "--force", "--time", "0", "given")
	if err := a.list(t.Context()); err != nil {
		t.Fatal(err)
	}
	if grants := a.Grants(); len(grants) != 0 {
		t.Errorf("after its end: %+v", grants)
	}
}

func runsIn(proc *procfs.FS) func(uint32, string) bool {
	return func(pid uint32, id string) bool {
		process, err := proc.Process(pid)
		if err != nil {
			return false
		}
		defer process.Close()
		text, err := process.Cgroup()
		return err == nil && strings.Contains(text, id)
	}
}

// TestUserFilesLeadNowhere has a person put links where root reads.
func TestUserFilesLeadNowhere(t *testing.T) {
	dir := t.TempDir()
	userdata := filepath.Join(dir, "overlay-containers", someID, "userdata")
	if err := os.MkdirAll(userdata, 0o755); err != nil {
		t.Fatal(err)
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("123"), 0o600); err != nil {
		t.Fatal(err)
	}
	files := NewPodmanFiles(dir, "", nil)
	for name, prepare := range map[string]func(path string) error{
		"link": func(path string) error { return os.Symlink(secret, path) },
		"pipe": func(path string) error { return unix.Mkfifo(path, 0o600) },
		"long": func(path string) error { return os.WriteFile(path, make([]byte, 1<<20), 0o600) },
	} {
		path := filepath.Join(userdata, "pidfile")
		if err := prepare(path); err != nil {
			t.Fatal(err)
		}
		if c, err := files.Container(context.Background(), someID); err == nil {
			t.Errorf("%s: took %+v", name, c)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
