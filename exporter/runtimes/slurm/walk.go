package slurm

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/procfs"
)

// Bounds on what is read of the cgroups.
const (
	maxJobs      = 1024
	maxProcesses = 256 // of one job
	maxEntries   = 4096
	maxDepth     = 4 // of directories below a job
	maxSlices    = 2 // of slices above slurmstepd's scope
)

// found is a job that has a cgroup on this node.
type found struct {
	key string // as cgroup.Level.ID: the number, or sluid:…
	uid int64  // -1 if the path does not tell
	// node is what Slurm calls this node; empty if the path does not tell.
	node        string
	directories []string
	level       cgroup.Level
}

// walk finds the jobs that have a cgroup below root: on v1
// /slurm[_NODE]/uid_U/job_N in any of the hierarchies that Slurm can use, on v2
// in [NODE_]slurmstepd.scope, in whatever slice that is.
func walk(root string) []*found {
	jobs := map[string]*found{}
	for _, hierarchy := range []string{"freezer", "memory", "devices", "cpuset"} {
		base := filepath.Join(root, hierarchy)
		for _, top := range entries(base) {
			if top != "slurm" && !strings.HasPrefix(top, "slurm_") {
				continue
			}
			for _, user := range entries(filepath.Join(base, top)) {
				if strings.HasPrefix(user, "uid_") {
					add(jobs, base, filepath.Join(top, user), strings.TrimPrefix(top, "slurm_"))
				}
			}
		}
	}
	for _, base := range []string{root, filepath.Join(root, "unified")} {
		scopes(base, "", 0, func(scope string) {
			node, _ := strings.CutSuffix(filepath.Base(scope), "slurmstepd.scope")
			add(jobs, base, scope, strings.TrimSuffix(node, "_"))
		})
	}
	all := make([]*found, 0, len(jobs))
	for _, job := range jobs {
		all = append(all, job)
	}
	slices.SortFunc(all, func(a, b *found) int { return strings.Compare(a.key, b.key) })
	return all
}

// scopes finds slurmstepd's scopes below the slices of base.
func scopes(base, at string, depth int, each func(scope string)) {
	for _, name := range entries(filepath.Join(base, at)) {
		switch {
		case name == "slurmstepd.scope", strings.HasSuffix(name, "_slurmstepd.scope"):
			each(filepath.Join(at, name))
		// Below a user's slice anyone can make such names.
		case strings.HasSuffix(name, ".slice") && depth < maxSlices && (depth > 0 || name != "user.slice"):
			scopes(base, filepath.Join(at, name), depth+1, each)
		}
	}
}

// add adds the jobs that are in one directory.
func add(jobs map[string]*found, base, directory, node string) {
	for _, name := range entries(filepath.Join(base, directory)) {
		chain := cgroup.Parse("0::/" + filepath.Join(directory, name))
		if len(chain.Levels) != 1 || chain.Levels[0].Kind != cgroup.LevelJob || chain.Levels[0].System != "slurm" || chain.Delegated {
			continue
		}
		key := chain.Levels[0].ID
		job := jobs[key]
		if job == nil {
			if len(jobs) >= maxJobs {
				return
			}
			job = &found{key: key, uid: -1, level: chain.Levels[0]}
			jobs[key] = job
		}
		if chain.HasUID {
			job.uid = int64(chain.UID)
		}
		if node != "slurm" && node != "" {
			job.node = node
		}
		job.directories = append(job.directories, filepath.Join(base, directory, name))
	}
}

// entries are the directories in a directory, bounded.
func entries(directory string) []string {
	file, err := os.Open(directory)
	if err != nil {
		return nil // gone, or not there on this kind of node
	}
	defer file.Close()
	list, err := file.ReadDir(maxEntries)
	if err != nil {
		return nil
	}
	var names []string
	for _, entry := range list {
		if entry.IsDir() {
			names = append(names, entry.Name())
		}
	}
	return names
}

// member is one process of a job.
type member struct {
	procfs.Process
	arguments []string // of slurmstepd only
}

// stepd is the program that looks after a step, as root.
const stepd = "slurmstepd"

// members reads the processes of a job.
func (job *found) members(proc *procfs.FS) []member {
	pids := map[uint32]bool{}
	var collect func(directory string, depth int)
	collect = func(directory string, depth int) {
		text, err := os.ReadFile(filepath.Join(directory, "cgroup.procs"))
		if err != nil {
			return
		}
		for _, field := range strings.Fields(string(text)) {
			if pid, err := strconv.ParseUint(field, 10, 32); err == nil && len(pids) < maxProcesses {
				pids[uint32(pid)] = true
			}
		}
		if depth < maxDepth {
			for _, name := range entries(directory) {
				collect(filepath.Join(directory, name), depth+1)
			}
		}
	}
	for _, directory := range job.directories {
		collect(directory, 0)
	}
	var all []member
	for pid := range pids {
		handle, err := proc.Process(pid)
		if err != nil {
			continue // it has ended
		}
		var m member
		if m.Process, err = handle.Read(); err == nil && !m.Exiting() {
			if m.Command == stepd && m.RealUID == 0 {
				m.arguments, _ = handle.CommandLine() // without it the number is not told
			}
			all = append(all, m)
		}
		handle.Close()
	}
	slices.SortFunc(all, func(a, b member) int { return int(a.PID) - int(b.PID) })
	return all
}

// number is a job's number: of a key that is a SLUID, what slurmstepd says in its
// title, "slurmstepd: [3385.0]".
func (job *found) number(members []member) string {
	if !strings.HasPrefix(job.key, "sluid:") {
		return job.key
	}
	for _, m := range members {
		if len(m.arguments) == 0 {
			continue
		}
		_, title, found := strings.Cut(strings.Join(m.arguments, " "), stepd+": [")
		number, _, dot := strings.Cut(title, ".")
		if _, err := strconv.ParseUint(number, 10, 32); found && dot && err == nil {
			return number
		}
	}
	return ""
}
