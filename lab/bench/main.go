// Command bench measures what the exporter costs as a whole: the real binary,
// parent and child, over simulated cards with real processes on them. It
// prints figures beside their budgets; it fails only if it can't measure.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"gpuledger/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// load is a number of processes on eight cards, and what they may cost.
type load struct {
	name                  string
	perCard               int
	passBudgetMS          float64 // CPU of a pass, parent and child
	corePercentBudget     float64 // at a 1 s interval
	residentBudgetMiB     float64
	cards, users, firstID int
}

var loads = []load{
	{name: "usual", perCard: 25, passBudgetMS: 2, corePercentBudget: 1, residentBudgetMiB: 48, cards: 8, users: 40, firstID: 40001},
	{name: "heavy", perCard: 200, passBudgetMS: 8, corePercentBudget: 2, residentBudgetMiB: 80, cards: 8, users: 40, firstID: 40001},
}

// workload is whose process i is: each card is shared by its part of the users.
func (l load) workload(i int) int {
	perCard := l.users / l.cards
	return i%l.cards*perCard + i/l.cards%perCard
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(stderr)
	programs := flags.String("bin", "bin", "directory of gpu-exporter and lab/libnvidia-ml.so.1")
	warmUp := flags.Duration("warm-up", 10*time.Second, "time before the measurement")
	length := flags.Duration("length", 30*time.Second, "time of the measurement")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	fmt.Fprintf(stdout, "%-6s  %-34s %10s %10s\n", "load", "figure", "measured", "budget")
	for _, l := range loads {
		if err := l.measure(ctx, *programs, *warmUp, *length, stdout, stderr); err != nil {
			fmt.Fprintln(stderr, "bench:", err)
			return 1
		}
	}
	return 0
}

// cost is what one run of the exporter used.
type cost struct {
	coreSeconds float64 // CPU a second of wall time, parent and child
	rssMiB      float64 // pages shared by parent and child counted twice
	pssMiB      float64 // and once
}

func (l load) measure(ctx context.Context, programs string, warmUp, length time.Duration, stdout, stderr io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "gpuledger-bench")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	var processes []*exec.Cmd
	defer func() {
		for _, p := range processes {
			_ = p.Process.Kill() // it only sleeps
			_ = p.Wait()
		}
	}()
	scenario := lab.Scenario{Epoch: time.Now(), GPUs: make([]lab.GPU, l.cards)}
	for i := range l.cards * l.perCard {
		p := exec.Command("sleep", "3600")
		p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		if os.Geteuid() == 0 {
			id := uint32(l.firstID + l.workload(i))
			p.SysProcAttr.Credential = &syscall.Credential{Uid: id, Gid: id}
		}
		if err := p.Start(); err != nil {
			return fmt.Errorf("start process %d of %d: %w", i+1, l.cards*l.perCard, err)
		}
		processes = append(processes, p)
		scenario.Processes = append(scenario.Processes, lab.Process{
			GPU: i % l.cards, PID: uint32(p.Process.Pid), MemoryBytes: 256 << 20, SM: 100 / l.perCard,
		})
	}
	path := filepath.Join(dir, "scenario")
	if err := scenario.WriteFile(path); err != nil {
		return err
	}
	// What a pass costs is the difference that more passes make; the rest is
	// what the process costs by being there.
	normal, err := l.exporter(ctx, programs, dir, path, time.Second, warmUp, length, stdout, stderr)
	if err != nil {
		return err
	}
	const often = 5
	fast, err := l.exporter(ctx, programs, dir, path, time.Second/often, warmUp, length, nil, stderr)
	if err != nil {
		return err
	}
	show := func(figure string, measured, budget float64, unit string) {
		verdict := "ok"
		if measured > budget {
			verdict = "over"
		}
		fmt.Fprintf(stdout, "%-6s  %-34s %7.2f %-3s %6.0f %-3s %s\n", l.name, figure, measured, unit, budget, unit, verdict)
	}
	show("CPU a pass, parent and child", (fast.coreSeconds-normal.coreSeconds)/(often-1)*1000, l.passBudgetMS, "ms")
	show("core at a 1 s interval", normal.coreSeconds*100, l.corePercentBudget, "%")
	show("resident, shared pages once (PSS)", normal.pssMiB, l.residentBudgetMiB, "MiB")
	show("resident, sum of both (RSS)", normal.rssMiB, l.residentBudgetMiB, "MiB")
	return nil
}

