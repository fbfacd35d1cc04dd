package cri

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/runtimes"
)

const someID = "7951fb549ab99e0722a949b6c121634e1f3a36b5bacbe5392991e3b12251e6b8"

func shortDir(t *testing.T) string {
	t.Helper()
	folder, err := os.MkdirTemp("", "cri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(folder) })
	return folder
}

func TestNoSocketCostsNothing(t *testing.T) {
	folder := shortDir(t)
	c := NewClient([]string{filepath.Join(folder, "a"), filepath.Join(folder, "b")}, nil)
	begun := time.Now()
	if _, err := c.Container(t.Context(), someID); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("Container: %v", err)
	}
	if _, err := c.Pods(t.Context()); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("Pods: %v", err)
	}
	if err := c.Follow(t.Context(), func() {}, func(string) {}); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("Follow: %v", err)
	}
	if took := time.Since(begun); took > time.Second {
		t.Errorf("it took %v", took)
	}
	if _, err := NewClient(nil, nil).Container(t.Context(), someID); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("no socket configured: %v", err)
	}
}

// TestHungSocket has a socket that takes connections and never answers.
func TestHungSocket(t *testing.T) {
	socket := filepath.Join(shortDir(t), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	c := NewClient([]string{socket}, nil)
	begun := time.Now()
	_, err = c.Container(t.Context(), someID)
	if err == nil || errors.Is(err, runtimes.ErrNoEngine) || errors.Is(err, runtimes.ErrNoSuchContainer) {
		t.Errorf("error %v", err)
	}
	if took := time.Since(begun); took > 2*callTimeout {
		t.Errorf("it took %v", took)
	}
}

// TestDiskTellsWhileTheEngineHangs wants what the bundle says, beside the
// error.
func TestDiskTellsWhileTheEngineHangs(t *testing.T) {
	folder := shortDir(t)
	socket := filepath.Join(folder, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	bundle := filepath.Join(folder, "io.containerd.runtime.v2.task", "k8s.io", someID)
	if err := os.MkdirAll(bundle, 0o700); err != nil {
		t.Fatal(err)
	}
	text := `{"annotations":{"io.kubernetes.cri.container-type":"container","io.kubernetes.cri.container-name":"main",
		"io.kubernetes.cri.sandbox-name":"train-0","io.kubernetes.cri.sandbox-namespace":"vision"}}`
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := NewClient([]string{socket}, runtimes.NewBundles([]string{socket}))
	container, err := c.Container(t.Context(), someID)
	if err == nil || container.Pod == nil || container.Pod.Name != "train-0" || container.Name != "main" {
		t.Errorf("%+v, %v", container, err)
	}
	d := runtimes.NewDirectory(c, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); d.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if container, status := d.Lookup(someID); status == runtimes.StatusFound {
			if container.Pod.Namespace != "vision" {
				t.Errorf("found %+v", container)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("not found within 20 s")
		}
	}
	if state, _ := d.State(); state.Up || !strings.Contains(state.Error, "no answer") {
		t.Errorf("state %+v", state)
	}
}

func TestReadInfo(t *testing.T) {
	for _, test := range []struct {
		document, user, sandbox string
		pid                     uint32
	}{
		{"", "", "", 0},
		{"{", "", "", 0},
		{`{"pid":-1}`, "", "", 0},
		{`{"sandboxID":"` + someID + `","pid":77,"config":{"linux":{"security_context":{"run_as_user":{"value":1234}}}}}`, "1234", someID, 77},
		{`{"sandboxID":"../..","pid":77,"config":{"linux":{"security_context":{"run_as_user":{},"run_as_username":"x"}}}}`, "0", "", 77},
		{`{"config":{"linux":{"security_context":{"run_as_username":"alice"}}}}`, "alice", "", 0},
	} {
		if got := readInfo(test.document); got.user() != test.user || got.SandboxID != test.sandbox || got.PID != test.pid {
			t.Errorf("%s: %q %q %d", test.document, got.user(), got.SandboxID, got.PID)
		}
	}
}
