package resources

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/lab/labtest"
)

// service is a cgroup of the test's own, made in some hierarchies.
type service struct {
	t    *testing.T
	name string
	dirs []string
}

// newService makes the cgroup of a systemd service in every hierarchy that
// wanted takes.
func newService(t *testing.T, wanted func(hierarchy) bool) *service {
	t.Helper()
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root, to make cgroups")
	}
	mounted, err := mountedHierarchies()
	if err != nil {
		t.Fatal(err)
	}
	s := &service{t: t, name: fmt.Sprintf("gpuledger-test-%d-%d.service", os.Getpid(), time.Now().UnixNano())}
	for _, h := range mounted {
		if h.root == "/" && wanted(h) {
			s.dirs = append(s.dirs, filepath.Join(h.mountPoint, "system.slice", s.name))
		}
	}
	if len(s.dirs) == 0 {
		labtest.Missing(t, "a mounted cgroup hierarchy of the kind")
	}
	s.make()
	return s
}

func (s *service) make() {
	s.t.Helper()
	for _, dir := range s.dirs {
		parent := filepath.Dir(dir)
		if err := os.Mkdir(parent, 0o755); err == nil {
			s.t.Cleanup(func() { _ = os.Remove(parent) }) // others may be in it by then
		}
		if err := os.Mkdir(dir, 0o755); err != nil {
			labtest.Missing(s.t, "cgroups that can be made: "+err.Error())
		}
		s.t.Cleanup(func() { s.remove(dir) })
	}
}

// remove takes a cgroup away once its last process is gone from it.
func (s *service) remove(dir string) {
	for deadline := time.Now().Add(10 * time.Second); ; {
		err := os.Remove(dir)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return
		}
		if time.Now().After(deadline) {
			s.t.Errorf("cgroup stays behind: %v", err)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// enter starts a worker in it.
func (s *service) enter() *worker {
	s.t.Helper()
	w := startWorker(s.t)
	for _, dir := range s.dirs {
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(int(w.pid))), 0); err != nil {
			s.t.Fatal(err)
		}
	}
	return w
}

// tells reports whether one of its directories has the file.
func (s *service) tells(names ...string) bool {
	return slices.ContainsFunc(s.dirs, func(dir string) bool {
		return slices.ContainsFunc(names, func(name string) bool {
			_, err := os.Stat(filepath.Join(dir, name))
			return err == nil
		})
	})
}

func (s *service) workload(user string) meter.Workload {
	return meter.Workload{User: user, Kind: meter.KindService, Name: s.name}
}

func everyHierarchy(h hierarchy) bool {
	return h.unified || slices.ContainsFunc(h.controllers, func(c string) bool {
		return slices.Contains([]string{"cpuacct", "memory", "blkio", "name"}, c)
	})
}

// TestOwnCgroup measures a service of which one process holds a GPU and
// another, no child of it, works too.
func TestOwnCgroup(t *testing.T) {
	s := newService(t, everyHierarchy)
	r, holds, helps := newRig(t), s.enter(), s.enter()
	own := s.workload("unattributed")
	holder := r.holder(holds.pid, own)
	if len(cgroup.Own(holder.Cgroup)) == 0 {
		t.Fatalf("the worker is in no cgroup of its own: %q", holder.Cgroup)
	}
	before := helps.do("burn 100")
	if first := r.measure(holder)[own]; !first.CPUUS.Known || first.CPUUS.Value != 0 {
		t.Errorf("at first sight: %+v", first)
	}
	helps.do("burn 300")
	used := helps.do("hold 48") - before
	second := r.measure(holder)[own]
	between(t, "CPU µs of the other process", second.CPUUS.Value, used-slackUS, used+slackUS)
	if s.tells("memory.usage_in_bytes", "memory.current") {
		between(t, "memory of the other process", second.ResidentBytes.Value, 48<<20, 160<<20)
	}
	if !second.ReadBytes.Known || !second.ResidentBytes.Known {
		t.Errorf("what the cgroup does not tell, its processes do: %+v", second)
	}

	// It ends, and is started again within 5 s.
	holds.end()
	helps.end()
	for _, dir := range s.dirs {
		s.remove(dir)
	}
	s.make()
	again := s.enter()
	before = again.do("burn 200") // and what it used before it was in the cgroup
	third := r.measure(r.holder(again.pid, own))[own]
	between(t, "CPU µs of the cgroup made anew", third.CPUUS.Value-second.CPUUS.Value, 200_000-slackUS, before+slackUS)
	used = again.do("burn 100") - before
	fourth := r.measure(r.holder(again.pid, own))[own]
	between(t, "CPU µs after that", fourth.CPUUS.Value-third.CPUUS.Value, used-slackUS, used+slackUS)
}

