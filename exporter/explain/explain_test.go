package explain

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter"
	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
)

// The test binary is also somebody without privileges who wants to know.
func TestMain(m *testing.M) {
	if pid := os.Getenv("EXPLAIN_TEST_PID"); pid != "" {
		number, _ := strconv.Atoi(pid)
		r, err := Process(context.Background(), config(), "/proc", uint32(number))
		if err == nil {
			err = WriteJSON(os.Stdout, r)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func config() exporter.Config {
	c := exporter.DefaultConfig()
	c.Runtimes.Docker = nil
	return c
}

func missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}

// asleep is a real process of uid with an environment and a secret.
func asleep(t *testing.T, uid uint32) uint32 {
	t.Helper()
	command := exec.Command("sleep", "3600.0123")
	command.Env = []string{"SECRET=hunter2", "NB_USER=hunter3"}
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if int(uid) != os.Getuid() {
		command.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: uid}
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = command.Process.Kill(); _ = command.Wait() })
	name := fmt.Sprintf("/proc/%d/exe", command.Process.Pid)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		if program, err := os.Readlink(name); err == nil && filepath.Base(program) != filepath.Base(os.Args[0]) {
			return uint32(command.Process.Pid)
		}
		if time.Now().After(deadline) {
			t.Fatal("the program does not run after 20 s")
		}
	}
}

func explained(t *testing.T, pid uint32) Report {
	t.Helper()
	r, err := Process(t.Context(), config(), "/proc", pid)
	if errors.Is(err, procfs.ErrNotInitialPIDNamespace) {
		missing(t, "the initial PID namespace")
	}
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRealProcess(t *testing.T) {
	r := explained(t, asleep(t, uint32(os.Getuid())))
	if r.Evidence.Command != "sleep" || r.Evidence.ProcessUID == nil || *r.Evidence.ProcessUID != int64(os.Getuid()) ||
		!reflect.DeepEqual(r.Evidence.Variables, []string{"NB_USER"}) || r.BootID == "" || r.StartTicks == 0 || r.Answer.Pending {
		t.Errorf("%+v", r)
	}
	if len(r.Steps) != len(owner.DefaultSteps) {
		t.Errorf("%d steps, want all %d", len(r.Steps), len(owner.DefaultSteps))
	}
	var text, asJSON bytes.Buffer
	if err := errors.Join(WriteText(&text, r), WriteJSON(&asJSON, r)); err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{text.String(), asJSON.String()} {
		// Neither what the environment holds nor the command line is shown.
		for _, secret := range []string{"hunter", "SECRET", "3600.0123"} {
			if strings.Contains(out, secret) {
				t.Errorf("%q is shown:\n%s", secret, out)
			}
		}
		for _, wanted := range append([]string{"NB_USER", "sleep", r.Answer.User}, steps()...) {
			if !strings.Contains(out, wanted) {
				t.Errorf("no %q in\n%s", wanted, out)
			}
		}
	}
	var again Report
	if err := json.Unmarshal(asJSON.Bytes(), &again); err != nil || !reflect.DeepEqual(again, r) {
		t.Errorf("the JSON says %+v, want %+v (%v)", again, r, err)
	}
}

func steps() []string {
	var names []string
	for _, step := range owner.DefaultSteps {
		names = append(names, string(step))
	}
	return names
}

func TestWithoutPrivileges(t *testing.T) {
	if os.Getuid() != 0 {
		missing(t, "root")
	}
	explained(t, asleep(t, 0)) // skips where that can't be
	ask := func(pid uint32) Report {
		t.Helper()
		// A place that everybody may read the test's program in.
		dir, err := os.MkdirTemp("", "explain")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(dir) })
		program := filepath.Join(dir, "explain.test")
		data, err := os.ReadFile("/proc/self/exe")
		if err := errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(program, data, 0o755)); err != nil {
			t.Fatal(err)
		}
		command := exec.Command(program)
		command.Env = []string{"EXPLAIN_TEST_PID=" + strconv.Itoa(int(pid))}
		command.Dir = dir
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
		var stderr bytes.Buffer
		command.Stderr = &stderr
		out, err := command.Output()
		if err != nil {
			t.Fatalf("%v: %s", err, stderr.String())
		}
		var r Report
		if err := json.Unmarshal(out, &r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	others := ask(asleep(t, 4712))
	if others.Answer.UID == nil || *others.Answer.UID != 4712 && others.Answer.AttributedBy == "process_uid" || others.Evidence.Variables != nil ||
		others.Evidence.Executable != "" || !strings.Contains(strings.Join(others.Unseen, "\n"), "its variables may not be read; root may") {
		t.Errorf("of another's process: %+v", others)
	}
	own := ask(asleep(t, 4711))
	if !reflect.DeepEqual(own.Evidence.Variables, []string{"NB_USER"}) || filepath.Base(own.Evidence.Executable) == "" || len(own.Unseen) != 0 {
		t.Errorf("of the own process: %+v", own)
	}
}

