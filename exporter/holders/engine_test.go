package holders

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/dockertest"
)

const someID = "7951fb549ab99e0722a949b6c121634e1f3a36b5bacbe5392991e3b12251e6b8"

// contained is a process in a cgroup as Docker makes it, below a parent of our
// own: a real engine may be at work.
func contained(t *testing.T, id string) *child {
	t.Helper()
	c := sleeper(t, 0)
	inCgroup(t, c, fmt.Sprintf("/gpuledger-test-%d/docker/%s", os.Getpid(), id))
	return c
}

func TestContainersOfARealEngine(t *testing.T) {
	docker := dockertest.Start(t)
	docker.Import(t, "ofalice:1", `LABEL owner="alice" project="images"`, "USER 4711")
	r := newRig(t, docker.Socket)
	run := func(arguments ...string) uint32 { return docker.Run(t, arguments...).PID }
	plain := run("--name", "train", "--label", "owner=alice", "--label", "project=vision", dockertest.Image, "sleep", "3600")
	explicit := run("--name", "explicit", "--user", "4712:4712", dockertest.Image, "sleep", "3600")
	inherited := run("--name", "inherited", "ofalice:1", "sleep", "3600")
	system := run("--name", "system", "--label", "owner=root", dockertest.Image, "sleep", "3600")
	host := run("--name", "host", "--pid", "host", "ofalice:1", "sleep", "3600")
	all := []uint32{plain, explicit, inherited, system, host}
	await(t, "all names are known", func() bool {
		r.pass(all...)
		for _, pid := range all {
			if r.Attribute(r.key(pid)).Pending {
				return false
			}
		}
		return true
	})
	unattributed := func(name string) meter.Workload {
		return meter.Workload{User: "unattributed", UID: -1, Kind: "docker", Name: name, AttributedBy: "none"}
	}
	for _, test := range []struct {
		pid  uint32
		want meter.Workload
	}{
		{plain, meter.Workload{User: "alice", UID: 4711, Kind: "docker", Name: "train", Project: "vision", AttributedBy: "label"}},
		{explicit, meter.Workload{User: "bob", UID: 4712, Kind: "docker", Name: "explicit", AttributedBy: "process_uid"}},
		{inherited, unattributed("inherited")},
		{system, unattributed("system")},
		{host, unattributed("host")}, // its uid is the image's, though its PIDs are the host's
	} {
		if got := r.workload(test.pid); got != test.want {
			t.Errorf("got  %+v\nwant %+v", got, test.want)
		}
	}
	if detail := r.Info(r.key(plain)).Detail; detail.ContainerName != "train" || detail.Image != dockertest.Image || len(detail.ContainerID) != 64 {
		t.Errorf("detail %+v", detail)
	}
	docker.Docker(t, "rename", "train", "train-2")
	await(t, "the new name is known", func() bool { r.pass(all...); return r.workload(plain).Name == "train-2" })
	if !r.Collectors()["docker"].Up {
		t.Errorf("collectors %+v", r.Collectors())
	}
}

func TestEngineStoppedAndStarted(t *testing.T) {
	docker := dockertest.Start(t)
	socket := filepath.Join(shortDir(t), "s")
	stop := forward(t, socket, docker.Socket)
	r := newRig(t, socket)
	first := docker.Run(t, "--name", "first", dockertest.Image, "sleep", "3600").PID
	r.pass(first)
	await(t, "the first is named", func() bool { r.pass(first); return r.workload(first).Name == "first" })

	stop()
	second := docker.Run(t, "--name", "second", dockertest.Image, "sleep", "3600")
	r.pass(first, second.PID)
	await(t, "nobody waits for an engine that is not there", func() bool {
		r.pass(first, second.PID)
		return !r.Attribute(r.key(second.PID)).Pending
	})
	if got := r.workload(second.PID); got.Kind != "docker" || got.Name != second.ID[:12] {
		t.Errorf("without an engine it is %+v", got)
	}
	r.turn(first, second.PID)
	if got := r.workload(first); got.Name != "first" {
		t.Errorf("a name that was known is lost: %+v", got)
	}

	forward(t, socket, docker.Socket)
	await(t, "the second is named once the engine is back", func() bool {
		r.turn(first, second.PID)
		return r.workload(second.PID).Name == "second"
	})
	if got := r.workload(first); got.Name != "first" {
		t.Errorf("the first is now %+v", got)
	}
}

