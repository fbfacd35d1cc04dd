package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/web"
	"gpuledger/exporter/who"
	"gpuledger/lab/labtest"
)

// terminal is a real one, inside a tmux server of its own.
type terminal struct {
	t      *testing.T
	server string
}

func newTerminal(t *testing.T, command string) *terminal {
	t.Helper()
	if _, err := exec.LookPath("tmux"); err != nil {
		labtest.Missing(t, "tmux")
	}
	dir, err := os.MkdirTemp("", "gwho") // too long a path is no socket
	if err != nil {
		t.Fatal(err)
	}
	term := &terminal{t, filepath.Join(dir, "tmux")}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the screen:\n%s", term.screen())
		}
		_ = exec.Command("tmux", "-S", term.server, "kill-server").Run() // it may have ended
		os.RemoveAll(dir)
	})
	term.tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "20", "sh")
	term.keys("PS1='done> '; clear; echo before", "Enter")
	term.await("a shell", func(s string) bool { return strings.Contains(s, "before\ndone>") })
	term.keys(command, "Enter")
	return term
}

func (term *terminal) tmux(arguments ...string) string {
	term.t.Helper()
	output, err := exec.Command("tmux", append([]string{"-S", term.server}, arguments...)...).CombinedOutput()
	if err != nil {
		term.t.Fatalf("tmux %q: %v\n%s", arguments, err, output)
	}
	return string(output)
}

func (term *terminal) keys(keys ...string) {
	term.t.Helper()
	term.tmux(append([]string{"send-keys"}, keys...)...)
}

func (term *terminal) screen() string {
	output, err := exec.Command("tmux", "-S", term.server, "capture-pane", "-p").CombinedOutput()
	if err != nil {
		return err.Error()
	}
	return string(output)
}

