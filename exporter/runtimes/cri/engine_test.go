package cri_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/cri"
	"gpuledger/exporter/runtimes/cri/containerdtest"
)

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !condition(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func TestRealContainerd(t *testing.T) {
	engine := containerdtest.Start(t)
	pod := engine.RunPod(t, "vision", "train-0", map[string]string{"team": "blue"})
	given := pod.Run(t, "main", 1234)
	inherited := pod.Run(t, "side", -1)
	client := cri.NewClient([]string{engine.Socket}, nil)
	c, err := client.Container(t.Context(), given.ID)
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "main" || c.Runtime != "containerd" || c.Image != containerdtest.Image || c.User != "1234" || c.ImageUser != "1000" ||
		!c.ImageKnown || c.PID != given.PID || c.StartedAt.IsZero() || c.Labels["io.kubernetes.container.name"] != "main" {
		t.Errorf("container %+v", c)
	}
	if c.Pod == nil || c.Pod.Namespace != "vision" || c.Pod.Name != "train-0" || c.Pod.UID != pod.UID || c.Pod.Labels["team"] != "blue" ||
		c.Pod.Annotations["example.com/note"] != "kept" {
		t.Errorf("pod %+v", c.Pod)
	}
	if c, err = client.Container(t.Context(), inherited.ID); err != nil || c.User != "1000" || c.Name != "side" {
		t.Errorf("inherited user: %+v, %v", c, err)
	}
	for _, id := range []string{strings.Repeat("0", 64), pod.SandboxID, "../../etc"} {
		if _, err := client.Container(t.Context(), id); !errors.Is(err, runtimes.ErrNoSuchContainer) {
			t.Errorf("container %s: %v", id, err)
		}
	}
	disk := runtimes.NewBundles([]string{engine.Socket})
	c, err = disk.Container(t.Context(), given.ID)
	if err != nil || c.Name != "main" || c.Pod == nil || c.Pod.Namespace != "vision" || c.Pod.Name != "train-0" || c.Image != containerdtest.Image {
		t.Errorf("from disk: %+v, %v", c, err)
	}
	if _, err := disk.Container(t.Context(), pod.SandboxID); !errors.Is(err, runtimes.ErrNoSuchContainer) {
		t.Errorf("sandbox from disk: %v", err)
	}

	pods, err := client.Pods(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	state := pods["vision/train-0"]
	if state.Pod.UID != pod.UID || state.Ended || state.Containers["main"] != given.ID || state.Containers["side"] != inherited.ID || state.Since.IsZero() {
		t.Errorf("pods %+v", pods)
	}

	changes := make(chan string, 64)
	opened := make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	following := make(chan error, 1)
	go func() {
		following <- client.Follow(ctx, func() { opened <- struct{}{} }, func(id string) { changes <- id })
	}()
	<-opened
	pod.StopContainer(t, inherited.ID)
	select {
	case id := <-changes:
		if id != inherited.ID {
			t.Errorf("%s is said to have changed", id)
		}
	case <-time.After(30 * time.Second):
		t.Error("the end of a container was not noticed within 30 s")
	}
	cancel()
	<-following
	pod.Stop(t)
	if pods, err = client.Pods(t.Context()); err != nil || !pods["vision/train-0"].Ended {
		t.Errorf("after the pod's end: %+v, %v", pods, err)
	}

	engine.Kill(t)
	if _, err := client.Container(t.Context(), given.ID); err == nil || errors.Is(err, runtimes.ErrNoSuchContainer) {
		t.Errorf("of a killed engine: %v", err)
	}
	engine.Up(t)
	eventually(t, "the engine answers again", func() bool {
		c, err := client.Container(t.Context(), given.ID)
		return err == nil && c.Name == "main" && c.PID == 0
	})
}
