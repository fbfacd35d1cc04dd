// Package explain says of one process how its owner is found: the evidence,
// what each step says of it, and the answer, as the exporter would find it.
package explain

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"gpuledger/exporter"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
)

const (
	// patience is how long names are waited for: a little longer than the
	// exporter itself waits.
	patience = 11 * time.Second
	poll     = 20 * time.Millisecond
)

// Process says how the owner of a process is found. It needs no exporter, and
// meters nothing. The error says that there is no such process or that it may
// not be looked at at all; what else may not be seen is in the report.
func Process(ctx context.Context, config exporter.Config, procFS string, pid uint32) (Report, error) {
	proc, err := procfs.Open(procFS)
	if err != nil {
		return Report{}, err
	}
	startTicks, err := startOf(proc, pid)
	if err != nil {
		return Report{}, fmt.Errorf("process %d: %w", pid, err)
	}
	options := exporter.HoldersOptions(config, proc, slog.New(slog.DiscardHandler))
	options.GatherAll = true
	table := holders.New(options)
	defer table.Close()
	running, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); table.Run(running) }()
	defer func() { stop(); <-done }()

	key := meter.ProcessKey{PID: pid, StartTicks: startTicks}
	table.Ask([]meter.ProcessKey{key})
	deadline := time.NewTimer(patience)
	defer deadline.Stop()
	tick := time.NewTicker(poll)
	defer tick.Stop()
	for waiting := true; waiting; {
		table.Refresh(ctx, gpu.Pass{})
		x, ok := table.Explain(key)
		if !ok {
			return Report{}, fmt.Errorf("process %d ended, or may not be read, while it was looked at", pid)
		}
		if !x.Attribution.Pending {
			break
		}
		select {
		case <-ctx.Done():
			return Report{}, ctx.Err()
		case <-deadline.C:
			waiting = false
		case <-tick.C:
		}
	}
	x, _ := table.Explain(key)
	r := report(x, options.Owner)
	r.BootID, r.PID, r.StartTicks = proc.BootID(), pid, startTicks
	r.Unseen = append(r.Unseen, unseen(x, options.Owner, table, proc)...)
	return r, nil
}

func startOf(proc *procfs.FS, pid uint32) (uint64, error) {
	handle, err := proc.Process(pid)
	if err != nil {
		return 0, err
	}
	defer handle.Close()
	stat, err := handle.Stat()
	return stat.StartTicks, err
}

// unseen names what could not be looked at.
func unseen(x holders.Explanation, config owner.Config, table *holders.Table, proc *procfs.FS) []string {
	var list []string
	e := x.Evidence
	asRoot := "; root may"
	if os.Geteuid() == 0 {
		asRoot = ""
	}
	if e.Executable == "" && !x.Zombie {
		list = append(list, "its program's file and who owns that may not be read"+asRoot)
	}
	if e.Environment == nil && len(config.EnvironmentKeys) > 0 && !x.Zombie {
		list = append(list, "its variables may not be read"+asRoot)
	}
	if !proc.InitialCgroupNamespace() {
		list = append(list, "cgroups are seen from a cgroup namespace of our own: containers may not be recognised; run on the host, or with --cgroupns=host")
	}
	if _, contained := x.Chain.Container(); contained && e.Container == nil {
		list = append(list, "no engine that is asked knows its container; see runtimes in the configuration")
	}
	states := table.Collectors()
	for _, name := range slices.Sorted(maps.Keys(states)) {
		if state := states[name]; !state.Up {
			list = append(list, name+": "+state.Error)
		}
	}
	if x.Attribution.Pending {
		list = append(list, "names are still being looked up; the answer is the best so far")
	}
	return list
}
