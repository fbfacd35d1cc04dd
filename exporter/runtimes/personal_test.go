package runtimes

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// personalEngine answers in uid's runtime directory to any id.
func personalEngine(t *testing.T, dir string, uid int) {
	t.Helper()
	home := filepath.Join(dir, strconv.Itoa(uid))
	if err := os.MkdirAll(home, 0o755); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", filepath.Join(home, "docker.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/version":
			_ = json.NewEncoder(w).Encode(map[string]string{"ApiVersion": "1.44"})
		case strings.HasPrefix(r.URL.Path, "/v1.44/containers/"):
			_ = json.NewEncoder(w).Encode(map[string]any{"Id": strings.Split(r.URL.Path, "/")[3], "Name": "/mine"})
		default:
			http.NotFound(w, r)
		}
	})}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
}

func TestPersonalEngines(t *testing.T) {
	dir, err := os.MkdirTemp("", "personal")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	own, other := os.Geteuid(), os.Geteuid()+1
	personalEngine(t, dir, own)
	personalEngine(t, dir, other) // we listen there, not that person
	p := NewPersonal(nil, nil)
	p.dir = dir
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = p.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })

	before := p.Generation()
	eventually(t, "a person's engine is found", func() bool {
		c, s := p.Of(uint32(own))[0].Lookup(someID)
		return s == StatusFound && c.Name == "mine"
	})
	if p.Generation() == before {
		t.Error("the generation stood still")
	}
	docker := p.Of(uint32(other))[0]
	docker.Lookup(someID)
	eventually(t, "a socket that somebody else listens at is refused", func() bool {
		state, _ := docker.State()
		return strings.Contains(state.Error, "listens")
	})
	if c, s := docker.Lookup(someID); s == StatusFound {
		t.Errorf("believed %+v", c)
	}

	for uid := range uint32(10 * maxPersonal) {
		p.Of(100_000 + uid)
	}
	if len(p.engines) != maxPersonal || p.Of(999_999) != nil {
		t.Errorf("%d people's engines are kept", len(p.engines))
	}
	before = p.Generation()
	p.mutex.Lock()
	for _, each := range p.engines {
		each.usedAt = time.Now().Add(-personalUnused - time.Second)
	}
	p.mutex.Unlock()
	if p.Of(999_999) == nil || len(p.engines) != 1 || p.Generation() <= before {
		t.Errorf("%d are left, generation %d after %d", len(p.engines), p.Generation(), before)
	}
}

func TestFullDirectoryKeepsWhatIsInUse(t *testing.T) {
	d := newDirectory(NewDockerClient("/nonexistent"), nil, 8)
	now := time.Unix(0, 0)
	d.now = func() time.Time { return now }
	id := func(i int) string { return strings.Repeat("0", 60) + strconv.Itoa(1000+i) }
	for i := range 8 {
		d.Lookup(id(i))
		now = now.Add(time.Second)
	}
	for _, e := range d.containers {
		e.asking = false
	}
	if d.Lookup(id(100)); d.containers[id(100)] != nil {
		t.Fatal("room was made among answers in use")
	}
	d.containers[id(5)].ended = true
	now = now.Add(inUse)
	d.Lookup(id(0))
	d.Lookup(id(101))
	for i, want := range map[int]bool{0: true, 1: false, 2: true, 5: false, 101: true} {
		if got := d.containers[id(i)] != nil; got != want {
			t.Errorf("container %d is kept: %v, want %v", i, got, want)
		}
	}
}
