package kubelet

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/kubelet/kubelettest"
)

const (
	uuid = "GPU-01234567-89ab-cdef-0123-456789abcdef"
	mig  = "MIG-11234567-89ab-cdef-0123-456789abcdef"
	uid  = "2fa1f2a5-4d4e-4a3f-8f1c-3d1b2c3d4e5f"
)

var containerID = strings.Repeat("a", 64)

func TestDevices(t *testing.T) {
	for _, test := range []struct {
		id   string
		want runtimes.Device
		ok   bool
	}{
		{uuid, runtimes.ByUUID(uuid), true},
		{mig, runtimes.ByUUID(mig), true},
		{uuid + "::3", runtimes.ByUUID(uuid), true},
		{mig + "::0", runtimes.ByUUID(mig), true},
		{uuid + "-7", runtimes.ByUUID(uuid), true},
		{"MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/7/0", runtimes.ByUUID("MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/7/0"), true},
		{"nvidia3", runtimes.ByMinor(3), true},
		{"nvidia3/vgpu1", runtimes.ByMinor(3), true},
		{"nvidia3/gi2", runtimes.Device{}, false},
		{"GPU-0123", runtimes.Device{}, false},
		{"0000:3b:00.0", runtimes.Device{}, false},
		{"card0-1", runtimes.Device{}, false},
		{"all", runtimes.Device{}, false},
		{"", runtimes.Device{}, false},
	} {
		if got, ok := pluginDevice(test.id); ok != test.ok || ok && got != test.want {
			t.Errorf("%q: %+v, %v", test.id, got, ok)
		}
	}
	container := kubelettest.Pod("n", "p", "c", "nvidia.com/gpu.shared", uuid+"::0", uuid+"::1").Containers[0]
	container.DynamicResources = []*podresources.DynamicResource{{ClaimResources: []*podresources.ClaimResource{
		{DriverName: "gpu.nvidia.com", DeviceName: "gpu-2"}, {DriverName: "gpu.nvidia.com", DeviceName: "gpu-2-mig-9-0-1"},
		{DriverName: "gpu.example.com", DeviceName: "gpu-3"},
	}}}
	if diff := cmp.Diff([]runtimes.Device{runtimes.ByUUID(uuid), runtimes.ByMinor(2)}, given(container)); diff != "" {
		t.Errorf("devices: %s", diff)
	}
}

// engines are what stands for container engines.
type engines struct {
	pods map[string]runtimes.PodState
	err  error
}

func (e *engines) list(context.Context) (map[string]runtimes.PodState, error) { return e.pods, e.err }

func running(name string) runtimes.PodState {
	return runtimes.PodState{
		Pod: runtimes.Pod{Namespace: "vision", Name: name, UID: uid}, Since: time.Unix(1000, 0),
		Containers: map[string]string{"main": containerID},
	}
}

// names are what grants are to, and where.
func names(grants []runtimes.Grant) string {
	var all []string
	for _, grant := range grants {
		name := "?"
		if grant.Pod != nil {
			name = grant.Pod.Namespace + "/" + grant.Pod.Name + "/" + grant.Container
		}
		for _, level := range grant.Levels {
			name += " " + string(level.Kind) + "=" + level.ID[:min(8, len(level.ID))]
		}
		all = append(all, name)
	}
	return strings.Join(all, "; ")
}