// TestUnifiedAlone: where only the unified hierarchy has the cgroup, it tells
// the CPU time whatever controllers it has.
func TestUnifiedAlone(t *testing.T) {
	s := newService(t, func(h hierarchy) bool { return h.unified })
	r, holds, helps := newRig(t), s.enter(), s.enter()
	own := s.workload("alice")
	holder := r.holder(holds.pid, own)
	before := helps.do("burn 1") + holds.do("burn 1")
	r.measure(holder)
	used := helps.do("burn 200") + holds.do("hold 32") - before
	found := r.measure(holder)[own]
	between(t, "CPU µs", found.CPUUS.Value, used-slackUS, used+slackUS)
	between(t, "resident memory", found.ResidentBytes.Value, 32<<20, 160<<20)
}

// TestSharedCgroup: what several users run in one unit is measured by their
// processes.
func TestSharedCgroup(t *testing.T) {
	s := newService(t, everyHierarchy)
	r, a, b := newRig(t), s.enter(), s.enter()
	alice, bob := s.workload("alice"), s.workload("bob")
	holders := []Holder{r.holder(a.pid, alice), r.holder(b.pid, bob)}
	before := b.do("burn 1")
	r.measure(holders...)
	used := b.do("burn 300") - before
	found := r.measure(holders...)
	between(t, "CPU µs of who did nothing", found[alice].CPUUS.Value, 0, slackUS)
	between(t, "CPU µs of who worked", found[bob].CPUUS.Value, used-slackUS, used+slackUS)
}

