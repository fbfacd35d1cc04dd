package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/web"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"gwho": main})
}

// TestScripts runs testdata/scripts. Their commands beside gwho:
//
//	exporter SCENE [NODE]
//	                 serves SCENE on $SOCKET and on $URL, by the real server; the
//	                 scene "past" has a journal. A NODE of its own has its own socket
//	accounting URL…  serves gpu-accounting that collects from there, on $ACCOUNTING
//	                 and on the socket $LEDGER
//	impostor SCENE   serves what no exporter would, on $SOCKET
//	code N gwho …    fails unless gwho ends with exit code N
//	process FILE     starts a process, and writes its PID to FILE
//	watching FILE gwho …  runs gwho until it has printed two answers to FILE, and wants 0 at SIGTERM
//	json FILE PATH   fails unless FILE is JSON with that member
func TestScripts(t *testing.T) {
	flag.Parse()
	testscript.Run(t, testscript.Params{
		Dir:           "testdata/scripts",
		UpdateScripts: *update,
		Setup: func(env *testscript.Env) error {
			dir, err := os.MkdirTemp("", "gwho") // $WORK is too long for a socket
			if err != nil {
				return err
			}
			env.Defer(func() { os.RemoveAll(dir) })
			env.Setenv("SOCKET", filepath.Join(dir, "s"))
			env.Setenv("TZ", "UTC")
			env.Setenv("GORACE", "atexit_sleep_ms=0") // a second for each gwho
			library, err := filepath.Abs("../../lab/nvml/build/libnvidia-ml.so.1")
			if err != nil {
				return err
			}
			env.Setenv("NVML", library)
			return nil
		},
		Condition: func(condition string) (bool, error) {
			var err error
			switch condition {
			case "lab":
				_, err = os.Stat("../../lab/nvml/build/libnvidia-ml.so.1")
			case "hostpid":
				_, err = procfs.Open("")
			default:
				return false, fmt.Errorf("unknown condition %q", condition)
			}
			if err != nil && os.Getenv("CI") == "true" {
				return false, fmt.Errorf("condition %s: %w", condition, err)
			}
			return err == nil, nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exporter": exporterCommand, "accounting": accountingCommand, "impostor": impostorCommand, "json": jsonCommand, "code": codeCommand, "process": processCommand,
			"watching": watchingCommand,
		},
	})
}

func TestSameAsTheExporter(t *testing.T) {
	if defaultSocket != web.DefaultSocket || tokenHeader != web.TokenHeader {
		t.Error("gwho and gpu-exporter have different sockets or headers by default")
	}
}

func exporterCommand(ts *testscript.TestScript, _ bool, args []string) {
	store := &snapshot.Store{}
	closed := false
	switch scene := args[0]; scene {
	case "starting":
	case "closed":
		closed = true
		fallthrough
	default:
		s := scenes(ts, scene)
		if len(args) > 1 {
			s.Node = args[1]
			for i := range s.Cards {
				s.Cards[i].Identity.UUID += "-" + s.Node
				for h := range s.Cards[i].Holders {
					s.Cards[i].Holders[h].Device += "-" + s.Node
				}
			}
		}
		store.Publish(s)
	}
	ctx, cancel := context.WithCancel(context.Background())
	listening := make(chan []net.Addr, 1)
	options := web.Options{
		ListenAddresses: []string{"127.0.0.1:0"}, Socket: ts.Getenv("SOCKET") + strings.Join(args[1:], ""), Store: store,
		Logger: slog.New(slog.DiscardHandler), OnListen: func(a []net.Addr) { listening <- a },
	}
	if closed {
		options.Access.OpenLive = new(false)
	}
	if args[0] == "past" {
		options.History = pastOf(ts)
	}
	server, err := web.New(options)
	ts.Check(err)
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	ts.Defer(func() { cancel(); <-done })
	select {
	case addresses := <-listening:
		ts.Setenv("URL", "http://"+addresses[0].String())
	case err := <-done:
		ts.Fatalf("exporter: %v", err)
	}
}

// keepFresh publishes the scene again and again, as an exporter does, so that it
// never is an old one.
func keepFresh(ctx context.Context, store *snapshot.Store) {
	for ticker := time.NewTicker(time.Second); ; {
		select {
		case <-ctx.Done():
			ticker.Stop()
			return
		case <-ticker.C:
			next := *store.Load()
			next.Seq++
			next.At = time.Now()
			store.Publish(&next)
		}
	}
}

