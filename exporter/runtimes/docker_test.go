package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"gpuledger/exporter/runtimes/dockertest"
)

const someID = "7951fb549ab99e0722a949b6c121634e1f3a36b5bacbe5392991e3b12251e6b8"

// serve answers on a unix socket as an engine would.
func serve(t *testing.T, handler http.HandlerFunc) *DockerClient {
	t.Helper()
	folder, err := os.MkdirTemp("", "engine")
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(folder, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: handler}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close(); os.RemoveAll(folder) })
	return NewDockerClient(socket)
}

func run(t *testing.T, d *Directory) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); d.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
}

func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !condition(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func TestChooseVersion(t *testing.T) {
	for _, test := range []struct{ newest, oldest, want string }{
		{"1.41", "1.12", "1.41"},
		{"1.41", "", "1.41"},
		{"1.60", "1.44", newestVersion},
		{"1.99", "1.80", "1.80"},
		{"1.60", "", newestVersion},
		{"", "", ""}, {"1", "", ""}, {"x.y", "", ""}, {"1.60", "junk", ""}, {"1.99999999", "", ""},
	} {
		got, err := chooseVersion(test.newest, test.oldest)
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("chooseVersion(%q, %q) = %q, %v; want %q", test.newest, test.oldest, got, err, test.want)
		}
	}
}

func TestRealEngine(t *testing.T) {
	engine := dockertest.Start(t)
	engine.Import(t, "with-user:test", "USER 1000", "LABEL owner=image-author", "LABEL team=vision")
	plain := engine.Run(t, "--name", "train", "--user", "1234", "--label", "gpuledger.user=alice", dockertest.Image, "/bin/sleep", "1000")
	inherited := engine.Run(t, "--name", "notebook", "with-user:test", "/bin/sleep", "1000")

	client := NewDockerClient(engine.Socket)
	c, err := client.Container(t.Context(), plain.ID)
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "train" || c.Labels["gpuledger.user"] != "alice" || c.Image != dockertest.Image || c.User != "1234" ||
		c.ImageUser != "" || !c.ImageKnown || c.StartedAt.IsZero() {
		t.Errorf("plain: %+v", c)
	}
	if c, err = client.Container(t.Context(), inherited.ID); err != nil {
		t.Fatal(err)
	}
	if c.User != "1000" || c.ImageUser != "1000" || c.Labels["owner"] != "image-author" || c.ImageLabels["team"] != "vision" {
		t.Errorf("inherited: %+v", c)
	}
	if _, err := client.Container(t.Context(), someID); !errors.Is(err, ErrNoSuchContainer) {
		t.Errorf("unknown id: %v", err)
	}
	if _, err := client.Container(t.Context(), "../../etc"); !errors.Is(err, ErrNoSuchContainer) {
		t.Errorf("not an id: %v", err)
	}

	d := NewDirectory(client, nil)
	if _, asked := d.State(); asked {
		t.Error("the engine was asked before anyone wanted something")
	}
	run(t, d)
	eventually(t, "the name is found", func() bool { c, s := d.Lookup(plain.ID); return s == StatusFound && c.Name == "train" })
	if state, asked := d.State(); !state.Up || !asked || state.Error != "" {
		t.Errorf("state %+v", state)
	}
	before := d.Generation()
	eventually(t, "a rename is noticed", func() bool {
		// The stream may open after the first rename; the name then comes with
		// the refresh that follows.
		c, s := d.Lookup(plain.ID)
		if s == StatusFound && c.Name == "train" {
			engine.Docker(t, "rename", "train", "train2")
		}
		return s == StatusFound && c.Name == "train2"
	})
	if d.Generation() == before {
		t.Error("the generation stood still over a rename")
	}
	engine.Docker(t, "rm", "-f", inherited.ID)
	eventually(t, "a removed container never known is missing", func() bool { _, s := d.Lookup(inherited.ID); return s == StatusMissing })
	engine.Docker(t, "rm", "-f", plain.ID)
	for range 20 {
		if c, s := d.Lookup(plain.ID); s != StatusFound || c.Name != "train2" {
			t.Fatalf("a known container lost its name after its end: %+v, %v", c, s)
		}
	}
}

func TestNoEngineIsNoTrouble(t *testing.T) {
	d := NewDirectory(NewDockerClient(filepath.Join(t.TempDir(), "none")), nil)
	run(t, d)
	eventually(t, "missing", func() bool { _, s := d.Lookup(someID); return s == StatusMissing })
	eventually(t, "state", func() bool { s, asked := d.State(); return !s.Up && !asked })
}

func TestHangingEngineIsNotInTheWay(t *testing.T) {
	release := make(chan struct{})
	client := serve(t, func(w http.ResponseWriter, r *http.Request) { <-release })
	t.Cleanup(func() { close(release) })
	d := NewDirectory(client, nil)
	run(t, d)
	started := time.Now()
	for range 1000 {
		if _, status := d.Lookup(someID); status != StatusWaiting {
			t.Fatalf("status %v", status)
		}
	}
	if took := time.Since(started); took > requestTimeout {
		t.Errorf("1000 look-ups took %v", took)
	}
}

func TestEngineInTroubleIsAskedAgain(t *testing.T) {
	var broken atomic.Bool
	broken.Store(true)
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		switch {
		case broken.Load():
			http.Error(w, "trouble\x00\n\xff", http.StatusInternalServerError)
		case r.URL.Path == "/version":
			json.NewEncoder(w).Encode(map[string]string{"ApiVersion": "1.44", "MinAPIVersion": "1.40"})
		case strings.HasPrefix(r.URL.Path, "/v1.44/containers/"):
			json.NewEncoder(w).Encode(map[string]any{"Id": someID, "Name": "/a\nb\xff\"", "Image": "sha256:x"})
		default:
			http.NotFound(w, r)
		}
	})
	d := NewDirectory(client, nil)
	var skip atomic.Int64
	d.now = func() time.Time { return time.Now().Add(time.Duration(skip.Load())) }
	run(t, d)
	d.Lookup(someID)
	eventually(t, "the trouble shows", func() bool { s, _ := d.State(); return strings.Contains(s.Error, "500") })
	if _, status := d.Lookup(someID); status != StatusWaiting {
		t.Errorf("status %v in trouble", status)
	}
	broken.Store(false)
	skip.Store(int64(retryAfter))
	eventually(t, "found", func() bool { _, s := d.Lookup(someID); return s == StatusFound })
	c, _ := d.Lookup(someID)
	if c.Name != "a\uFFFDb\uFFFD\"" || c.ImageKnown {
		t.Errorf("container %+q", c.Name)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/version" {
			w.Write([]byte(`{"ApiVersion":"1.41"}`))
			return
		}
		w.Write([]byte(`{"Name":"` + strings.Repeat("a", maxAnswerBytes) + `"}`))
	})
	if _, err := client.Container(t.Context(), someID); err == nil || !strings.Contains(err.Error(), "longer") {
		t.Errorf("error %v", err)
	}
}

func TestAnswerForAnotherContainerIsRefused(t *testing.T) {
	client := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Write([]byte(`{"ApiVersion":"1.41","Id":"` + strings.Repeat("0", 64) + `","Name":"/x"}`))
	})
	if c, err := client.Container(t.Context(), someID); err == nil {
		t.Errorf("took %+v", c)
	}
}