func TestNoSuchProcess(t *testing.T) {
	explained(t, uint32(os.Getpid()))
	if _, err := Process(t.Context(), config(), "/proc", 1<<30); !errors.Is(err, procfs.ErrGone) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Process(ctx, config(), "/proc", uint32(os.Getpid())); err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
}

// TestReportOfEverything lays out evidence that no single process has.
func TestReportOfEverything(t *testing.T) {
	c := owner.DefaultConfig()
	c.Rules = []owner.Rule{{Name: "r", Labels: map[string]string{"team": "*"}, Project: "p"}}
	e := owner.Evidence{
		Kind: meter.KindKubernetes, Name: "ns/p/c", ProcessUID: 1000, EffectiveUID: -1, LoginUID: -1, SliceUID: -1, ExecutableUID: -1,
		Chain: []string{"k8s:pod", "docker:abc"}, EngineOfRoot: true, UserNamespace: &owner.UserNamespace{RootUID: 165536},
		Environment: map[string]string{"NB_USER": "hunter2"}, Unit: "x.scope", SystemSlice: true,
		Job: &owner.Job{System: "slurm", ID: "77", UID: -1, Account: "vision", QOS: "urgent"},
		Pod: &owner.Pod{Namespace: "ns", Name: "p", Annotations: map[string]string{"hub.jupyter.org/username": "mallory", "secret": "hunter2"}, Labels: map[string]string{"secret": "hunter2", "team": "a"}},
		Container: &owner.Container{ID: "abc", Name: "c\n", Image: "i", ImageKnown: true, User: "0", Labels: map[string]string{"owner": "alice", "team": "a", "secret": "hunter2"},
			Binds: []owner.Bind{{Path: "/home/alice", OwnerUID: 1001}, {Path: "/x", OwnerUID: -1}}},
	}
	x := holders.Explanation{
		Info: holders.Info{Evidence: e, Verdict: owner.Resolve(e, c)}, Chain: cgroup.Parse("0::/docker/" + strings.Repeat("a", 64)),
		Verdicts:    owner.Explain(e, c),
		Attribution: meter.Attribution{Workload: meter.Workload{Kind: e.Kind, Name: e.Name}},
	}
	r := report(x, c)
	var text bytes.Buffer
	if err := errors.Join(WriteText(&text, r), WriteJSON(&text, r)); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(text.String(), "hunter2") || strings.Contains(text.String(), "secret") {
		t.Errorf("what nobody asked for is shown:\n%s", text.String())
	}
	for _, wanted := range []string{
		"uid            1000, effective not known", "user namespace its own; uid 0 there is uid 165536", "job            slurm 77, of uid not known, account vision, QOS urgent",
		`annotations    hub.jupyter.org/username="mallory"`, `labels         owner="alice", team="a"`, "was given      /home/alice, of uid 1001", "/x, of uid not known",
		"in             k8s:pod > docker:abc", "unit           x.scope, in a system slice", "variables      NB_USER", `"namespace_root_uid": 165536`, `"login_uid": null`,
	} {
		if !strings.Contains(text.String(), wanted) {
			t.Errorf("no %q in\n%s", wanted, text.String())
		}
	}
}
