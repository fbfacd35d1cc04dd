package resources

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/snapshot"
	"gpuledger/lab/labtest"
)

// TestMain is also the program that tests measure: told by WORKER it burns CPU,
// holds memory, reads a file past the cache, or has children that do.
func TestMain(m *testing.M) {
	if plan := os.Getenv("WORKER"); plan != "" {
		if err := work(plan); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// work does what each line of standard input says, and answers with the CPU
// time that this process has used by then, in µs.
func work(name string) error {
	var held []byte
	children := map[string]*exec.Cmd{}
	pipes := map[string]io.WriteCloser{}
	answers := map[string]*bufio.Reader{}
	lines := bufio.NewScanner(os.Stdin)
	fmt.Println("ready", name)
	for lines.Scan() {
		verb, argument, _ := strings.Cut(lines.Text(), " ")
		switch verb {
		case "burn": // milliseconds of this process's own CPU time
			ms, err := strconv.ParseInt(argument, 10, 64)
			if err != nil {
				return err
			}
			for begin := cpuTime(); cpuTime()-begin < ms*1000; {
			}
		case "hold": // MiB
			mib, err := strconv.Atoi(argument)
			if err != nil {
				return err
			}
			held = make([]byte, mib<<20)
			for i := 0; i < len(held); i += 4096 {
				held[i] = 1
			}
		case "read": // a file, from storage
			file, err := os.OpenFile(argument, os.O_RDONLY|syscall.O_DIRECT, 0)
			if err != nil {
				return err
			}
			buffer := make([]byte, 2<<20)
			offset := (4096 - int(uintptrOf(buffer)%4096)) % 4096
			for {
				n, err := file.Read(buffer[offset : offset+1<<20])
				if n == 0 || err != nil {
					break
				}
			}
			file.Close()
		case "fork":
			child := exec.Command("/proc/self/exe")
			child.Env = []string{"WORKER=" + argument}
			child.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			in, err := child.StdinPipe()
			if err != nil {
				return err
			}
			out, err := child.StdoutPipe()
			if err != nil {
				return err
			}
			if err := child.Start(); err != nil {
				return err
			}
			answers[argument] = bufio.NewReader(out)
			if _, err := answers[argument].ReadString('\n'); err != nil {
				return err
			}
			children[argument], pipes[argument] = child, in
			fmt.Println(child.Process.Pid)
			continue
		case "reap":
			pipes[argument].Close()
			_ = children[argument].Wait()
		case "tell": // a child
			child, order, _ := strings.Cut(argument, " ")
			fmt.Fprintln(pipes[child], order)
			answer, err := answers[child].ReadString('\n')
			if err != nil {
				return err
			}
			fmt.Print(answer)
			continue
		}
		fmt.Println(cpuTime())
	}
	runtime.KeepAlive(held)
	return lines.Err()
}

// cpuTime is what this process has used, in µs.
func cpuTime() int64 {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return (used.Utime.Nano() + used.Stime.Nano()) / 1000
}

// worker is a process of the test.
type worker struct {
	t   *testing.T
	pid uint32
	in  io.Writer
	out *bufio.Reader
	end func()
}

func startWorker(t *testing.T) *worker {
	t.Helper()
	command := exec.Command("/proc/self/exe")
	command.Env = []string{"WORKER=root"}
	command.Stderr = os.Stderr
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	w := &worker{t: t, pid: uint32(command.Process.Pid), in: in, out: bufio.NewReader(out)}
	w.end = func() {
		if !ended {
			ended = true
			in.Close()
			_ = command.Wait()
		}
	}
	t.Cleanup(w.end)
	w.answer()
	return w
}

func (w *worker) answer() string {
	w.t.Helper()
	line, err := w.out.ReadString('\n')
	if err != nil {
		w.t.Fatal("the worker ended: ", err)
	}
	return strings.TrimSpace(line)
}

// do gives an order and returns the number that is its answer: the CPU time of
// whoever carried it out, or the PID of a child.
func (w *worker) do(order string) int64 {
	w.t.Helper()
	if _, err := fmt.Fprintln(w.in, order); err != nil {
		w.t.Fatal(err)
	}
	number, err := strconv.ParseInt(w.answer(), 10, 64)
	if err != nil {
		w.t.Fatal(err)
	}
	return number
}

// slackUS is by how much a measured CPU time may differ from the process's own
// account: ticks, and what it does between its answer and the measurement.
const slackUS = 60_000

// rig measures by hand, round for round.
type rig struct {
	t *testing.T
	*Reader
	fs  *procfs.FS
	now time.Time
}

func newRig(t *testing.T) *rig {
	t.Helper()
	fs, err := procfs.Open("")
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t: t, Reader: New(Options{FS: fs}), fs: fs, now: time.Now()}
}

// holder is a process as the sampler would list it.
func (r *rig) holder(pid uint32, w meter.Workload) Holder {
	r.t.Helper()
	handle, err := r.fs.Process(pid)
	if err != nil {
		r.t.Fatal(err)
	}
	defer handle.Close()
	facts, err := handle.Read()
	if err != nil {
		r.t.Fatal(err)
	}
	return Holder{PID: pid, StartTicks: facts.StartTicks, Workload: w, Cgroup: facts.Cgroup}
}

// measure is one round, as if 5 s after the last.
func (r *rig) measure(holders ...Holder) map[meter.Workload]snapshot.Resources {
	r.Hold(holders)
	r.now = r.now.Add(5 * time.Second)
	r.round(r.now)
	found := map[meter.Workload]snapshot.Resources{}
	for _, one := range r.book.workloads() {
		found[one.Key] = one
	}
	return found
}

func between[T int64 | uint64](t *testing.T, what string, value, least, most T) {
	t.Helper()
	if value < least || value > most {
		t.Errorf("%s is %d, want %d to %d", what, value, least, most)
	}
}

// TestProcessesAndDescendants measures a host workload: its past doesn't count,
// its children do, from their start, and stay counted when they exit.
func TestProcessesAndDescendants(t *testing.T) {
	r, w := newRig(t), startWorker(t)
	alice := workload("alice")
	before := w.do("burn 300")
	holders := []Holder{r.holder(w.pid, alice), r.holder(w.pid, alice)} // on two GPUs
	first := r.measure(holders...)[alice]
	if us, known := first.CPUUS.Get(); !known || us != 0 || first.CPUPercent.Known {
		t.Errorf("at first sight: %+v", first)
	}
	w.do("burn 200")
	used := w.do("hold 64") - before
	second := r.measure(holders...)[alice]
	between(t, "CPU µs of a process on two GPUs", second.CPUUS.Value, used-slackUS, used+slackUS)
	between(t, "its part of 5 s in percent", second.CPUPercent.Value, (used-slackUS)/50_000, (used+slackUS)/50_000)
	between(t, "resident memory", second.ResidentBytes.Value, 64<<20, 160<<20)

	before += used
	w.do("fork loader")
	w.do("tell loader burn 400")
	used = w.do("tell loader hold 32")
	used += w.do("burn 1") - before
	third := r.measure(holders...)[alice]
	between(t, "resident memory with the child's", third.ResidentBytes.Value, second.ResidentBytes.Value+32<<20, second.ResidentBytes.Value+160<<20)
	between(t, "CPU µs with the child's", third.CPUUS.Value-second.CPUUS.Value, used-slackUS, used+slackUS)

	w.do("reap loader")
	fourth := r.measure(holders...)[alice]
	if fourth.CPUUS.Value < third.CPUUS.Value {
		t.Errorf("CPU fell from %d to %d when a child exited", third.CPUUS.Value, fourth.CPUUS.Value)
	}
	if fourth.ResidentBytes.Value >= third.ResidentBytes.Value {
		t.Errorf("the memory of a child that exited is still counted")
	}
	w.end()
	fifth := r.measure(holders...)[alice]
	if fifth.CPUUS.Value < fourth.CPUUS.Value || fifth.ResidentBytes.Known {
		t.Errorf("after its end: %+v", fifth)
	}
}

// TestChildThatHoldsItself: a descendant with a GPU of its own, and what is
// below it, is its own workload's.
func TestChildThatHoldsItself(t *testing.T) {
	r, w := newRig(t), startWorker(t)
	alice, bob := workload("alice"), workload("bob")
	pid := uint32(w.do("fork other"))
	holders := []Holder{r.holder(w.pid, alice), r.holder(pid, bob)}
	before := w.do("tell other burn 10")
	r.measure(holders...)
	used := w.do("tell other burn 300") - before
	found := r.measure(holders...)
	between(t, "CPU µs of the child", found[bob].CPUUS.Value, used-slackUS, used+slackUS)
	between(t, "CPU µs of the parent, which did nothing", found[alice].CPUUS.Value, 0, slackUS)
}

// TestReusedNumber: a PID that now is another process's is not measured.
func TestReusedNumber(t *testing.T) {
	r, w := newRig(t), startWorker(t)
	alice := workload("alice")
	stranger := r.holder(w.pid, alice)
	stranger.StartTicks--
	r.measure(stranger)
	w.do("burn 100")
	if found := r.measure(stranger)[alice]; found.CPUUS.Known || found.ResidentBytes.Known || found.ReadBytes.Known {
		t.Errorf("another process was measured: %+v", found)
	}
}

func TestReadBytes(t *testing.T) {
	r, w := newRig(t), startWorker(t)
	alice := workload("alice")
	path := filepath.Join(t.TempDir(), "data")
	if err := os.WriteFile(path, make([]byte, 8<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_DIRECT, 0)
	if err != nil {
		labtest.Missing(t, "a file system with O_DIRECT for temporary files")
	}
	file.Close()
	holder := r.holder(w.pid, alice)
	r.measure(holder)
	w.do("read " + path)
	found := r.measure(holder)[alice]
	between(t, "bytes read", found.ReadBytes.Value, 8<<20, 9<<20)
	between(t, "bytes read a second", found.ReadBytesPerSecond.Value, 8<<20/5, 9<<20/5)
	if !found.WrittenBytes.Known {
		t.Error("bytes written are not known")
	}
}

// TestRunAndStaleness lets Run do the rounds, and wants what is only true for a
// moment to be gone when rounds stop.
func TestRunAndStaleness(t *testing.T) {
	r, w := newRig(t), startWorker(t)
	r.options.Interval = 50 * time.Millisecond
	alice := workload("alice")
	r.Hold([]Holder{r.holder(w.pid, alice)})
	done := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() { defer close(done); r.Run(ctx) }()
	var found []snapshot.Resources
	for deadline := time.Now().Add(20 * time.Second); len(found) == 0 || !found[0].CPUPercent.Known; {
		found = r.Latest(time.Now())
		if time.Now().After(deadline) {
			t.Fatalf("no rate: %+v", found)
		}
		time.Sleep(10 * time.Millisecond)
	}
	cancel()
	<-done
	old := r.Latest(time.Now().Add(time.Hour))
	if len(old) != 1 || !old[0].CPUUS.Known || old[0].ResidentBytes.Known || old[0].CPUPercent.Known || old[0].ReadBytesPerSecond.Known {
		t.Errorf("an hour later: %+v", old)
	}
}

// uintptrOf is where a buffer begins: reading past the cache needs it aligned.
func uintptrOf(buffer []byte) uintptr { return uintptr(unsafe.Pointer(&buffer[0])) }
