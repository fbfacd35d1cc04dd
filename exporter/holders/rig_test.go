package holders

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

// The test binary is also a process that changes under our eyes, and one that
// may not see others.
func TestMain(m *testing.M) {
	switch os.Getenv("HOLDERS_TEST") {
	case "chameleon":
		chameleon()
	case "stranger":
		stranger()
	default:
		os.Exit(m.Run())
	}
}

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
}

func realProc(t testing.TB) *procfs.FS {
	t.Helper()
	fs, err := procfs.Open("")
	if errors.Is(err, procfs.ErrNotInitialPIDNamespace) {
		missing(t, "the initial PID namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	return fs
}

// rig is a table over the real /proc whose clock stands still unless moved.
type rig struct {
	*Table
	t     testing.TB
	clock time.Time
	log   *lockedBuffer
}

type lockedBuffer struct {
	mutex  sync.Mutex
	buffer bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.buffer.String()
}

// accounts of the tests: nothing of the host's own gets in.
func accounts() owner.Accounts {
	names := map[uint32]string{0: "root", 4711: "alice", 4712: "bob"}
	return owner.Accounts{
		NameOf: func(uid uint32) (string, owner.AccountStatus) {
			if name, ok := names[uid]; ok {
				return name, owner.AccountFound
			}
			return "", owner.AccountUnknown
		},
		UIDOf: func(name string) (uint32, owner.AccountStatus) {
			for uid, n := range names {
				if n == name {
					return uid, owner.AccountFound
				}
			}
			return 0, owner.AccountUnknown
		},
	}
}

func newRig(t testing.TB, sockets ...string) *rig {
	t.Helper()
	r := &rig{t: t, clock: time.Now(), log: &lockedBuffer{}}
	logger := slog.New(slog.NewTextHandler(r.log, nil))
	options := Options{FS: realProc(t), Owner: owner.DefaultConfig(), Logger: logger, Now: func() time.Time { return r.clock }}
	options.Owner.Accounts = accounts()
	for _, socket := range sockets {
		options.Engines = append(options.Engines, runtimes.NewDirectory(runtimes.NewDockerClient(socket), logger))
	}
	r.Table = New(options)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done; r.Close() })
	return r
}

func monotonicUS() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // can't fail with a valid pointer
	return now.Nano() / 1000
}

// reading lists pids on one card, as of now.
func reading(pids ...uint32) gpu.Reading {
	r := gpu.Reading{Card: gpu.Card{UUID: "GPU-1"}, At: gpu.Instant{MonotonicUS: monotonicUS()}}
	for _, pid := range pids {
		r.Processes = append(r.Processes, gpu.Process{PID: pid, Compute: true})
	}
	return r
}

// pass refreshes the table with what a card lists now.
func (r *rig) pass(pids ...uint32) { r.refresh(reading(pids...)) }

func (r *rig) refresh(readings ...gpu.Reading) {
	r.Refresh(context.Background(), gpu.Pass{Readings: readings})
}

func (r *rig) key(pid uint32) meter.ProcessKey { return r.Keys(reading(pid))[pid] }

func (r *rig) workload(pid uint32) meter.Workload { return r.Attribute(r.key(pid)).Workload }

// settle waits until what is read beside the passes has been read.
func (r *rig) settle(pid uint32) {
	r.t.Helper()
	await(r.t, "nothing about the process is pending", func() bool { return !r.Attribute(r.key(pid)).Pending })
}

// turn lets one whole turn of reading again pass by, a second at a time.
func (r *rig) turn(pids ...uint32) {
	for range int(rereadWithin / time.Second) {
		r.clock = r.clock.Add(time.Second)
		r.pass(pids...)
	}
}

func await(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// child is a real process that dies with the test.
type child struct {
	*exec.Cmd
	pid   uint32
	t     testing.TB
	ended bool
}

func start(t testing.TB, uid uint32, command *exec.Cmd) *child {
	t.Helper()
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if int(uid) != os.Geteuid() {
		needRoot(t)
		command.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{Cmd: command, pid: uint32(command.Process.Pid), t: t}
	t.Cleanup(func() { c.kill(); c.reap() })
	return c
}

func sleeper(t testing.TB, uid uint32) *child {
	t.Helper()
	return start(t, uid, exec.Command("sleep", "3600"))
}

// kill returns once the process is a zombie.
func (c *child) kill() {
	if c.ended {
		return
	}
	if err := c.Process.Kill(); err != nil {
		c.t.Fatal(err)
	}
	await(c.t, "the process is a zombie", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", c.pid))
		return err == nil && bytes.Contains(stat, []byte(") Z "))
	})
}

func (c *child) reap() {
	if !c.ended {
		c.ended = true
		_ = c.Wait() // it was killed
	}
}

// outsideSlices is for tests whose children would belong to whoever runs the
// test.
func outsideSlices(t testing.TB) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	if chain := cgroup.Parse(string(text)); chain.HasUID || len(chain.Levels) > 0 || chain.Unit != "" {
		missing(t, "to run outside sessions, services and containers")
	}
}