func TestGrantsOfPods(t *testing.T) {
	kubelet := kubelettest.Start(t)
	e := &engines{err: runtimes.ErrNoEngine}
	checkpoint := filepath.Join(t.TempDir(), "checkpoint") // of a time before: not to be read once the kubelet has answered
	old := `{"Data":{"PodDeviceEntries":[{"PodUID":"x","ContainerName":"old","DeviceIDs":["` + uuid + `"]}]}}`
	if err := os.WriteFile(checkpoint, []byte(old), 0o600); err != nil {
		t.Fatal(err)
	}
	clock := time.Now()
	w := New(Options{Socket: kubelet.Socket, Checkpoint: checkpoint, Pods: e.list, Now: func() time.Time { return clock }})
	kubelet.Give(kubelettest.Pod("vision", "train-0", "main", "nvidia.com/gpu", uuid), kubelettest.Pod("vision", "web", "main", "cpu", "x"))
	look := func(want string) {
		t.Helper()
		w.look(t.Context())
		if got := names(w.Grants()); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	look("vision/train-0/main pod=")
	if state, asked := w.State(); !asked || !state.Up {
		t.Errorf("state %+v, %v", state, asked)
	}
	before := w.Generation()
	w.look(t.Context())
	if w.Generation() != before {
		t.Error("the generation grew and nothing changed")
	}
	// The container is there: the grant is where its processes are.
	e.pods, e.err = map[string]runtimes.PodState{"vision/train-0": running("train-0")}, nil
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	if w.Generation() == before {
		t.Error("the generation stood still")
	}
	grant := w.Grants()[0]
	if !grant.Exclusive || grant.UID != -1 || !grant.Since.Equal(time.Unix(1000, 0)) || !cmp.Equal(grant.Devices, []runtimes.Device{runtimes.ByUUID(uuid)}) ||
		grant.Levels[0].System != cgroup.RuntimeKubernetes {
		t.Errorf("grant %+v", grant)
	}
	// Engines that are away, and a kubelet that is, take nothing back.
	e.pods, e.err = nil, errors.New("away")
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	// So does one of several.
	e.pods, e.err = map[string]runtimes.PodState{"other/pod": {Pod: runtimes.Pod{Namespace: "other", Name: "pod"}}}, errors.New("one is away")
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	kubelet.Kill()
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	if state, asked := w.State(); !asked || state.Up || state.Error == "" {
		t.Errorf("state of a dead kubelet %+v, %v", state, asked)
	}
	// The kubelet starts, and has not heard of its pods yet.
	kubelet.Give()
	kubelet.Up(t)
	e.pods, e.err = map[string]runtimes.PodState{"vision/train-0": running("train-0")}, nil
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		w.look(t.Context())
		if state, _ := w.State(); state.Up {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the kubelet is not asked again")
		}
	}
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	clock = clock.Add(restartWithin)
	look("")
	// The pod has ended, which the kubelet does not say.
	kubelet.Give(kubelettest.Pod("vision", "train-0", "main", "nvidia.com/gpu", uuid))
	look("vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa")
	ended := running("train-0")
	ended.Ended = true
	e.pods, e.err = map[string]runtimes.PodState{"vision/train-0": ended}, nil
	look("")
	e.pods = map[string]runtimes.PodState{} // removed
	look("")
	kubelet.Give()
	look("")
	kubelet.Give(kubelettest.Pod("vision", "train-0", "main", "nvidia.com/gpu", uuid)) // its next namesake
	look("vision/train-0/main pod=")
}

func TestCheckpoint(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "kubelet_internal_checkpoint")
	write := func(content string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	e := &engines{err: runtimes.ErrNoEngine}
	options := Options{
		Socket: filepath.Join(folder, "none"), Checkpoint: path, Pods: e.list,
		PodByUID: func(string) (runtimes.Pod, error) { return runtimes.Pod{Namespace: "logs", Name: "train-0"}, nil },
	}
	w := New(options)
	w.look(t.Context())
	if state, asked := w.State(); asked || len(w.Grants()) > 0 {
		t.Errorf("no kubelet at all: %+v, %v", state, w.Grants())
	}
	write(`{"Data":{"PodDeviceEntries":[
		{"PodUID":"` + uid + `","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["` + uuid + `"],"-1":["` + mig + `"]},"AllocResp":"AA=="},
		{"PodUID":"other","ContainerName":"nic","ResourceName":"rdma/hca","DeviceIDs":{"-1":["3"]}}],
		"RegisteredDevices":{"nvidia.com/gpu":["x"]}},"Checksum":123}`)
	w.look(t.Context())
	if got := names(w.Grants()); got != "logs/train-0/main pod=2fa1f2a5" {
		t.Errorf("by the logs: %q", got)
	}
	e.pods, e.err = map[string]runtimes.PodState{"vision/train-0": running("train-0")}, nil
	w.look(t.Context())
	if got := names(w.Grants()); got != "vision/train-0/main pod=2fa1f2a5 container=aaaaaaaa" {
		t.Errorf("by the engines: %q", got)
	}
	if got := w.Grants()[0].Devices; !cmp.Equal(got, []runtimes.Device{runtimes.ByUUID(mig), runtimes.ByUUID(uuid)}) {
		t.Errorf("devices %+v", got)
	}
	state := e.pods
	e.pods = map[string]runtimes.PodState{}
	w = New(options)
	w.look(t.Context())
	if got := w.Grants(); len(got) != 0 {
		t.Errorf("an entry of a pod that no engine has is left: %+v", got)
	}
	e.pods = state
	write(`{"Data":{"PodDeviceEntries":[{"PodUID":"` + uid + `","ContainerName":"main","DeviceIDs":["` + uuid + `"]}]}}`)
	w.look(t.Context())
	if got := w.Grants(); len(got) != 1 || len(got[0].Devices) != 1 {
		t.Errorf("the old form: %+v", got)
	}
	write(`{"Data":{"PodDev`)
	w.look(t.Context())
	if state, asked := w.State(); !asked || !strings.Contains(state.Error, "checkpoint") {
		t.Errorf("a torn file: %+v", state)
	}
	if len(w.Grants()) != 1 {
		t.Error("a torn file takes back what was given")
	}
}