func TestNoEngineOnThisHost(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "docker.sock")
	r := newRig(t, socket)
	plain := sleeper(t, uint32(os.Geteuid()))
	r.pass(plain.pid)
	r.settle(plain.pid) // it waits for no engine
	if _, there := r.Collectors()["docker"]; there {
		t.Error("an engine that nobody has asked for is reported")
	}
	c := contained(t, someID)
	r.pass(c.pid)
	await(t, "nothing is pending", func() bool { r.pass(c.pid); return !r.Attribute(r.key(c.pid)).Pending })
	if got := r.workload(c.pid); got.Kind != "docker" || got.Name != someID[:12] || !got.Unattributed() {
		t.Errorf("got %+v", got)
	}
	if state, there := r.Collectors()["docker"]; there {
		t.Errorf("an engine that is not installed is reported as %+v", state)
	}
	for i := range 20 { // each is another question that fails
		id := strings.Repeat("0123456789abcdef"[i%16:i%16+1], 63) + "f"
		await(t, "the engine is asked", func() bool {
			_, status := r.options.Engines[0].Lookup(id)
			return status == runtimes.StatusMissing
		})
	}
	if lines := strings.Count(r.log.String(), "\n"); lines > 1 {
		t.Errorf("%d lines in the log:\n%s", lines, r.log)
	}
}

func TestEngineThatHangs(t *testing.T) {
	r := newRig(t, hangingEngine(t))
	c := contained(t, someID)
	r.pass(c.pid)
	key, first := r.key(c.pid), r.clock
	for r.clock.Sub(first) < lookupPatience {
		if got := r.Attribute(key); !got.Pending || got.Workload.Name != someID[:12] {
			t.Fatalf("after %v: %+v", r.clock.Sub(first), got)
		}
		r.clock = r.clock.Add(time.Second)
		r.pass(c.pid)
	}
	if got := r.Attribute(key); got.Pending || got.Workload.Kind != "docker" || got.Workload.Name != someID[:12] {
		t.Errorf("after %v: %+v", lookupPatience, got)
	}
	r.turn(c.pid)
	if r.Attribute(key).Pending {
		t.Error("it is pending again")
	}
	await(t, "the hang is reported", func() bool {
		r.turn(c.pid)
		r.Attribute(key)
		state, there := r.Collectors()["docker"]
		return there && !state.Up && state.Error != ""
	})
}

func TestTwoEnginesOneHangs(t *testing.T) {
	second := filepath.Join(shortDir(t), "s")
	engine(t, second, map[string]runtimes.Container{
		someID: {Name: "train", Image: "pytorch", Labels: map[string]string{"owner": "bob"}},
	})
	hung := hangingEngine(t)
	for name, sockets := range map[string][]string{"hung first": {hung, second}, "hung last": {second, hung}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, sockets...)
			c := contained(t, someID)
			r.pass(c.pid)
			await(t, "the other answers", func() bool { r.pass(c.pid); return !r.Attribute(r.key(c.pid)).Pending })
			want := meter.Workload{User: "bob", UID: 4712, Kind: "docker", Name: "train", AttributedBy: "label"}
			if got := r.workload(c.pid); got != want {
				t.Errorf("got %+v, want %+v", got, want)
			}
			stranger := contained(t, strings.Repeat("f", 64))
			r.pass(c.pid, stranger.pid)
			key := r.key(stranger.pid)
			await(t, "the one that answers knows nothing", func() bool {
				_, status := r.options.Engines[0].Lookup(strings.Repeat("f", 64))
				_, other := r.options.Engines[1].Lookup(strings.Repeat("f", 64))
				return status == runtimes.StatusMissing || other == runtimes.StatusMissing
			})
			if !r.Attribute(key).Pending {
				t.Error("nobody waits for the one that hangs, which may know it")
			}
			r.clock = r.clock.Add(lookupPatience)
			r.pass(c.pid, stranger.pid)
			if got := r.Attribute(key); got.Pending || got.Workload.Name != strings.Repeat("f", 12) {
				t.Errorf("after the patience it is %+v", got)
			}
		})
	}
}

func TestOwnEngines(t *testing.T) {
	for _, test := range []struct {
		socket, cgroup string
		want           bool
	}{
		{"/run/docker.sock", "0::/system.slice/docker-" + someID + ".scope\n", true},
		{"/run/docker.sock", "0::/user.slice/user-4711.slice/user@4711.service/user.slice/docker-" + someID + ".scope\n", false},
		{"/run/user/4711/docker.sock", "0::/user.slice/user-4711.slice/user@4711.service/user.slice/docker-" + someID + ".scope\n", true},
		{"/var/run/user/4711/docker.sock", "0::/user.slice/user-4711.slice/user@4711.service/user.slice/docker-" + someID + ".scope\n", true},
		{"/run/user/4712/docker.sock", "0::/user.slice/user-4711.slice/user@4711.service/user.slice/docker-" + someID + ".scope\n", false},
		{"/run/user/4711/docker.sock", "0::/system.slice/docker-" + someID + ".scope\n", false},
		{"/run/user/4711/../../docker.sock", "0::/system.slice/docker-" + someID + ".scope\n", true},
	} {
		if got := mayKnow("docker", test.socket, chainOf(test.cgroup)); got != test.want {
			t.Errorf("%s may know %q: %v, want %v", test.socket, test.cgroup, got, test.want)
		}
	}
}