func (term *terminal) await(what string, done func(screen string) bool) string {
	term.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		screen := term.screen()
		if done(screen) {
			return screen
		}
		if time.Now().After(deadline) {
			term.t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// child is the PID of what the shell in it runs.
func (term *terminal) child() int {
	term.t.Helper()
	shell := strings.TrimSpace(term.tmux("display-message", "-p", "#{pane_pid}"))
	text, err := os.ReadFile(filepath.Join("/proc", shell, "task", shell, "children"))
	if err != nil {
		term.t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		term.t.Fatalf("children of the shell: %q: %v", text, err)
	}
	return pid
}

func shows(texts ...string) func(string) bool {
	return func(screen string) bool {
		at := 0
		for _, text := range texts {
			i := strings.Index(screen[at:], text)
			if i < 0 {
				return false
			}
			at += i
		}
		return true
	}
}

func lacks(text string) func(string) bool {
	return func(screen string) bool { return !strings.Contains(screen, text) }
}

// exporterAt serves a scene until the function that it returns is called.
func exporterAt(t *testing.T, socket, scene string) func() {
	t.Helper()
	store := &snapshot.Store{}
	store.Publish(scenes(t, scene))
	listening := make(chan []net.Addr, 1)
	server, err := web.New(web.Options{
		ListenAddresses: []string{"127.0.0.1:0"}, Socket: socket, Store: store,
		Logger: slog.New(slog.DiscardHandler), OnListen: func(a []net.Addr) { listening <- a },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go keepFresh(ctx, store)
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	select {
	case <-listening:
	case err := <-done:
		t.Fatal(err)
	}
	ended := false
	stop := func() {
		if !ended {
			ended = true
			cancel()
			<-done
		}
	}
	t.Cleanup(stop)
	return stop
}

// TestWatchInATerminal uses the live view as people do.
func TestWatchInATerminal(t *testing.T) {
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	stop := exporterAt(t, socket, "busy")
	term := newTerminal(t, "gwho -w 1s --socket "+socket)
	term.await("the cards", shows("gpu01", "0 of 2 free", "GPU  NAME", "  0  NVIDIA H200", "bob", "me", "  1  NVIDIA H200", "alice", "q quit"))

	term.keys("m")
	term.await("sorted by memory", shows("bob", "me", "alice", "by memory"))
	term.keys("r")
	term.await("the other way round", shows("me", "bob", "alice", "by memory"))
	term.keys("r", "u")
	term.await("sorted by user", shows("alice", "bob", "me", "by user"))
	term.keys("c")
	term.await("the cards again", shows("  0  NVIDIA H200", "bob"))
	term.keys("i")
	term.await("who does nothing", shows("4d04h", "alice", "3h00m", "bob", "idle for 1h"))
	term.keys("i", "f")
	term.await("what is free", shows("no GPU is free", "free only"))
	term.keys("f", "/", "tra", "q")
	term.await("a text being typed", shows("/traq_"))
	term.keys("BSpace", "Enter")
	term.await("what holds the text", func(s string) bool { return shows("alice", "with tra")(s) && lacks("bob")(s) })
	term.keys("Escape")
	term.await("everybody", shows("bob", "alice"))
	term.keys("?")
	term.await("the keys", shows("sort by user, memory, activity, idle, since"))
	term.keys("?", "v")
	term.await("all there is to know", shows("attributed by"))
	term.keys("v")

	for _, size := range [][2]string{{"60", "20"}, {"20", "5"}, {"3", "2"}, {"100", "8"}} {
		term.tmux("resize-window", "-x", size[0], "-y", size[1])
		term.await("the view in "+size[0]+" columns", func(s string) bool {
			return s != "" && (size[0] == "3" || strings.Contains(s, "gpu01") && strings.Contains(s, "q quit"))
		})
	}
	// Of a long answer in a low window the end can be reached.
	term.keys("G")
	term.await("the end", shows("assigned"))
	term.keys("g")
	term.await("the beginning", shows("  0  NVIDIA H200"))
	term.tmux("resize-window", "-x", "100", "-y", "20")

	stop()
	term.await("that the exporter is gone", shows("gpu01", "! gpu-exporter at ", "old"))
	exporterAt(t, socket, "good")
	term.await("the exporter's return", func(s string) bool { return shows("1 of 2 free", "  1  NVIDIA H200  free")(s) && lacks("old")(s) })

	// Two ways to be stopped, and the terminal is the shell's meanwhile.
	term.keys("C-z")
	for range 2 {
		term.await("the shell meanwhile", func(s string) bool { return shows("before")(s) && lacks("q quit")(s) })
		term.keys("stty -a | grep -o ' echo '; fg", "Enter")
		term.await("the view again", shows("q quit"))
		if err := syscall.Kill(term.child(), syscall.SIGTSTP); err != nil {
			t.Fatal(err)
		}
	}
	term.await("the shell again", func(s string) bool { return shows("before", " echo", " echo")(s) && lacks("q quit")(s) })
	term.keys("fg", "Enter")
	term.await("the view once more", shows("q quit"))
	term.keys("q")
	screen := term.await("the shell as it was", func(s string) bool { return shows("before", "done>")(s) && lacks("q quit")(s) })
	if strings.Contains(screen, "NVIDIA") {
		t.Errorf("the view is still on the screen:\n%s", screen)
	}
	term.keys("echo code $?", "Enter")
	term.await("its exit code", shows("code 0"))
}

// TestWatchLeavesTheTerminal ends the view by a signal and by Ctrl-C.
func TestWatchLeavesTheTerminal(t *testing.T) {
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	exporterAt(t, socket, "good")
	term := newTerminal(t, "gwho -w --socket "+socket)
	term.await("the view", shows("q quit"))
	term.keys("C-c")
	term.await("the shell", func(s string) bool { return shows("done>")(s) && lacks("q quit")(s) })
	term.keys("sh -c 'echo $$ >"+dir+"/pid; exec gwho -w --socket "+socket+"'", "Enter")
	term.await("the view again", shows("q quit"))
	pid, err := os.ReadFile(filepath.Join(dir, "pid"))
	if err != nil {
		t.Fatal(err)
	}
	if output, err := exec.Command("kill", "-TERM", strings.TrimSpace(string(pid))).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	term.await("the shell after SIGTERM", func(s string) bool { return shows("done>")(s) && lacks("q quit")(s) })
	term.keys("clear; stty -a | grep -o ' echo '", "Enter")
	term.await("a terminal that echoes", shows(" echo"))
}

// TestWatchWithoutAShell presses ^Z where nobody could make the view go on: it
// does so by itself.
func TestWatchWithoutAShell(t *testing.T) {
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	exporterAt(t, socket, "busy")
	term := newTerminal(t, "exec setsid -c -w gwho -w 1s --socket "+socket)
	term.await("the view", shows("q quit"))
	term.keys("C-z", "m")
	term.await("the view as a key has it", shows("q quit", "by memory"))
}

// TestWatchIntoAPipe: what reads the lines learns that the exporter is gone, and
// that it is back. TERM=dumb has no screen to draw on.
func TestWatchIntoAPipe(t *testing.T) {
	dir, err := os.MkdirTemp("", "gwho")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket := filepath.Join(dir, "s")
	stop := exporterAt(t, socket, "good")
	for _, flag := range []string{"--json", "-v"} {
		command := exec.Command("gwho", "-w", "1s", flag, "--socket", socket)
		if command.Path, err = exec.LookPath("gwho"); err != nil {
			t.Fatal(err)
		}
		output, err := command.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := command.Start(); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(30*time.Second, func() { _ = command.Process.Kill() })
		lines := bufio.NewScanner(output)
		await := func(text string) {
			t.Helper()
			for lines.Scan() {
				if flag == "--json" && !json.Valid(lines.Bytes()) {
					t.Errorf("no JSON: %s", lines.Text())
				}
				if strings.Contains(lines.Text(), text) {
					return
				}
			}
			t.Fatalf("%s: no line has %q: %v", flag, text, lines.Err())
		}
		await("alice")
		stop()
		await("no answer for ")
		stop = exporterAt(t, socket, "good")
		await("alice")
		if err := command.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		for lines.Scan() {
		}
		if err := command.Wait(); err != nil {
			t.Errorf("%s: %v", flag, err)
		}
	}
	term := newTerminal(t, "TERM=dumb gwho -w 1s --socket "+socket)
	term.await("one answer below the other", func(s string) bool { return strings.Count(s, "gpu01") > 1 && lacks("q quit")(s) })
}

// TestAskAgainWaitsForTheExporter: one that has answered is not gone around,
// even where the socket is the usual one.
func TestAskAgainWaitsForTheExporter(t *testing.T) {
	o := options{socket: filepath.Join(t.TempDir(), "s"), libraryPath: "/nonexistent/libnvidia-ml.so.1", procfs: "/proc"}
	if _, err := o.askAgain(context.Background(), who.Answer{Source: who.SourceExporter}); !errors.Is(err, errNoExporter) {
		t.Errorf("after an answer of the exporter: %v", err)
	}
}