// scenes are nodes by name.
func scenes(t interface{ Fatalf(string, ...any) }, name string) *snapshot.Snapshot {
	now := time.Now()
	me := meter.Workload{User: "me", UID: int64(os.Getuid()), Kind: meter.KindHost, AttributedBy: "user_slice"}
	other := meter.Workload{User: "alice", UID: 424242, Kind: meter.KindDocker, Name: "train", AttributedBy: "label"}
	process := func(pid uint32, w meter.Workload) snapshot.Holder {
		return snapshot.Holder{Device: "GPU-00000000", PID: pid, Process: gpu.Process{PID: pid, Compute: true}, Workload: w, Command: "python3",
			CommandLine: "python3 of-" + w.User + ".py", StartedAt: now.Add(-time.Hour), Holds: true}
	}
	s := &snapshot.Snapshot{Node: "gpu01", At: now, NVMLUp: true, Expected: 2, Cards: []snapshot.Card{
		{Up: true, Identity: gpu.Card{Index: 0, UUID: "GPU-00000000", Name: "NVIDIA H200"}, Reading: &gpu.Reading{},
			Holders: []snapshot.Holder{process(101, me), process(102, other)}},
		{Up: true, Identity: gpu.Card{Index: 1, UUID: "GPU-11111111", Name: "NVIDIA H200"}, Reading: &gpu.Reading{}},
	}}
	switch name {
	case "good", "closed", "past":
	case "busy": // nothing is free, and two do nothing
		asleep := process(201, meter.Workload{User: "bob", UID: 424243, Kind: meter.KindHost, AttributedBy: "user_slice"})
		asleep.Process.MemoryBytes, asleep.ActivityPercent, asleep.LastActive = gpu.Some[uint64](20<<30), gpu.Some[uint32](0), now.Add(-3*time.Hour)
		asleep.StartedAt = now.Add(-30 * time.Hour)
		active := process(202, me)
		active.Process.MemoryBytes, active.ActivityPercent, active.LastActive = gpu.Some[uint64](10<<30), gpu.Some[uint32](80), now
		given := snapshot.Holder{Device: "GPU-11111111", Workload: other, StartedAt: now.Add(-100 * time.Hour)}
		asleep.Device, active.Device = "GPU-00000000", "GPU-00000000"
		s.Cards[0].Holders, s.Cards[1].Holders = []snapshot.Holder{asleep, active}, []snapshot.Holder{given}
	case "hung":
		s.Cards[1].Up, s.Cards[1].Reason, s.Cards[1].Reading = false, "hung", nil
	case "stale":
		s.At = now.Add(-time.Hour)
	case "down":
		*s = snapshot.Snapshot{Node: "gpu01", At: now, NVMLError: "NVML could not be started: load the driver"}
	case "empty":
		*s = snapshot.Snapshot{Node: "gpu01", At: now, NVMLUp: true}
	default:
		t.Fatalf("no scene %q", name)
	}
	return s
}

func impostorCommand(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.Listen("unix", ts.Getenv("SOCKET"))
	ts.Check(err)
	stop := make(chan struct{})
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch args[0] {
		case "newer":
			io.WriteString(w, `{"version":2}`)
		case "html":
			io.WriteString(w, "<html>")
		case "redirect":
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusFound)
		case "silent":
			select {
			case <-r.Context().Done():
			case <-stop:
			}
		}
	})}
	go server.Serve(l)
	ts.Defer(func() { close(stop); server.Close() })
}

func jsonCommand(ts *testscript.TestScript, negate bool, args []string) {
	var value any
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(args[0])), &value))
	object, ok := value.(map[string]any)
	if !ok {
		ts.Fatalf("%s is no JSON object", args[0])
	}
	if _, has := object[args[1]]; has == negate {
		ts.Fatalf("%s: member %q is there: %t", args[0], args[1], has)
	}
}

func codeCommand(ts *testscript.TestScript, _ bool, args []string) {
	want := args[0]
	err := ts.Exec(args[1], args[2:]...)
	got := "0"
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = fmt.Sprint(exit.ExitCode())
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit code %s, want %s", got, want)
	}
}

func processCommand(ts *testscript.TestScript, _ bool, args []string) {
	process := exec.Command("sleep", "1000")
	ts.Check(process.Start())
	ts.Defer(func() { process.Process.Kill(); process.Wait() })
	ts.Check(os.WriteFile(args[0], fmt.Append(nil, process.Process.Pid), 0o644))
}

// watchingCommand runs a gwho that does not end by itself.
func watchingCommand(ts *testscript.TestScript, _ bool, args []string) {
	path := ts.MkAbs(args[0])
	output, err := os.Create(path)
	ts.Check(err)
	defer output.Close()
	command := exec.Command(args[1], args[2:]...)
	command.Path, err = exec.LookPath(args[1])
	ts.Check(err)
	command.Stdout, command.Stderr = output, output
	ts.Check(command.Start())
	answers := func() int {
		text, err := os.ReadFile(path)
		ts.Check(err)
		return max(strings.Count(string(text), "\ngpu01 ")+1, strings.Count(string(text), "\n{\"version\"")+1) // the first has nothing before it
	}
	for deadline := time.Now().Add(30 * time.Second); answers() < 2; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			_ = command.Process.Kill() // it is what fails the test
			ts.Fatalf("no two answers within 30 s:\n%s", ts.ReadFile(args[0]))
		}
	}
	ts.Check(command.Process.Signal(syscall.SIGTERM))
	ts.Check(command.Wait())
}
