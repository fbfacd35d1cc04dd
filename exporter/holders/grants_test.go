package holders

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/runtimes"
)

// scheduler is a granter whose word the test changes.
type scheduler struct {
	grants     []runtimes.Grant
	generation uint64
}

func (s *scheduler) Grants() []runtimes.Grant { return s.grants }
func (s *scheduler) Generation() uint64       { return s.generation }

func (s *scheduler) say(grants ...runtimes.Grant) {
	s.grants = grants
	s.generation++
}

func containerLevels(id string) []cgroup.Level {
	return []cgroup.Level{{Kind: cgroup.LevelContainer, System: "docker", ID: id}}
}

func TestMatching(t *testing.T) {
	whole := gpu.Reading{Card: gpu.Card{UUID: "GPU-aaaa", Index: 2, Minor: gpu.Some[int64](5)}}
	cut := gpu.Reading{
		Card: gpu.Card{UUID: "GPU-bbbb", Index: 3}, SlicesTotal: 7,
		Instances: []gpu.Instance{{UUID: "MIG-1"}, {UUID: "MIG-2"}},
	}
	instance := runtimes.ByIndex(3)
	instance.Instance = 1
	beyond := instance
	beyond.Instance = 2
	for _, test := range []struct {
		name    string
		device  runtimes.Device
		reading gpu.Reading
		want    []string
	}{
		{"uuid", runtimes.ByUUID("GPU-aaaa"), whole, []string{"GPU-aaaa"}},
		{"beginning of a uuid", runtimes.ByUUID("GPU-aa"), whole, []string{"GPU-aaaa"}},
		{"another uuid", runtimes.ByUUID("GPU-b"), whole, nil},
		{"index", runtimes.ByIndex(2), whole, []string{"GPU-aaaa"}},
		{"another index", runtimes.ByIndex(5), whole, nil},
		{"minor", runtimes.ByMinor(5), whole, []string{"GPU-aaaa"}},
		{"another minor", runtimes.ByMinor(2), whole, nil},
		{"minor of a card that does not say", runtimes.ByMinor(0), cut, nil},
		{"all", runtimes.AllDevices(), whole, []string{"GPU-aaaa"}},
		{"all of a cut card", runtimes.AllDevices(), cut, []string{"MIG-1", "MIG-2"}},
		{"a cut card", runtimes.ByUUID("GPU-bbbb"), cut, []string{"MIG-1", "MIG-2"}},
		{"an instance", runtimes.ByUUID("MIG-2"), cut, []string{"MIG-2"}},
		{"an instance by number", instance, cut, []string{"MIG-2"}},
		{"an instance that is not there", beyond, cut, nil},
		{"an instance of another card", instance, whole, nil},
		{"nothing", runtimes.Device{Index: -1, Minor: -1, Instance: -1}, whole, nil},
	} {
		if diff := cmp.Diff(test.want, matching(test.device, &test.reading)); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

// TestGrantWithoutProcess has a workload that was given a card and runs
// nothing.
func TestGrantWithoutProcess(t *testing.T) {
	r := newRig(t)
	s := &scheduler{}
	r.options.Granters = []runtimes.Granter{s}
	r.pass()
	now := reading()
	if given := r.Given(&now); len(given) != 0 {
		t.Fatalf("given %+v before anything was", given)
	}
	id := strings.Repeat("ab", 32)
	since := time.Unix(1_790_000_000, 0)
	s.say(runtimes.Grant{
		Devices: []runtimes.Device{runtimes.ByUUID("GPU-1"), runtimes.AllDevices()}, Exclusive: true, Levels: containerLevels(id), UID: -1, Since: since,
	})
	r.pass()
	given := r.Given(&now)
	if len(given) != 1 || given[0].Device != "GPU-1" || !given[0].Exclusive || !given[0].Since.Equal(since) {
		t.Fatalf("given %+v", given)
	}
	workload := r.Attribute(given[0].Key).Workload
	if want := (meter.Workload{User: meter.UserUnattributed, UID: -1, Kind: "docker", Name: id[:12], AttributedBy: "none"}); workload != want {
		t.Errorf("workload %+v, want %+v", workload, want)
	}
	// Passes on it stays the same grant, longer than what is gone is remembered.
	for range 3 {
		r.clock = r.clock.Add(rememberedFor)
		r.pass()
	}
	if again := r.Given(&now); len(again) != 1 || again[0].Key != given[0].Key {
		t.Errorf("given %+v, before %+v", again, given)
	}
	s.say()
	r.pass()
	if given := r.Given(&now); len(given) != 0 {
		t.Errorf("given %+v after it was taken back", given)
	}
	// An interval that waits may still ask.
	if after := r.Attribute(given[0].Key).Workload; after != workload {
		t.Errorf("workload %+v after it was taken back", after)
	}
	r.clock = r.clock.Add(2 * rememberedFor)
	r.pass()
	if len(r.processes) != 0 {
		t.Errorf("%d processes are kept for ever", len(r.processes))
	}
}

// TestGrantIsOneWorkloadWithItsProcesses reads a process of the workload where
// there is one, since its uid and slice name the user.
func TestGrantIsOneWorkloadWithItsProcesses(t *testing.T) {
	r := newRig(t)
	id := strings.Repeat("cd", 32)
	path := "/user.slice/user-4711.slice/user@4711.service/user.slice/docker-" + id + ".scope"
	worker, first := sleeper(t, 4711), sleeper(t, 4711)
	inCgroup(t, worker, path)
	inCgroup(t, first, path)
	s := &scheduler{}
	r.options.Granters = []runtimes.Granter{s}
	s.say(runtimes.Grant{Devices: []runtimes.Device{runtimes.AllDevices()}, Levels: containerLevels(id), UID: 4711, PID: first.pid})
	r.pass(worker.pid)
	now := reading()
	given := r.Given(&now)
	if len(given) != 1 {
		t.Fatalf("given %+v", given)
	}
	of, process := r.Attribute(given[0].Key).Workload, r.workload(worker.pid)
	if of != process || of.User != "alice" {
		t.Errorf("the grant is %+v, its process %+v", of, process)
	}
	// A number that came to mean a process elsewhere says nothing.
	stranger := sleeper(t, 4712)
	s.say(runtimes.Grant{Devices: []runtimes.Device{runtimes.ByUUID("GPU-1")}, Levels: containerLevels(id), UID: -1, PID: stranger.pid})
	r.pass(worker.pid)
	if given = r.Given(&now); len(given) != 1 {
		t.Fatalf("given %+v", given)
	}
	if user := r.Attribute(given[0].Key).Workload.User; user != meter.UserUnattributed {
		t.Errorf("the grant is %s's, whose process is elsewhere", user)
	}
}

func TestGrantsAreBounded(t *testing.T) {
	r := newRig(t)
	s := &scheduler{}
	r.options.Granters = []runtimes.Granter{s}
	for n := range 2 * maxGrants {
		s.grants = append(s.grants, runtimes.Grant{Devices: []runtimes.Device{runtimes.ByIndex(n)}, Levels: containerLevels(strings.Repeat("ef", 32)), UID: -1})
	}
	s.generation++
	r.pass()
	if len(r.grants.known) != maxGrants {
		t.Errorf("%d grants are kept", len(r.grants.known))
	}
}

// TestGrantToPod has a pod that was given a card: it goes by the names of
// whoever gave it, before and after it has a container.
func TestGrantToPod(t *testing.T) {
	r := newRig(t)
	s := &scheduler{}
	r.options.Granters = []runtimes.Granter{s}
	const uid = "2fa1f2a5-4d4e-4a3f-8f1c-3d1b2c3d4e5f"
	grant := runtimes.Grant{
		Devices: []runtimes.Device{runtimes.ByUUID("GPU-1")}, Exclusive: true, UID: -1,
		Levels: []cgroup.Level{{Kind: cgroup.LevelPod, System: cgroup.RuntimeKubernetes, ID: uid}},
		Pod:    &runtimes.Pod{Namespace: "vision", Name: "train-0", UID: uid}, Container: "main",
	}
	want := meter.Workload{User: "unattributed", UID: -1, Kind: "kubernetes", Name: "vision/train-0/main", Project: "vision", AttributedBy: "none"}
	now := reading()
	check := func(what string) {
		t.Helper()
		s.say(grant)
		r.pass()
		given := r.Given(&now)
		if len(given) != 1 {
			t.Fatalf("%s: given %+v", what, given)
		}
		if got := r.Attribute(given[0].Key); got.Workload != want || got.Pending {
			t.Errorf("%s: %+v", what, got)
		}
		if detail := r.Info(given[0].Key).Detail; detail.PodNamespace != "vision" || detail.PodName != "train-0" {
			t.Errorf("%s: detail %+v", what, detail)
		}
	}
	check("without a container")
	grant.Levels = append(grant.Levels, cgroup.Level{Kind: cgroup.LevelContainer, System: cgroup.RuntimeKubernetes, ID: someID})
	check("in a container that no engine knows")
	grant.Levels = []cgroup.Level{{Kind: cgroup.LevelPod, System: cgroup.RuntimeKubernetes}}
	check("without anything but names")
}
