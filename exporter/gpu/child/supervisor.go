// Package child reads GPUs in a child process and keeps one running: NVML can
// end or wedge the process it is called from, and that must not be the
// exporter. Serve and Main are the child's side of the pipe, Supervisor is the
// parent's.
package child

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"gpuledger/exporter/gpu"
)

// selfExecutable is this program, even after its file was replaced by an
// upgrade: parent and child speak the same version, always.
const selfExecutable = "/proc/self/exe"

// Options say which child to run and how.
type Options struct {
	// Command is the child's program and arguments; by default this program
	// with the argument "read", followed by Arguments.
	Command []string
	// Arguments follow the default command; they are not used with Command.
	Arguments []string
	// Interval is the child's time from pass to pass; by default 1 s.
	Interval time.Duration
	// Silence is how long a child may deliver no pass before it is killed; by
	// default three intervals, and at least 5 s.
	Silence time.Duration
	// Logger takes the child's log and what happens to it; by default slog.Default().
	Logger *slog.Logger
	// Clock stamps the passes made up while no child delivers any. It must
	// read CLOCK_MONOTONIC and the wall clock, as the child does.
	Clock func() gpu.Instant
}

const (
	leastSilence = 5 * time.Second
	// The first restart is at once; while children keep failing the wait before
	// the next doubles. A minute of good passes makes the next one first again.
	leastBackOff = 100 * time.Millisecond
	mostBackOff  = 30 * time.Second
	goodAfter    = time.Minute
	// killGrace is how long a child may take to die.
	killGrace = 2 * time.Second
	// stopGrace is how long a child may take to end by itself.
	stopGrace = 500 * time.Millisecond
	// mostAbandoned children may be wedged in the driver before no more are
	// started: another would only wedge too.
	mostAbandoned = 4
)

// Supervisor runs the child and replaces it when it fails. It implements
// gpu.Source: its passes are the child's, and while no child delivers any, one
// an interval that says what is wrong.
type Supervisor struct {
	options   Options
	restarts  atomic.Int64
	abandoned atomic.Int64

	// All below belongs to Run.
	deliver   func(gpu.Pass)
	delivered time.Time // when a pass was last delivered
	failures  int       // in a row
	trouble   string    // why there is no child that delivers
	known     gpu.Pass  // driver and number of cards as last heard of
	childSaid string    // the Error of the child's last pass
}

// NewSupervisor makes a Supervisor; Run starts the child.
func NewSupervisor(options Options) (*Supervisor, error) {
	if len(options.Command) == 0 {
		program := selfExecutable
		if _, err := os.Readlink(program); err != nil {
			if program, err = os.Executable(); err != nil {
				return nil, fmt.Errorf("find this program to run as the NVML reader: %w", err)
			}
		}
		options.Command = append([]string{program, "read"}, options.Arguments...)
	}
	if options.Interval == 0 {
		options.Interval = time.Second
	}
	if options.Interval < 0 || options.Silence < 0 {
		return nil, fmt.Errorf("supervise the NVML reader: interval %v and silence %v must not be negative", options.Interval, options.Silence)
	}
	if options.Silence == 0 {
		options.Silence = max(3*options.Interval, leastSilence)
	}
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	if options.Clock == nil {
		options.Clock = now
	}
	return &Supervisor{options: options, trouble: "the NVML reader has delivered nothing yet"}, nil
}

// Restarts is how often a child was replaced since Run began.
func (s *Supervisor) Restarts() int64 { return s.restarts.Load() }

// Abandoned is how many children were killed and have not died: they are
// inside the driver.
func (s *Supervisor) Abandoned() int64 { return s.abandoned.Load() }

// Run delivers passes until ctx ends, and returns its error.
func (s *Supervisor) Run(ctx context.Context, deliver func(gpu.Pass)) error {
	s.deliver, s.delivered = deliver, time.Now()
	for first := true; ; first = false {
		if !first {
			if err := s.pause(ctx); err != nil {
				return err
			}
			s.restarts.Add(1)
		}
		err := s.one(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.failures++
		s.trouble = err.Error()
		s.options.Logger.Warn("NVML reader failed", "error", s.trouble, "failures", s.failures, "again_in", s.backOff())
	}
}

// backOff is the wait before the next start.
func (s *Supervisor) backOff() time.Duration {
	if s.failures < 2 {
		return 0
	}
	return min(leastBackOff<<min(s.failures-2, 20), mostBackOff)
}

// pause waits until the next child may be started, and says meanwhile what is wrong.
func (s *Supervisor) pause(ctx context.Context) error {
	begin := time.NewTimer(s.backOff())
	defer begin.Stop()
	tick := time.NewTicker(s.options.Interval)
	defer tick.Stop()
	due := false
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-begin.C:
			due = true
		case <-tick.C:
			s.complain()
		}
		if due && s.abandoned.Load() < mostAbandoned {
			return nil
		}
		if due {
			s.trouble = fmt.Sprintf("%d NVML readers were killed and do not die: they are wedged in the NVIDIA driver: look for NVRM and Xid in dmesg; rebooting helps if nothing else does", s.abandoned.Load())
		}
	}
}