// inCgroup moves a process to a cgroup of the unified hierarchy, which it makes.
func inCgroup(t testing.TB, c *child, path string) {
	t.Helper()
	needRoot(t)
	outsideSlices(t)
	root := ""
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); len(fields) > 2 && fields[2] == "cgroup2" {
			root = fields[1]
		}
	}
	if root == "" {
		missing(t, "a cgroup2 file system")
	}
	dir := root
	for segment := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		dir = filepath.Join(dir, segment)
		if err := os.Mkdir(dir, 0o755); err == nil {
			made := dir
			t.Cleanup(func() {
				if err := os.Remove(made); err != nil {
					t.Error(err)
				}
			})
		} else if !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(int(c.pid))), 0o644); err != nil {
		t.Fatal(err)
	}
	// Before the cgroups go, whoever made them.
	t.Cleanup(func() { c.kill(); c.reap() })
}

// shortDir is for unix sockets, whose paths may not be long.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "holders")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// listen opens a unix socket and gives every connection to serve.
func listen(t testing.TB, socket string, serve func(net.Conn)) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	var mutex sync.Mutex
	open := map[net.Conn]bool{}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			mutex.Lock()
			open[connection] = true
			mutex.Unlock()
			group.Go(func() {
				serve(connection)
				connection.Close()
				mutex.Lock()
				delete(open, connection)
				mutex.Unlock()
			})
		}
	})
	stop = sync.OnceFunc(func() {
		listener.Close()
		mutex.Lock()
		for connection := range open {
			connection.Close()
		}
		mutex.Unlock()
		group.Wait()
	})
	t.Cleanup(stop)
	return stop
}

// hangingEngine accepts, reads and never answers.
func hangingEngine(t testing.TB) (socket string) {
	t.Helper()
	socket = filepath.Join(shortDir(t), "s")
	listen(t, socket, func(connection net.Conn) { _, _ = io.Copy(io.Discard, connection) })
	return socket
}

// forward passes connections on to another socket, so that an engine can be
// taken away and given back.
func forward(t testing.TB, from, to string) (stop func()) {
	t.Helper()
	return listen(t, from, func(connection net.Conn) {
		engine, err := net.Dial("unix", to)
		if err != nil {
			return
		}
		defer engine.Close()
		go func() { _, _ = io.Copy(engine, connection); engine.Close() }()
		_, _ = io.Copy(connection, engine)
	})
}

// engine answers for the containers it is given, by id.
func engine(t testing.TB, socket string, containers map[string]runtimes.Container) {
	t.Helper()
	answer := func(w http.ResponseWriter, value any) { _ = json.NewEncoder(w).Encode(value) }
	mux := http.NewServeMux()
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]string{"ApiVersion": "1.44", "MinAPIVersion": "1.24"})
	})
	mux.HandleFunc("GET /v1.44/containers/{id}/json", func(w http.ResponseWriter, r *http.Request) {
		c, ok := containers[r.PathValue("id")]
		if !ok {
			http.NotFound(w, r)
			return
		}
		mounts := []map[string]string{}
		for _, path := range c.Binds {
			mounts = append(mounts, map[string]string{"Type": "bind", "Source": path})
		}
		answer(w, map[string]any{
			"Mounts": mounts,
			"Id":     r.PathValue("id"), "Name": "/" + c.Name, "Image": "sha256:1",
			"Config": map[string]any{"User": c.User, "Image": c.Image, "Labels": c.Labels},
		})
	})
	mux.HandleFunc("GET /v1.44/images/{id}/json", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"Config": map[string]any{}})
	})
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close(); <-done })
}

// chameleon becomes another user at the first line, and another program at the
// second.
func chameleon() {
	input := bufio.NewReader(os.Stdin)
	fmt.Println("ready")
	_, _ = input.ReadString('\n')
	if err := syscall.Setuid(4711); err != nil {
		fmt.Println(err)
	}
	fmt.Println("setuid")
	_, _ = input.ReadString('\n')
	fmt.Println(syscall.Exec("/bin/sleep", []string{"sleep", "3600"}, nil))
}

// stranger lists a process that it may not see.
func stranger() {
	pid, _ := strconv.ParseUint(os.Getenv("HOLDERS_TEST_PID"), 10, 32)
	fs, err := procfs.Open(os.Getenv("HOLDERS_TEST_PROC"))
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	table := New(Options{FS: fs, Owner: owner.DefaultConfig()})
	for range 3 {
		table.Refresh(context.Background(), gpu.Pass{Readings: []gpu.Reading{reading(uint32(pid), 1<<22-1)}})
	}
	_ = json.NewEncoder(os.Stdout).Encode(map[string]any{
		"hidden": table.Hidden(), "gone": table.Gone(), "keys": table.Keys(reading(uint32(pid)))[uint32(pid)].StartTicks,
		"up": table.Collectors()["procfs"].Up, "user": table.Attribute(meter.ProcessKey{PID: uint32(pid)}).Workload.User,
	})
}
