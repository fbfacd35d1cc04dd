package holders

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/runtimes"
)

// with starts a sleeping process with an environment of its own.
func with(t testing.TB, uid uint32, variables ...string) *child {
	t.Helper()
	command := exec.Command("sleep", "3600")
	command.Env = variables
	c := start(t, uid, command)
	await(t, "the program runs", func() bool {
		name, err := os.Readlink("/proc/" + strconv.Itoa(int(c.pid)) + "/exe")
		return err == nil && filepath.Base(name) != filepath.Base(os.Args[0])
	})
	return c
}

func TestEnvironmentIsReadOnlyIfNothingElseTells(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	r := newRig(t)
	root, person := with(t, 0, "SECRET=hunter2", "SUDO_USER=bob"), with(t, 4711, "SUDO_USER=bob")
	r.pass(root.pid, person.pid)
	if got := r.Attribute(r.key(root.pid)); !got.Pending {
		t.Errorf("before its environment was read it is settled: %+v", got)
	}
	r.settle(root.pid)
	r.settle(person.pid)
	info := r.Info(r.key(root.pid))
	if info.Verdict.User != "bob" || info.Verdict.AttributedBy != owner.StepEnvironment || !info.Verdict.Review ||
		!reflect.DeepEqual(info.Evidence.Environment, map[string]string{"SUDO_USER": "bob"}) {
		t.Errorf("%+v from %+v", info.Verdict, info.Evidence)
	}
	if info := r.Info(r.key(person.pid)); info.Verdict.User != "alice" || info.Evidence.Environment != nil {
		t.Errorf("%+v: what was not needed was read: %v", info.Verdict, info.Evidence.Environment)
	}
	// Whoever wants to know everything is told.
	r.options.GatherAll = true
	r.processes[r.key(person.pid)].resolved = false
	await(t, "all is gathered", func() bool {
		r.processes[r.key(person.pid)].resolved = false
		return r.Info(r.key(person.pid)).Evidence.Environment["SUDO_USER"] == "bob"
	})
	if got, ok := r.Explain(r.key(person.pid)); !ok || len(got.Verdicts) != len(owner.DefaultSteps) || got.Attribution.Workload.User != "alice" {
		t.Errorf("%+v, %v", got, ok)
	}
	if _, ok := r.Explain(meter.ProcessKey{PID: 1, StartTicks: 1}); ok {
		t.Error("a process that nobody asked about is explained")
	}
}

// A process whose uids are those of a person's range, in a container and not.
func TestUserNamespaces(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	r := newRig(t)
	r.owner.Accounts.SubIDOwners = func(uid uint32) ([]string, owner.AccountStatus) {
		if uid == 165536 {
			return []string{"bob"}, owner.AccountFound
		}
		return nil, owner.AccountUnknown
	}
	inside := func(root int, pidNamespace bool) *child {
		command := exec.Command("sleep", "3600")
		mapping := []syscall.SysProcIDMap{{ContainerID: 0, HostID: root, Size: 1}}
		c := &child{Cmd: command, t: t}
		command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Cloneflags: syscall.CLONE_NEWUSER,
			UidMappings: mapping, GidMappings: mapping, Credential: &syscall.Credential{}}
		if pidNamespace {
			command.SysProcAttr.Cloneflags |= syscall.CLONE_NEWPID
		}
		if err := command.Start(); errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EINVAL) {
			missing(t, "user namespaces")
		} else if err != nil {
			t.Fatal(err)
		}
		c.pid = uint32(command.Process.Pid)
		t.Cleanup(func() { c.kill(); c.reap() })
		return c
	}
	for _, test := range []struct {
		name   string
		child  *child
		cgroup string
		user   string
		step   owner.Step
	}{
		{"a person's own namespace", inside(4711, false), "", "alice", owner.StepUIDMap},
		{"a range that is lent", inside(165536, false), "", "bob", owner.StepUIDMap},
		{"a range that is lent, in a container", inside(165536, true), "/docker/" + someID, "bob", owner.StepUIDMap},
		{"made by what an image runs as", inside(4711, true), "/docker/" + someID, "unattributed", owner.StepNone},
		{"in a place that nobody knows", inside(4711, true), "/gpuledger-test-place", "unattributed", owner.StepNone},
		{"in a session", inside(4711, true), "/user.slice/user-4712.slice/session-9.scope", "bob", owner.StepUserSlice},
	} {
		if test.cgroup != "" {
			inCgroup(t, test.child, test.cgroup)
		}
		r.pass(test.child.pid)
		r.settle(test.child.pid)
		info := r.Info(r.key(test.child.pid))
		if info.Verdict.User != test.user || info.Verdict.AttributedBy != test.step {
			t.Errorf("%s: %+v from %+v, namespace %+v", test.name, info.Verdict, info.Evidence, info.Evidence.UserNamespace)
		}
	}
}

