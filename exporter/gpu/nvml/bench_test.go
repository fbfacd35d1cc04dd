package nvml_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/gpu/child"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// BenchmarkPass measures what a pass costs at the two loads the exporter is
// made for, through the whole way: driver (the stand-in, which takes its own
// time), child, pipe, parent. It reports CPU time per pass of the child and of
// this process, which is the parent, and the memory both hold.
func BenchmarkPass(b *testing.B) {
	for _, load := range []struct{ cards, processes int }{{8, 25}, {8, 200}} {
		b.Run(fmt.Sprintf("%dx%d", load.cards, load.processes), func(b *testing.B) {
			s := lab.Scenario{Epoch: time.Now().Add(-time.Minute).Truncate(time.Second), GPUs: make([]lab.GPU, load.cards)}
			for card := range load.cards {
				for process := range load.processes {
					s.Processes = append(s.Processes, lab.Process{GPU: card, PID: uint32(1000 + card*load.processes + process), MemoryBytes: 1 << 28, SM: 1})
				}
			}
			self, err := os.Executable()
			if err != nil {
				b.Fatal(err)
			}
			b.Setenv(childVariable, "1")
			b.Setenv(libraryVariable, labtest.BuildLibrary(b))
			b.Setenv(intervalVariable, "20ms")
			b.Setenv("GPULAB_SCENARIO", labtest.Write(b, s))
			supervisor, err := child.NewSupervisor(child.Options{Command: []string{self}, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
			if err != nil {
				b.Fatal(err)
			}
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			passes := 0
			var own, childs time.Duration
			var pid int
			err = supervisor.Run(ctx, func(pass gpu.Pass) {
				if len(pass.Readings) != load.cards {
					return
				}
				if passes == 0 {
					pid = childOf(b)
					own, childs = cpuTime(b, os.Getpid()), cpuTime(b, pid)
				}
				if passes == b.N {
					count := float64(passes) * float64(time.Millisecond)
					b.ReportMetric(float64(cpuTime(b, os.Getpid())-own)/count, "parent-cpu-ms/pass")
					b.ReportMetric(float64(cpuTime(b, pid)-childs)/count, "child-cpu-ms/pass")
					b.ReportMetric(residentMiB(b, pid), "child-MiB")
					cancel()
				}
				passes++
			})
			if ctx.Err() == nil {
				b.Fatal(err)
			}
		})
	}
}

func childOf(b *testing.B) int {
	b.Helper()
	pids := childrenOf(b, os.Getpid())
	if len(pids) != 1 {
		b.Fatalf("children %v, want one", pids)
	}
	return pids[0]
}

// cpuTime is the time on a CPU of a process, from its clock (clock_getcpuclockid).
func cpuTime(b *testing.B, pid int) time.Duration {
	b.Helper()
	var spec unix.Timespec
	// The kernel's number for it: MAKE_PROCESS_CPUCLOCK(pid, CPUCLOCK_SCHED).
	if err := unix.ClockGettime(int32(^pid<<3|2), &spec); err != nil {
		b.Fatalf("CPU clock of %d: %v", pid, err)
	}
	return time.Duration(spec.Nano())
}

func residentMiB(b *testing.B, pid int) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		b.Fatal(err)
	}
	return float64(kib) / 1024
}
