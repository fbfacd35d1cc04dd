package main

import (
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	tea "charm.land/bubbletea/v2"
)

// stopNow is that somebody wants this process stopped: by ^Z, or kill -TSTP.
type stopNow struct{}

// stops lets the live view be stopped and go on, with the terminal given back
// meanwhile. The library's own way waits for ever where no shell minds the
// process, because there the kernel does not stop it.
type stops struct{ wanted chan os.Signal }

// handle turns the signal into a message until the function that it returns is
// called.
func (s *stops) handle(program *tea.Program) (end func()) {
	s.wanted = make(chan os.Signal, 1)
	ended := make(chan struct{})
	signal.Notify(s.wanted, syscall.SIGTSTP)
	go func() {
		for {
			select {
			case <-s.wanted:
				program.Send(stopNow{})
			case <-ended:
				return
			}
		}
	}()
	return func() {
		signal.Stop(s.wanted)
		close(ended)
	}
}

// goingOn is within what time a process that was stopped is sure to notice.
const goingOn = 100 * time.Millisecond

// Run stops the process group, as a terminal does it for ^Z, and returns when
// it goes on.
func (s *stops) Run() error {
	signal.Reset(syscall.SIGTSTP)
	defer signal.Notify(s.wanted, syscall.SIGTSTP)
	continued := make(chan os.Signal, 1)
	signal.Notify(continued, syscall.SIGCONT)
	defer signal.Stop(continued)
	if err := syscall.Kill(0, syscall.SIGTSTP); err != nil {
		return err
	}
	select {
	case <-continued:
	case <-time.After(goingOn):
	}
	return nil
}

// SetStdin, SetStdout and SetStderr make it something that tea.Exec can run.
func (*stops) SetStdin(io.Reader)  {}
func (*stops) SetStdout(io.Writer) {}
func (*stops) SetStderr(io.Writer) {}
