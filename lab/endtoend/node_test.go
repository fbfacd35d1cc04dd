// Package endtoend runs the real programs against simulated cards: processes,
// sockets, signals, disks and engines are real, only the cards are not.
package endtoend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/usage"
	"gpuledger/exporter/who"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// programs is where TestMain puts the binaries under test, built with the race
// detector: one that finds a race exits with 66.
var programs string

func TestMain(m *testing.M) { os.Exit(runTests(m)) }

func runTests(m *testing.M) int {
	dir, err := os.MkdirTemp("", "gpuledger-endtoend")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	// Other uids run these too.
	if err := os.Chmod(dir, 0o755); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	build := exec.Command("go", "build", "-race", "-o", dir, "gpuledger/cmd/gpu-exporter", "gpuledger/cmd/gwho", "gpuledger/cmd/gpu-accounting")
	build.Stdout, build.Stderr = os.Stdout, os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "build the programs:", err)
		return 1
	}
	programs = dir
	return m.Run()
}

// await polls until done says so, and fails the test after a minute.
func await(t testing.TB, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("%s did not happen within a minute", what)
		}
		time.Sleep(20 * time.Millisecond) // between two looks at the condition
	}
}

// program is a running process of ours.
type program struct {
	*exec.Cmd
	output *bytes.Buffer
	ended  chan struct{}
}

func start(t testing.TB, environment []string, name string, arguments ...string) *program {
	t.Helper()
	p := &program{Cmd: exec.Command(filepath.Join(programs, name), arguments...), output: &bytes.Buffer{}, ended: make(chan struct{})}
	p.Env = environment
	p.Stdout, p.Stderr = p.output, p.output
	p.WaitDelay = 5 * time.Second
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.Wait() // the state is in ProcessState
		close(p.ended)
	}()
	t.Cleanup(func() {
		p.kill()
		if t.Failed() {
			t.Logf("%s said:\n%s", name, p.output)
		}
		if strings.Contains(p.output.String(), "DATA RACE") {
			t.Errorf("%s has a data race:\n%s", name, p.output)
		}
	})
	return p
}

func (p *program) kill() {
	_ = p.Process.Kill() // it may have ended already
	<-p.ended
}

// stop sends SIGTERM and wants a clean end within 5 s.
func (p *program) stop(t testing.TB) {
	t.Helper()
	begun := time.Now()
	if err := p.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-p.ended
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("%s took %v to stop, 5 s are allowed", p.Path, took)
	}
	if code := p.ProcessState.ExitCode(); code != 0 {
		t.Errorf("%s ended with %d:\n%s", p.Path, code, p.output)
	}
}

// worker is a process that holds a simulated card.
type worker struct {
	pid uint32
	end func()
}

// work starts a process under uid; it dies with the test.
func work(t testing.TB, uid uint32) worker {
	t.Helper()
	if os.Geteuid() != 0 && int(uid) != os.Geteuid() {
		labtest.Missing(t, "root, to run processes of other users")
	}
	command := exec.Command("sleep", "3600")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			_ = command.Process.Kill()
			_ = command.Wait()
		}
	}
	t.Cleanup(end)
	return worker{pid: uint32(command.Process.Pid), end: end}
}

// node is one simulated server with its exporter.
type node struct {
	t            *testing.T
	name         string
	dir, socket  string
	scenario     lab.Scenario
	scenarioPath string
	library      string
	config       string
	flags        []string
	exporter     *program
	address      string
}

func newNode(t *testing.T, name string, scenario lab.Scenario) *node {
	t.Helper()
	// Not t.TempDir: its path may be too long for a unix socket.
	dir, err := os.MkdirTemp("", "gpunode")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, name: name, dir: dir, socket: filepath.Join(dir, "exporter.sock"), library: labtest.BuildLibrary(t)}
	if scenario.Epoch.IsZero() {
		scenario.Epoch = time.Now()
	}
	n.scenario, n.scenarioPath = scenario, filepath.Join(dir, "scenario")
	n.write()
	return n
}

func (n *node) write() {
	n.t.Helper()
	if err := n.scenario.WriteFile(n.scenarioPath); err != nil {
		n.t.Fatal(err)
	}
}

func freePort(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}

func (n *node) start() {
	n.t.Helper()
	n.address = freePort(n.t)
	arguments := append([]string{
		"--node.name=" + n.name, "--socket=" + n.socket, "--state.dir=" + filepath.Join(n.dir, "state"),
		"--state.lock=" + filepath.Join(n.dir, "lock"), "--web.listen-address=" + n.address, "--nvml.library-path=" + n.library,
	}, n.flags...)
	if n.config != "" {
		path := filepath.Join(n.dir, "exporter.yml")
		if err := os.WriteFile(path, []byte(n.config), 0o600); err != nil {
			n.t.Fatal(err)
		}
		arguments = append(arguments, "--config.file="+path)
	}
	n.exporter = start(n.t, append(os.Environ(), "GPULAB_SCENARIO="+n.scenarioPath), "gpu-exporter", arguments...)
	await(n.t, "the exporter's first reading", func() bool {
		select {
		case <-n.exporter.ended:
			n.t.Fatalf("the exporter ended: %s", n.exporter.output)
		default:
		}
		response, err := http.Get("http://" + n.address + "/-/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
}

// unixClient speaks HTTP over the node's socket, as root or whoever we are.
func (n *node) unixClient() *http.Client {
	return &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", n.socket)
		},
	}}
}

func (n *node) get(path string) string {
	n.t.Helper()
	response, err := n.unixClient().Get("http://exporter" + path)
	if err != nil {
		n.t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		n.t.Fatalf("GET %s: %s, %v\n%s", path, response.Status, err, body)
	}
	return string(body)
}

// gwho runs gwho --json on the node's socket and returns its answer and exit
// code.
func (n *node) gwho() (who.Answer, int) {
	n.t.Helper()
	var output, errors bytes.Buffer
	command := exec.Command(filepath.Join(programs, "gwho"), "--socket="+n.socket, "--json")
	command.Stdout, command.Stderr = &output, &errors
	_ = command.Run() // the code says it
	var answer who.Answer
	if err := json.Unmarshal(output.Bytes(), &answer); err != nil {
		n.t.Fatalf("gwho --json: %v\n%s%s", err, &output, &errors)
	}
	return answer, command.ProcessState.ExitCode()
}

// rows are the final rows of the node's journal.
func (n *node) rows() []usage.Row {
	n.t.Helper()
	var output, problems bytes.Buffer
	command := exec.Command(filepath.Join(programs, "gpu-exporter"), "export", "--state.dir="+filepath.Join(n.dir, "state"))
	command.Stdout, command.Stderr = &output, &problems
	if err := command.Run(); err != nil {
		n.t.Fatalf("export: %v\n%s", err, &problems)
	}
	decoder := usage.NewDecoder(&output)
	var rows []usage.Row
	for {
		row, err := decoder.Decode()
		if errors.Is(err, io.EOF) {
			return rows
		}
		if err != nil {
			n.t.Fatal(err)
		}
		rows = append(rows, row)
	}
}

// metric returns the value of a series as text, "" if it is not exposed.
func (n *node) metric(series string) string {
	n.t.Helper()
	for line := range strings.Lines(n.get("/metrics")) {
		if value, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

func one(t testing.TB, gpus ...lab.GPU) []lab.GPU {
	t.Helper()
	if len(gpus) == 0 {
		gpus = []lab.GPU{{Name: "NVIDIA A100-SXM4-80GB"}}
	}
	return gpus
}