// complain delivers a pass that says what is wrong, if none has come for two
// intervals: a child replaced in less is not worth alarming anyone.
func (s *Supervisor) complain() {
	if time.Since(s.delivered) < 2*s.options.Interval {
		return
	}
	trouble := s.trouble
	if s.childSaid != "" {
		trouble = s.childSaid + " (" + trouble + ")"
	}
	s.deliver(gpu.Pass{At: s.options.Clock(), Driver: s.known.Driver, Expected: s.known.Expected, Error: trouble})
}

// one runs one child to its end, which it returns the reason of.
func (s *Supervisor) one(ctx context.Context) error {
	p, err := start(s.options.Command, s.options.Logger)
	if err != nil {
		return err
	}
	s.options.Logger.Debug("NVML reader started", "pid", p.pid)
	if s.failures == 0 {
		s.trouble = fmt.Sprintf("the NVML reader (PID %d) has started and delivered nothing yet", p.pid)
	}
	silence := time.NewTimer(s.options.Silence)
	defer silence.Stop()
	tick := time.NewTicker(s.options.Interval)
	defer tick.Stop()
	var goodSince time.Time
	for {
		select {
		case <-ctx.Done():
			s.stop(p)
			return ctx.Err()
		case <-silence.C:
			s.dispose(p)
			return fmt.Errorf("the NVML reader (PID %d) delivered no pass for %v and was killed%s", p.pid, s.options.Silence, quoted(p))
		case <-tick.C:
			s.complain()
		case pass, more := <-p.passes:
			if !more {
				return s.post(p)
			}
			silence.Reset(s.options.Silence)
			s.known.Driver, s.known.Expected, s.childSaid = pass.Driver, pass.Expected, pass.Error
			switch {
			case pass.Error != "":
				goodSince = time.Time{}
			case goodSince.IsZero():
				goodSince = time.Now()
			case time.Since(goodSince) >= goodAfter:
				s.failures = 0
			}
			s.deliver(pass)
			s.delivered = time.Now()
		}
	}
}

// post says why a child delivers no more, and sees to it that it ends.
func (s *Supervisor) post(p *process) error {
	garbage := p.unread != nil && !errors.Is(p.unread, io.EOF) && !errors.Is(p.unread, io.ErrUnexpectedEOF)
	if !garbage {
		// It closed its pipe, as the dying do; see what it died of.
		select {
		case <-p.exited:
			return fmt.Errorf("the NVML reader (PID %d) ended: %s%s", p.pid, p.end(), quoted(p))
		case <-time.After(stopGrace):
		}
	}
	s.dispose(p)
	if garbage {
		return fmt.Errorf("the NVML reader (PID %d) was killed: %w%s", p.pid, p.unread, quoted(p))
	}
	return fmt.Errorf("the NVML reader (PID %d) closed its pipe without ending and was killed%s", p.pid, quoted(p))
}

// quoted is what a child said last, as part of a message.
func quoted(p *process) string {
	if words := p.words.String(); words != "" {
		return ": it said: " + words
	}
	return ""
}

// stop lets a child end by itself for a moment.
func (s *Supervisor) stop(p *process) {
	_ = p.stdin.Close()
	p.once.Do(func() { close(p.gone) })
	timer := time.NewTimer(stopGrace)
	defer timer.Stop()
	select {
	case <-p.exited:
		return
	case <-timer.C:
	}
	_ = p.handle.Kill()
	timer.Reset(stopGrace)
	select {
	case <-p.exited:
	case <-timer.C:
		s.options.Logger.Warn("NVML reader was killed and does not die: it is inside the driver", "pid", p.pid)
	}
}

// dispose kills a child and watches it die, without waiting for that.
func (s *Supervisor) dispose(p *process) {
	p.kill()
	go func() {
		timer := time.NewTimer(killGrace)
		defer timer.Stop()
		select {
		case <-p.exited:
			return
		case <-timer.C:
		}
		s.abandoned.Add(1)
		s.options.Logger.Warn("NVML reader was killed and does not die: it is inside the driver, and is left alone", "pid", p.pid)
		<-p.exited
		s.abandoned.Add(-1)
		s.options.Logger.Info("abandoned NVML reader has died", "pid", p.pid)
	}()
}
