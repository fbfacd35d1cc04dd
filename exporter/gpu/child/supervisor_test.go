package child

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
)

const (
	roleVariable = "CHILD_TEST_ROLE"
	pathVariable = "CHILD_TEST_PATH"
	testInterval = 20 * time.Millisecond
	patience     = 30 * time.Second
)

// ticks is a source that needs no GPU: its passes count up.
type ticks struct{ fail string }

func (s ticks) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	ticker := time.NewTicker(testInterval)
	defer ticker.Stop()
	for count := 1; ; count++ {
		deliver(gpu.Pass{At: now(), Expected: os.Getpid(), Error: s.fail})
		if s.fail != "" {
			return errors.New(s.fail)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// The test binary plays the child, and for one test the parent.
func TestMain(m *testing.M) {
	var err error
	switch role := os.Getenv(roleVariable); role {
	case "":
		os.Exit(m.Run())
	case "serve":
		fmt.Println("a stub that prints to standard output") // before Main has it
	case "reads":
		err = Main(context.Background(), ticks{})
	case "fails":
		err = Main(context.Background(), ticks{fail: "reload the modules"})
	case "prints":
		err = Main(context.Background(), printing{})
	case "parent":
		os.Unsetenv(roleVariable)
		os.Setenv(roleVariable, "reads")
		self, _ := os.Executable()
		var s *Supervisor
		if s, err = NewSupervisor(Options{Command: []string{self}, Interval: testInterval, Logger: slog.New(slog.DiscardHandler)}); err == nil {
			var once sync.Once
			err = s.Run(context.Background(), func(pass gpu.Pass) {
				if pass.Error == "" {
					once.Do(func() { fmt.Println(pass.Expected) })
				}
			})
		}
	case "stubborn":
		signal.Ignore(syscall.SIGTERM, syscall.SIGHUP)
		time.Sleep(time.Hour) // the parent's patience ends before
	case "crashes":
		panic("of all\nthings")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// printing is a source in whose process something prints.
type printing struct{}

func (printing) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	fmt.Println("WARNING: you should always run with the library that is installed with your driver")
	return ticks{}.Run(ctx, deliver)
}

type run struct {
	t          *testing.T
	passes     chan gpu.Pass
	supervisor *Supervisor
	log        *syncBuffer
	cancel     func()
	done       chan error
}

type syncBuffer struct {
	sync.Mutex
	bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.Write(p)
}

func (b *syncBuffer) String() string {
	b.Lock()
	defer b.Unlock()
	return b.Buffer.String()
}

func self(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func supervise(t *testing.T, options Options) *run {
	t.Helper()
	r := &run{t: t, passes: make(chan gpu.Pass, 10000), log: &syncBuffer{}, done: make(chan error, 1)}
	if options.Interval == 0 {
		options.Interval = testInterval
	}
	options.Logger = slog.New(slog.NewTextHandler(io.MultiWriter(r.log, t.Output()), &slog.HandlerOptions{Level: slog.LevelDebug}))
	var err error
	if r.supervisor, err = NewSupervisor(options); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() {
		r.done <- r.supervisor.Run(ctx, func(pass gpu.Pass) {
			select {
			case r.passes <- pass:
			default:
			}
		})
	}()
	t.Cleanup(r.end)
	return r
}

// end stops Run and checks how it ends; twice does no harm.
func (r *run) end() {
	r.cancel()
	select {
	case err := <-r.done:
		if !errors.Is(err, context.Canceled) {
			r.t.Errorf("Run: %v", err)
		}
		r.done <- err
	case <-time.After(patience):
		r.t.Error("Run does not end")
	}
}

func (r *run) wait(what string, wanted func(gpu.Pass) bool) gpu.Pass {
	r.t.Helper()
	deadline := time.After(patience)
	var last gpu.Pass
	for {
		select {
		case last = <-r.passes:
			if wanted(last) {
				return last
			}
		case <-deadline:
			r.t.Fatalf("no pass with %s; the last was %+v", what, last)
		}
	}
}

func says(text string) func(gpu.Pass) bool {
	return func(pass gpu.Pass) bool { return strings.Contains(pass.Error, text) }
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, after, _ := strings.Cut(string(stat), ") ")
	return !strings.HasPrefix(after, "Z")
}

func TestPassesOfTheChild(t *testing.T) {
	t.Setenv(roleVariable, "reads")
	r := supervise(t, Options{Command: []string{self(t)}})
	pass := r.wait("no error", func(pass gpu.Pass) bool { return pass.Error == "" })
	r.wait("no error again", func(pass gpu.Pass) bool { return pass.Error == "" })
	if r.supervisor.Restarts() != 0 {
		t.Error("restarted")
	}
	r.end()
	eventually(t, "the child ends with Run", func() bool { return !running(pass.Expected) })
}

func TestKilledChildIsReplacedAtOnce(t *testing.T) {
	t.Setenv(roleVariable, "reads")
	r := supervise(t, Options{Command: []string{self(t)}})
	for round := range int64(3) {
		pid := r.wait("a child", func(pass gpu.Pass) bool { return pass.Error == "" }).Expected
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		r.wait("another child", func(pass gpu.Pass) bool { return pass.Error == "" && pass.Expected != pid })
		if got := r.supervisor.Restarts(); got != round+1 {
			t.Errorf("%d restarts, want %d", got, round+1)
		}
	}
}

func TestParentsDeathEndsTheChild(t *testing.T) {
	cmd := exec.Command(self(t))
	cmd.Env = append(os.Environ(), roleVariable+"=parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(out, &pid); err != nil || pid == 0 {
		t.Fatalf("child %d: %v", pid, err)
	}
	if !running(pid) {
		t.Fatal("the child is not running")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // it was killed
	eventually(t, "the child ends with its killed parent", func() bool { return !running(pid) })
}

func TestWhatTheChildPrintsIsNotAPass(t *testing.T) {
	t.Setenv(roleVariable, "prints")
	r := supervise(t, Options{Command: []string{self(t)}})
	r.wait("no error", func(pass gpu.Pass) bool { return pass.Error == "" })
	eventually(t, "the print is in the log", func() bool { return strings.Contains(r.log.String(), "you should always run with") })
}

func TestGarbageRestartsTheChild(t *testing.T) {
	r := supervise(t, Options{Command: []string{"/bin/sh", "-c", "while :; do echo garbage; done"}})
	r.wait("the reason", says("not a stream of passes"))
	r.wait("restarts", func(gpu.Pass) bool { return r.supervisor.Restarts() > 2 })
}

func TestChildThatPrintsFirst(t *testing.T) {
	t.Setenv(roleVariable, "serve")
	supervise(t, Options{Command: []string{self(t)}}).wait("the reason", says("not a stream of passes"))
}

func TestSilentChildIsKilled(t *testing.T) {
	t.Setenv(roleVariable, "stubborn")
	r := supervise(t, Options{Command: []string{self(t)}, Silence: 200 * time.Millisecond})
	r.wait("the reason", says("delivered no pass for 200ms and was killed"))
	r.wait("restarts", func(gpu.Pass) bool { return r.supervisor.Restarts() > 1 })
}

func TestStoppedChildIsKilled(t *testing.T) {
	t.Setenv(roleVariable, "reads")
	r := supervise(t, Options{Command: []string{self(t)}, Silence: 500 * time.Millisecond})
	pid := r.wait("a child", func(pass gpu.Pass) bool { return pass.Error == "" }).Expected
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	r.wait("another child", func(pass gpu.Pass) bool { return pass.Error == "" && pass.Expected != pid })
	eventually(t, "the stopped one is gone", func() bool { return !running(pid) })
}

func TestChildThatClosesItsPipe(t *testing.T) {
	supervise(t, Options{Command: []string{"/bin/sh", "-c", "exec >&-; sleep 1000"}}).wait("the reason", says("closed its pipe without ending"))
}

func TestChildThatCannotBeStarted(t *testing.T) {
	r := supervise(t, Options{Command: []string{"/nonexistent/gpu-exporter", "read"}})
	pass := r.wait("the reason", says("/nonexistent/gpu-exporter"))
	if pass.At.MonotonicUS == 0 || pass.At.WallUS == 0 {
		t.Errorf("pass without time: %+v", pass)
	}
}

func TestExitStatusOfAMissingSymbol(t *testing.T) {
	const line = "gpu-exporter: symbol lookup error: undefined symbol: nvmlDeviceGetFanSpeed"
	r := supervise(t, Options{Command: []string{"/bin/sh", "-c", "echo '" + line + "' >&2; exit 127"}})
	r.wait("cause and last words", func(pass gpu.Pass) bool {
		return strings.Contains(pass.Error, "exit status 127") && strings.Contains(pass.Error, line)
	})
}

// Of a crash the cause counts, which comes before pages of goroutines.
func TestCauseOfACrash(t *testing.T) {
	t.Setenv(roleVariable, "crashes")
	r := supervise(t, Options{Command: []string{self(t)}})
	r.wait("the cause", says("it said: panic: of all"))
}

// What the child said was wrong is better than how it ended.
func TestLastErrorOfTheChildIsKept(t *testing.T) {
	t.Setenv(roleVariable, "fails")
	r := supervise(t, Options{Command: []string{self(t)}})
	r.wait("the child's error while there is none", func(pass gpu.Pass) bool {
		return strings.HasPrefix(pass.Error, "reload the modules (") && strings.Contains(pass.Error, "exit status 1")
	})
}

func TestLogOfTheChildIsBoundedAndHarmless(t *testing.T) {
	script := `printf 'bad \033[31m\377 line\n' >&2; i=0; while [ $i -lt 500 ]; do echo flood >&2; i=$((i+1)); done; head -c 100000 /dev/zero | tr '\0' x >&2; echo >&2; echo end >&2; sleep 1000`
	r := supervise(t, Options{Command: []string{"/bin/sh", "-c", script}, Silence: time.Minute})
	eventually(t, "its log is passed on", func() bool { return strings.Contains(r.log.String(), "flood") })
	r.end()
	log := r.log.String()
	if strings.ContainsRune(log, 0x1b) || strings.Contains(log, "\xff") || !strings.Contains(log, "bad  [31m") {
		t.Errorf("log has control characters: %.300q", log)
	}
	if count := strings.Count(log, "line=flood"); count > 2*mostLinesASecond {
		t.Errorf("%d lines of a flood in the log", count)
	}
	for line := range strings.Lines(log) {
		if len(line) > 2*mostLineBytes {
			t.Errorf("line of %d bytes", len(line))
		}
	}
}

// The child inherits the three standard descriptors and nothing else.
func TestChildInheritsNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "descriptors")
	t.Setenv(pathVariable, path)
	t.Setenv("NOTIFY_SOCKET", "/run/systemd/notify")
	t.Setenv("LISTEN_FDS", "1")
	r := supervise(t, Options{Command: []string{"/bin/sh", "-c", `ls /proc/$$/fd > "$CHILD_TEST_PATH.new"; env >> "$CHILD_TEST_PATH.new"; mv "$CHILD_TEST_PATH.new" "$CHILD_TEST_PATH"; sleep 1000`}, Silence: time.Minute})
	defer r.end()
	eventually(t, "the list is written", func() bool { _, err := os.Stat(path); return err == nil })
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "NOTIFY_SOCKET") || strings.Contains(string(text), "LISTEN_FDS") {
		t.Error("it inherits what is meant for the parent alone")
	}
	for line := range strings.Lines(string(text)) {
		if fd, err := strconv.Atoi(strings.TrimSpace(line)); err == nil && fd > 2 {
			// The shell itself may hold its redirection open under a high number.
			if fd < 10 {
				t.Errorf("inherits descriptor %d", fd)
			}
		}
	}
}

func TestBackOff(t *testing.T) {
	var got []time.Duration
	for failures := range 14 {
		got = append(got, (&Supervisor{failures: failures}).backOff())
	}
	want := []time.Duration{0, 0, 100e6, 200e6, 400e6, 800e6, 1600e6, 3200e6, 6400e6, 12800e6, 25600e6, 30e9, 30e9, 30e9}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("after %d failures %v, want %v", i, got[i], want[i])
		}
	}
	if got := (&Supervisor{failures: 1 << 40}).backOff(); got != mostBackOff {
		t.Errorf("after very many %v", got)
	}
}

func TestDefaults(t *testing.T) {
	s, err := NewSupervisor(Options{Arguments: []string{"--sample.interval=2s"}, Interval: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.options.Command, " "); got != selfExecutable+" read --sample.interval=2s" {
		t.Errorf("command %q", got)
	}
	if s.options.Silence != 6*time.Second {
		t.Errorf("silence %v", s.options.Silence)
	}
	if _, err := NewSupervisor(Options{Interval: -1}); err == nil {
		t.Error("negative interval: no error")
	}
}

func TestServeEndsWhenNobodyReads(t *testing.T) {
	r, w := io.Pipe()
	r.Close()
	if err := Serve(t.Context(), w, ticks{}); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("Serve: %v", err)
	}
}
