package server

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hierarchies are the cgroup file systems in which a process's place says who
// it is: the unified one and, beside it on hybrid hosts, systemd's own.
func hierarchies() []string {
	var found []string
	var st unix.Statfs_t
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"} {
		if err := unix.Statfs(root, &st); err != nil {
			continue
		}
		if st.Type == unix.CGROUP2_SUPER_MAGIC || st.Type == unix.CGROUP_SUPER_MAGIC {
			found = append(found, root)
		}
	}
	return found
}

// mark is the extended attribute of cgroups that a lab made, so that the next
// one can take away what a killed one left.
const mark = "trusted.gpu-lab"

func marked(dir string) bool {
	_, err := unix.Getxattr(dir, mark, nil)
	return err == nil
}

// cgroups puts processes into cgroups and takes away those it made.
type cgroups struct {
	roots []string
	made  []string
	log   *slog.Logger
}

// place moves a process to path in every hierarchy. Where that isn't allowed
// (a container, no root) the process stays where it is, and the log says so.
func (c *cgroups) place(pid int, path string) {
	for _, root := range c.roots {
		if err := c.placeIn(root, pid, path); err != nil {
			c.log.Warn("process stays in the cgroup it was started in", "pid", pid, "cgroup", path, "err", err)
		}
	}
}

func (c *cgroups) placeIn(root string, pid int, path string) error {
	dir := root
	for part := range strings.SplitSeq(path, "/") {
		dir = filepath.Join(dir, part)
		err := os.Mkdir(dir, 0o755)
		if err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
		if err == nil {
			// Without the mark only a killed lab would leave the folder behind.
			if err := unix.Setxattr(dir, mark, []byte("1"), 0); err != nil {
				c.log.Debug("cgroup can't be marked", "cgroup", dir, "err", err)
			}
		}
		if (err == nil || marked(dir)) && !slices.Contains(c.made, dir) {
			c.made = append(c.made, dir)
		}
	}
	procs := filepath.Join(dir, "cgroup.procs")
	if err := os.WriteFile(procs, []byte(strconv.Itoa(pid)), 0); err != nil {
		return fmt.Errorf("enter cgroup: %w", err)
	}
	return nil
}

// remove takes away the folders that place made, inner ones first. One that
// others moved into meanwhile stays.
func (c *cgroups) remove() {
	for _, dir := range slices.Backward(c.made) {
		err := os.Remove(dir)
		// Busy: another lab, or someone else, is in it.
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EBUSY) {
			c.log.Warn("cgroup stays behind", "cgroup", dir, "err", err)
		}
	}
	c.made = nil
}
