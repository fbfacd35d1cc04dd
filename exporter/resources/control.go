package resources

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	promfs "github.com/prometheus/procfs"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
)

// maxControlBytes bounds what is read of one of a cgroup's files.
const maxControlBytes = 1 << 20

// mountsLife is how long the list of mounted hierarchies stands: where many
// containers run it is long.
const mountsLife = 5 * time.Minute

// hierarchy is one mounted cgroup hierarchy.
type hierarchy struct {
	controllers []string // empty for the unified one
	unified     bool
	root        string // of the mount, within the hierarchy
	mountPoint  string
}

// mountedHierarchies are those that we can see. Of several mounts of one the
// first that shows all of it is taken.
func mountedHierarchies() ([]hierarchy, error) {
	mounts, err := promfs.GetMounts()
	if err != nil {
		return nil, err
	}
	var found []hierarchy
	for _, mount := range mounts {
		h := hierarchy{unified: mount.FSType == "cgroup2", root: mount.Root, mountPoint: mount.MountPoint}
		if mount.FSType == "cgroup" {
			for option := range mount.SuperOptions {
				h.controllers = append(h.controllers, option)
			}
		} else if !h.unified {
			continue
		}
		found = append(found, h)
	}
	slices.SortStableFunc(found, func(a, b hierarchy) int { return len(a.root) - len(b.root) })
	return found, nil
}

// directory is where a place can be read; "" if it can't be seen from here.
func directory(mounted []hierarchy, place cgroup.Place) string {
	for _, h := range mounted {
		if h.unified != (place.Controllers == "") {
			continue
		}
		if !h.unified && !has(h.controllers, place.Controllers) {
			continue
		}
		below, ok := place.Path, true
		if h.root != "/" {
			below, ok = strings.CutPrefix(place.Path, h.root)
		}
		if ok && (below == "" || below[0] == '/') {
			return filepath.Join(h.mountPoint, below)
		}
	}
	return ""
}

// has reports a v1 hierarchy that has the first of the controllers named.
func has(controllers []string, named string) bool {
	first, _, _ := strings.Cut(named, ",")
	return slices.Contains(controllers, first)
}

// control is a cgroup's directory, held so that all that is read is of one
// cgroup.
type control struct {
	*os.Root
	source
}

func openControl(path string) (*control, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, err
	}
	info, err := root.Stat(".")
	if err != nil {
		root.Close()
		return nil, err
	}
	c := &control{Root: root}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		c.device, c.id = uint64(stat.Dev), stat.Ino
	}
	return c, nil
}

// read returns a file's content, nil if it can't be had: the controller is not
// in use there.
func (c *control) read(name string) []byte {
	file, err := c.Open(name)
	if err != nil {
		return nil
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxControlBytes))
	if err != nil {
		return nil
	}
	return content
}

// unifiedSample reads a cgroup of the unified hierarchy.
func (c *control) unifiedSample(stacked func(device string) bool) sample {
	s := sample{source: c.source}
	if content := c.read("cpu.stat"); content != nil {
		s.counted[cpuUS] = keyed(content, "usage_usec")
	}
	if content := c.read("memory.stat"); content != nil {
		s.resident = unreclaimable(content, "anon", "shmem")
	}
	// A file without a line says that nothing was read or written.
	if file := c.read("io.stat"); file != nil {
		read, written := int64(0), int64(0)
		for line := range strings.Lines(string(file)) {
			fields := strings.Fields(line)
			if len(fields) == 0 || stacked(fields[0]) {
				continue
			}
			for _, field := range fields[1:] {
				name, text, _ := strings.Cut(field, "=")
				value, err := strconv.ParseInt(text, 10, 64)
				switch {
				case err != nil:
				case name == "rbytes":
					read += value
				case name == "wbytes":
					written += value
				}
			}
		}
		s.counted[readBytes], s.counted[writtenBytes] = gpu.Some(read), gpu.Some(written)
	}
	return s
}

// versionOneSample reads a cgroup of one of cgroup v1's hierarchies.
func (c *control) versionOneSample(controllers string, stacked func(device string) bool) sample {
	s := sample{source: c.source}
	for controller := range strings.SplitSeq(controllers, ",") {
		switch controller {
		case "cpuacct":
			content := bytes.TrimSpace(c.read("cpuacct.usage"))
			if ns, err := strconv.ParseInt(string(content), 10, 64); err == nil {
				s.counted[cpuUS] = gpu.Some(ns / 1000)
			}
		case "memory":
			s.resident = unreclaimable(c.read("memory.stat"), "total_rss", "total_shmem")
		case "blkio":
			c.blockIO(&s, stacked)
		}
	}
	return s
}

// blockIO reads what v1's block controller counted. Newer kernels count only
// where something is limited, and else have no line for any device, which is
// what one that has done nothing looks like, too: that is not known.
func (c *control) blockIO(s *sample, stacked func(device string) bool) {
	for line := range strings.Lines(string(c.read("blkio.throttle.io_service_bytes_recursive"))) {
		fields := strings.Fields(line)
		if len(fields) != 3 || stacked(fields[0]) {
			continue
		}
		value, err := strconv.ParseInt(fields[2], 10, 64)
		switch {
		case err != nil:
		case fields[1] == "Read":
			s.counted[readBytes] = gpu.Some(s.counted[readBytes].Value + value)
		case fields[1] == "Write":
			s.counted[writtenBytes] = gpu.Some(s.counted[writtenBytes].Value + value)
		}
	}
}

// keyed is the value of a key in a file of "key value" lines.
func keyed(content []byte, key string) gpu.Optional[int64] {
	for line := range bytes.Lines(content) {
		name, text, _ := bytes.Cut(line, []byte(" "))
		if string(name) == key {
			value, err := strconv.ParseInt(string(bytes.TrimSpace(text)), 10, 64)
			return gpu.Optional[int64]{Value: value, Known: err == nil}
		}
	}
	return gpu.Optional[int64]{}
}

// unreclaimable is memory that no file is behind. Kernels too old to count
// shared memory apart have it within the rest.
func unreclaimable(content []byte, anonymous, shared string) gpu.Optional[uint64] {
	own := keyed(content, anonymous)
	return gpu.Optional[uint64]{Value: uint64(own.Value + keyed(content, shared).Value), Known: own.Known}
}

// stackedDevices tells block devices that are made of others (LVM, RAID,
// encryption): what goes through them is counted at those again.
type stackedDevices struct {
	sysfs string
	known map[string]bool
}

func (s stackedDevices) has(device string) bool {
	stacked, known := s.known[device]
	if !known && !strings.Contains(device, "/") {
		below, err := os.ReadDir(filepath.Join(s.sysfs, "dev/block", device, "slaves"))
		stacked = err == nil && len(below) > 0
		if len(s.known) < 1<<12 {
			s.known[device] = stacked
		}
	}
	return stacked
}
