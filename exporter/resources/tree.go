package resources

import (
	"errors"
	"slices"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/procfs"
)

// rereadEvery is in how many rounds each process is looked at again: a number
// can come to mean another process, and one can get another parent.
const rereadEvery = 10

// tree knows which process is whose child. Only new processes are read each
// round, and a part of the others in turn.
type tree struct {
	round    uint32
	known    map[uint32]leaf
	children map[uint32][]uint32
}

type leaf struct {
	parent uint32
	start  uint64
}

// refresh reads who there is.
func (t *tree) refresh(fs *procfs.FS) error {
	pids, err := fs.PIDs()
	if err != nil {
		return err
	}
	t.round++
	now := make(map[uint32]leaf, len(pids))
	t.children = make(map[uint32][]uint32, len(pids))
	for _, pid := range pids {
		one, known := t.known[pid]
		if !known || (pid+t.round)%rereadEvery == 0 {
			stat, err := statOf(fs, pid)
			if err != nil {
				continue // gone, or hidden
			}
			one = leaf{parent: stat.ParentPID, start: stat.StartTicks}
		}
		now[pid] = one
		t.children[one.parent] = append(t.children[one.parent], pid)
	}
	t.known = now
	return nil
}

func statOf(fs *procfs.FS, pid uint32) (procfs.Stat, error) {
	handle, err := fs.Process(pid)
	if err != nil {
		return procfs.Stat{}, err
	}
	defer handle.Close()
	return handle.Stat()
}

// root is a process on a GPU whose own usage, and that of its descendants, is
// asked for.
type root struct {
	Holder
	// has says which values are known already, from the workload's cgroup.
	has     [amountsLength]bool
	hasSize bool
}

func (r *root) complete() bool { return r.hasSize && !slices.Contains(r.has[:], false) }

// sample reads the roots and their descendants. A descendant that is a root
// itself, and whatever is below it, is that one's.
func (t *tree) sample(fs *procfs.FS, roots map[uint32]*root) []sample {
	type place struct{ pid, parent uint32 }
	ticksUS := 1_000_000 / fs.ClockTicks()
	var samples []sample
	for _, r := range roots {
		if r.complete() {
			continue
		}
		queue := []place{{pid: r.PID}}
		for len(queue) > 0 {
			at := queue[len(queue)-1]
			queue = queue[:len(queue)-1]
			s, parent, err := readProcess(fs, at.pid, r, ticksUS)
			// What the number stands for by now may be another process.
			same := at.parent == parent
			if at.parent == 0 {
				same = s.begun == r.StartTicks
			}
			if err != nil || !same {
				continue
			}
			samples = append(samples, s)
			for _, child := range t.children[at.pid] {
				if roots[child] == nil {
					queue = append(queue, place{child, at.pid})
				}
			}
		}
	}
	return samples
}

// readProcess reads what is asked for of one process, and who its parent is.
func readProcess(fs *procfs.FS, pid uint32, r *root, ticksUS int64) (s sample, parent uint32, err error) {
	s.workload = r.Workload
	handle, err := fs.Process(pid)
	if err != nil {
		return s, 0, err
	}
	defer handle.Close()
	stat, err := handle.Stat()
	if err != nil {
		return s, 0, err
	}
	s.begun = stat.StartTicks
	s.source = source{pid: pid, id: stat.StartTicks}
	if !r.has[cpuUS] {
		s.counted[cpuUS] = gpu.Some(int64(stat.CPUTicks()) * ticksUS)
	}
	if !r.has[readBytes] || !r.has[writtenBytes] {
		if read, written, err := handle.IO(); err == nil {
			s.counted[readBytes] = gpu.Optional[int64]{Value: int64(read), Known: !r.has[readBytes]}
			s.counted[writtenBytes] = gpu.Optional[int64]{Value: int64(written), Known: !r.has[writtenBytes]}
		} else if errors.Is(err, procfs.ErrGone) {
			return s, 0, err
		}
	}
	if !r.hasSize {
		if resident, err := handle.ResidentBytes(); err == nil {
			s.resident = gpu.Some(resident)
		}
	}
	return s, stat.ParentPID, nil
}