// files makes a cgroup's directory out of what real ones were seen to hold.
func files(t *testing.T, content map[string]string) *control {
	t.Helper()
	dir := t.TempDir()
	for name, text := range content {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c, err := openControl(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestControlFiles(t *testing.T) {
	stacked := func(device string) bool { return device == "253:0" }
	unified := map[string]string{
		"cpu.stat":    "usage_usec 81123456\nuser_usec 80000000\nsystem_usec 1123456\n",
		"memory.stat": "anon 1048576\nfile 999999999\nkernel 4096\nshmem 2097152\nanon_thp 0\n",
		"io.stat":     "259:0 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0\n253:0 rbytes=1459200 wbytes=314773504 rios=1 wios=1\n8:16 \n7:1 rbytes=1000 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n",
	}
	type told struct {
		CPU, Read, Written gpu.Optional[int64]
		Resident           gpu.Optional[uint64]
	}
	tell := func(s sample) told {
		return told{s.counted[cpuUS], s.counted[readBytes], s.counted[writtenBytes], s.resident}
	}
	for name, test := range map[string]struct{ got, want told }{
		"v2": {
			tell(files(t, unified).unifiedSample(stacked)),
			told{gpu.Some(int64(81123456)), gpu.Some(int64(1460200)), gpu.Some(int64(314773504)), gpu.Some(uint64(3 << 20))},
		},
		"v2, nothing read yet": {
			tell(files(t, map[string]string{"io.stat": ""}).unifiedSample(stacked)),
			told{Read: gpu.Some(int64(0)), Written: gpu.Some(int64(0))},
		},
		"v2 without controllers": {tell(files(t, nil).unifiedSample(stacked)), told{}},
		"v2, garbage":            {tell(files(t, map[string]string{"cpu.stat": "usage_usec many\n", "memory.stat": "\n\n"}).unifiedSample(stacked)), told{}},
		"v1, processor time": {
			tell(files(t, map[string]string{"cpuacct.usage": "81123456789\n"}).versionOneSample("cpu,cpuacct", stacked)),
			told{CPU: gpu.Some(int64(81123456))},
		},
		"v1, memory": {
			tell(files(t, map[string]string{"memory.stat": "cache 77\nrss 5\nshmem 6\nhierarchical_memory_limit 9223372036854771712\ntotal_cache 1000\ntotal_rss 4096\ntotal_shmem 8192\n"}).versionOneSample("memory", stacked)),
			told{Resident: gpu.Some(uint64(12288))},
		},
		"v1, storage": {
			tell(files(t, map[string]string{"blkio.throttle.io_service_bytes_recursive": "8:0 Read 4096\n8:0 Write 512\n8:0 Sync 4608\n8:0 Async 0\n8:0 Total 4608\n253:0 Read 4096\n253:0 Write 512\n8:16 Read 1\n8:16 Write 2\nTotal 9219\n"}).versionOneSample("blkio", stacked)),
			told{Read: gpu.Some(int64(4097)), Written: gpu.Some(int64(514))},
		},
		"v1, storage not counted": {tell(files(t, map[string]string{"blkio.throttle.io_service_bytes_recursive": "Total 0\n"}).versionOneSample("blkio", stacked)), told{}},
	} {
		if diff := cmp.Diff(test.want, test.got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestDirectory(t *testing.T) {
	mounted := []hierarchy{
		{unified: true, root: "/", mountPoint: "/sys/fs/cgroup/unified"},
		{controllers: []string{"rw", "cpuacct", "cpu"}, root: "/", mountPoint: "/sys/fs/cgroup/cpu,cpuacct"},
		{controllers: []string{"rw", "memory"}, root: "/docker/ab", mountPoint: "/sys/fs/cgroup/memory"},
	}
	for place, want := range map[cgroup.Place]string{
		{Path: "/system.slice/x.service"}:                 "/sys/fs/cgroup/unified/system.slice/x.service",
		{Controllers: "cpu,cpuacct", Path: "/docker/cd"}:  "/sys/fs/cgroup/cpu,cpuacct/docker/cd",
		{Controllers: "memory", Path: "/docker/ab"}:       "/sys/fs/cgroup/memory",
		{Controllers: "memory", Path: "/docker/ab/c"}:     "/sys/fs/cgroup/memory/c",
		{Controllers: "memory", Path: "/docker/abc"}:      "",
		{Controllers: "memory", Path: "/docker/cd"}:       "",
		{Controllers: "blkio", Path: "/docker/cd"}:        "",
		{Controllers: "name=systemd", Path: "/docker/cd"}: "",
	} {
		if got := directory(mounted, place); got != want {
			t.Errorf("%+v is at %q, want %q", place, got, want)
		}
	}
}

func TestStackedDevices(t *testing.T) {
	sysfs := t.TempDir()
	for _, path := range []string{"dev/block/253:0/slaves/nvme0n1p2", "dev/block/259:0/slaves"} {
		if err := os.MkdirAll(filepath.Join(sysfs, path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	devices := stackedDevices{sysfs: sysfs, known: map[string]bool{}}
	var found []string
	for _, device := range []string{"253:0", "253:0", "259:0", "8:0", "../253:0"} {
		found = append(found, fmt.Sprint(devices.has(device)))
	}
	if got := strings.Join(found, " "); got != "true true false false false" {
		t.Error(got)
	}
}
