package child

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

	"gpuledger/exporter/gpu"
)

// process is one child, from its start to its end.
type process struct {
	pid    int
	stdin  io.Closer
	handle *os.Process
	// passes has the passes in order; it is closed after the last.
	passes chan gpu.Pass
	// unread says why no more passes come; it may be read once passes is closed.
	unread error
	// exited is closed when the process is gone; state and waitErr may be read then.
	exited  chan struct{}
	state   *os.ProcessState
	waitErr error
	words   *lastWords
	gone    chan struct{} // closed to let go of the pass reader
	once    sync.Once
}

// withheld are variables of the environment that mean something to the parent
// alone, or that would kill a program that binds NVML lazily.
var withheld = []string{"LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC", "LD_BIND_NOW"}

func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.Contains(withheld, name)
	})
}

// start runs command. The child inherits three descriptors only: the pipe whose
// end tells it that we are gone, the pipe for passes, and one for its log.
func start(command []string, logger *slog.Logger) (*process, error) {
	p := &process{passes: make(chan gpu.Pass), exited: make(chan struct{}), gone: make(chan struct{}), words: &lastWords{}}
	started := make(chan error, 1)
	// Linux ties the death signal to the thread that forked. So one thread does
	// both, fork and wait, and stays for as long as the child does.
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		p.run(command, logger, started)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start the NVML reader %q: %w", command[0], err)
	}
	return p, nil
}

func (p *process) run(command []string, logger *slog.Logger, started chan<- error) {
	cmd := exec.Command(command[0], command[1:]...)
	if command[0] == selfExecutable {
		if path, err := os.Executable(); err == nil {
			cmd.Args[0] = path
		}
	}
	cmd.Env = environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL,
		Setpgid:   true, // a Ctrl-C at the terminal is for the parent to hear
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		started <- err
		return
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		started <- err
		return
	}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		started <- err
		return
	}
	if err := cmd.Start(); err != nil {
		started <- err
		return
	}
	p.stdin, p.handle, p.pid = stdin, cmd.Process, cmd.Process.Pid
	logged := make(chan struct{})
	go func() {
		defer close(logged)
		p.words.copy(stderr, logger.With("pid", p.pid))
	}()
	go p.read(stdout)
	started <- nil
	// Not cmd.Wait: it would close the pipes before their last bytes are read.
	p.state, p.waitErr = cmd.Process.Wait()
	// Should anything else hold the pipe open, don't wait for its words.
	select {
	case <-logged:
	case <-time.After(time.Second):
	}
	stderr.Close()
	stdin.Close()
	close(p.exited)
}

// read decodes passes until there are no more, or the process was let go.
func (p *process) read(stdout io.ReadCloser) {
	defer stdout.Close()
	defer close(p.passes)
	in := newDecoder(stdout)
	for {
		pass, err := in.decode()
		if err != nil {
			p.unread = err
			return
		}
		select {
		case p.passes <- pass:
		case <-p.gone:
			return
		}
	}
}

// kill ends the process and lets go of it, without waiting: a process inside
// the driver dies when the driver lets it.
func (p *process) kill() {
	p.once.Do(func() { close(p.gone) })
	_ = p.handle.Kill()
}

// end says how the process ended; only once exited is closed.
func (p *process) end() string {
	switch {
	case p.waitErr != nil:
		return "could not be waited for: " + p.waitErr.Error()
	case p.state.ExitCode() == 127:
		return "exit status 127: the dynamic linker or the shell did not find what was called; " +
			"if it is an NVML symbol, the driver's library does not fit this version of gpu-exporter"
	}
	return p.state.String()
}

const (
	mostLineBytes = 1 << 10
	// mostLinesASecond of the child's log are passed on.
	mostLinesASecond = 20
	// keptLines are what of them is quoted when the child has died.
	keptLines = 3
)

// lastWords passes a child's standard error on to the log, in bounded and
// harmless lines, and keeps the last ones.
type lastWords struct {
	sync.Mutex
	lines []string
	// final is set by a line that names the cause of a crash: what comes after
	// it are stacks.
	final bool
}

func (w *lastWords) copy(r io.Reader, logger *slog.Logger) {
	in := bufio.NewReaderSize(r, mostLineBytes)
	var second time.Time
	lines, dropped := 0, 0
	continued := false
	for {
		raw, tooLong, err := in.ReadLine()
		if err != nil {
			if dropped > 0 {
				logger.Warn("NVML reader wrote too much", "dropped_lines", dropped)
			}
			return
		}
		rest := continued
		continued = tooLong
		line := harmless(string(raw))
		if rest || line == "" {
			continue // the rest of a line too long
		}
		w.keep(line)
		if now := time.Now(); now.Sub(second) >= time.Second {
			if dropped > 0 {
				logger.Warn("NVML reader wrote too much", "dropped_lines", dropped)
			}
			second, lines, dropped = now, 0, 0
		}
		if lines++; lines > mostLinesASecond {
			dropped++
			continue
		}
		logger.Info("NVML reader says", "line", line)
	}
}

func (w *lastWords) keep(line string) {
	w.Lock()
	defer w.Unlock()
	if w.final {
		return
	}
	w.final = strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: ") || strings.HasPrefix(line, "SIG")
	w.lines = append(w.lines, line)
	if w.final {
		w.lines = w.lines[len(w.lines)-1:]
	}
	if len(w.lines) > keptLines {
		w.lines = slices.Delete(w.lines, 0, 1)
	}
}

func (w *lastWords) String() string {
	w.Lock()
	defer w.Unlock()
	return strings.Join(w.lines, " | ")
}

// harmless makes a line from outside safe to log and to show.
func harmless(line string) string {
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(line, "\uFFFD")))
}