func TestOwnersOfWhatAContainerWasGiven(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	owned := t.TempDir()
	if err := os.Chown(owned, 4712, 4712); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(owned, link); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(shortDir(t), "s")
	engine(t, socket, map[string]runtimes.Container{someID: {Name: "train", Binds: []string{"/etc/hostname", owned, owned, link, "/nowhere/at/all"}}})
	r := newRig(t, socket)
	c := sleeper(t, 0)
	inCgroup(t, c, "/docker/"+someID)
	await(t, "the owner of the files", func() bool {
		r.pass(c.pid)
		return r.workload(c.pid).User == "bob"
	})
	r.settle(c.pid)
	info := r.Info(r.key(c.pid))
	want := []owner.Bind{{Path: "/etc/hostname"}, {Path: owned, OwnerUID: 4712}, {Path: link}, {Path: "/nowhere/at/all", OwnerUID: -1}}
	if !reflect.DeepEqual(info.Evidence.Container.Binds, want) || info.Verdict.AttributedBy != owner.StepHomePath {
		t.Errorf("%+v from %+v", info.Verdict, info.Evidence.Container)
	}
}

// What hangs costs an answer and nothing else.
func TestWhatHangsIsInNobodysWay(t *testing.T) {
	release := make(chan struct{})
	var asked atomic.Int64
	g := newGathered(time.Minute, func(key int) int {
		asked.Add(1)
		if key < gatherers {
			<-release
		}
		return key * 10
	}, func() {})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g.start(ctx)
	now := time.Now()
	for range 100 {
		for key := range gatherers + 1 {
			began := time.Now()
			if _, known := g.get(key, now); known {
				t.Fatalf("%d is known", key)
			}
			if took := time.Since(began); took > time.Second {
				t.Fatalf("an answer took %v", took)
			}
		}
	}
	await(t, "all that can hang do", func() bool { return asked.Load() == gatherers })
	close(release)
	for key := range gatherers + 1 {
		await(t, "the answers", func() bool { v, known := g.get(key, now); return known && v == key*10 })
	}
	if asked.Load() != gatherers+1 {
		t.Errorf("%d readings of %d keys", asked.Load(), gatherers+1)
	}
	now = now.Add(2 * time.Minute)
	if v, known := g.get(gatherers, now); !known || v != gatherers*10 {
		t.Errorf("while it is read again the answer is %d, %v, want what was known", v, known)
	}
	await(t, "it is read again", func() bool { return asked.Load() == gatherers+2 })
}

func TestGatheredIsBounded(t *testing.T) {
	g := newGathered(0, func(int) int { return 1 }, func() {})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	g.start(ctx)
	now := time.Now()
	for key := range 3 * maxGathered {
		g.get(key, now)
		if key%1000 == 999 { // time passes
			now = now.Add(10 * time.Second)
			await(t, "what was asked for is read", func() bool { return len(g.wanted) == 0 })
		}
	}
	g.mutex.Lock()
	defer g.mutex.Unlock()
	if len(g.known) > maxGathered {
		t.Errorf("%d are remembered, the bound is %d", len(g.known), maxGathered)
	}
	// An environment of a process that has gone is none, and known.
	gatherer := newGatherer(realProc(t), []string{"NB_USER"}, time.Now)
	if got := gatherer.readEnvironment(environmentKey{process: meter.ProcessKey{PID: uint32(os.Getpid()), StartTicks: 1}}); got != nil {
		t.Errorf("the environment of another process with our number: %v", got)
	}
}