// exporter runs the exporter for a while and says what it cost. Scrapes are
// timed at the end if stdout is not nil.
func (l load) exporter(ctx context.Context, programs, dir, scenario string, interval, warmUp, length time.Duration, stdout, stderr io.Writer) (used cost, err error) {
	socket := filepath.Join(dir, "exporter.sock")
	exporter := exec.CommandContext(ctx, filepath.Join(programs, "gpu-exporter"),
		"--nvml.library-path="+filepath.Join(programs, "lab", "libnvidia-ml.so.1"), "--socket="+socket, "--node.name=bench",
		"--state.dir="+filepath.Join(dir, "state"), "--state.lock="+filepath.Join(dir, "lock"), "--web.listen-address=127.0.0.1:0", "--log.level=warn", "--sample.interval="+interval.String())
	exporter.Env = append(os.Environ(), "GPULAB_SCENARIO="+scenario)
	exporter.Stdout, exporter.Stderr = stderr, stderr
	exporter.Cancel = func() error { return exporter.Process.Signal(syscall.SIGTERM) }
	exporter.WaitDelay = 10 * time.Second
	exporter.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := exporter.Start(); err != nil {
		return used, err
	}
	defer func() {
		_ = exporter.Process.Signal(syscall.SIGTERM)
		err = errors.Join(err, exporter.Wait())
	}()
	if err := wait(ctx, warmUp); err != nil {
		return used, err
	}
	child, err := childOf(exporter.Process.Pid)
	if err != nil {
		return used, err
	}
	pids := []int{exporter.Process.Pid, child}
	before, err := cpuTime(pids)
	if err != nil {
		return used, err
	}
	begun := time.Now()
	if err := wait(ctx, length); err != nil {
		return used, err
	}
	after, err := cpuTime(pids)
	if err != nil {
		return used, err
	}
	seconds := time.Since(begun).Seconds()
	used.coreSeconds = (after - before).Seconds() / seconds
	if used.rssMiB, err = memoryMiB(pids, "Rss:"); err != nil {
		return used, err
	}
	if used.pssMiB, err = memoryMiB(pids, "Pss:"); err != nil {
		return used, err
	}
	if stdout == nil {
		return used, nil
	}
	if err := scrape(ctx, socket, l.name, stdout); err != nil {
		return used, err
	}
	return used, l.look(ctx, programs, socket, scenario, stdout)
}

func wait(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

func childOf(parent int) (int, error) {
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", parent))
	if err != nil {
		return 0, err
	}
	for _, task := range tasks {
		text, _ := os.ReadFile(task) // a thread may end meanwhile
		if fields := strings.Fields(string(text)); len(fields) > 0 {
			return strconv.Atoi(fields[0])
		}
	}
	return 0, fmt.Errorf("gpu-exporter (PID %d) has no child: does it run?", parent)
}

// cpuTime is what the scheduler gave all threads of the processes.
func cpuTime(pids []int) (time.Duration, error) {
	total := time.Duration(0)
	for _, pid := range pids {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		if err != nil || len(tasks) == 0 {
			return 0, fmt.Errorf("no schedstat of PID %d", pid)
		}
		for _, task := range tasks {
			text, _ := os.ReadFile(task) // a thread may end meanwhile
			if fields := strings.Fields(string(text)); len(fields) > 0 {
				nanoseconds, err := strconv.ParseInt(fields[0], 10, 64)
				if err != nil {
					return 0, fmt.Errorf("%s: %w", task, err)
				}
				total += time.Duration(nanoseconds)
			}
		}
	}
	return total, nil
}

// memoryMiB adds up a figure of smaps_rollup.
func memoryMiB(pids []int, figure string) (float64, error) {
	total := 0.0
	for _, pid := range pids {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, err
		}
		for line := range strings.Lines(string(text)) {
			if value, ok := strings.CutPrefix(line, figure); ok {
				kib, err := strconv.ParseFloat(strings.Fields(value)[0], 64)
				if err != nil {
					return 0, err
				}
				total += kib / 1024
			}
		}
	}
	return total, nil
}

// scrape times first demands (each waits for a new snapshot) and shared ones.
func scrape(ctx context.Context, socket, name string, stdout io.Writer) error {
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DialContext: dialer(socket)}}
	var first, shared time.Duration
	bytes := int64(0)
	for range 5 {
		if err := wait(ctx, 1100*time.Millisecond); err != nil {
			return err
		}
		for i := range 2 {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://exporter/metrics", nil)
			if err != nil {
				return err
			}
			begun := time.Now()
			response, err := client.Do(request)
			if err != nil {
				return err
			}
			n, err := io.Copy(io.Discard, response.Body)
			if err = errors.Join(err, response.Body.Close()); err != nil {
				return err
			}
			took := time.Since(begun)
			if i == 0 {
				first, bytes = max(first, took), n
			} else {
				shared = max(shared, took)
			}
		}
	}
	fmt.Fprintf(stdout, "%-6s  %-34s %7.2f ms (worst of 5, %d KiB, transport included)\n", name, "scrape, first after a snapshot", first.Seconds()*1000, bytes/1024)
	fmt.Fprintf(stdout, "%-6s  %-34s %7.2f ms (worst of 5)\n", name, "scrape, shared", shared.Seconds()*1000)
	return nil
}
