package web

import (
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSocketTakenAway takes the socket's file away while it is served.
func TestSocketTakenAway(t *testing.T) {
	dir, err := os.MkdirTemp("", "web") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "run", "s")
	log := &safeBuffer{}
	socket, err := listenUnix(path, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("here")) })}
	served := make(chan error, 1)
	go func() { served <- server.Serve(socket) }()
	answers := func() bool {
		_, body, err := get(unixClient(path), "http://exporter/", nil)
		return err == nil && body == "here"
	}
	leaveDead := func() {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		l.Close()
	}
	for name, takeAway := range map[string]func() error{
		"removed":                func() error { return os.Remove(path) },
		"with its directory":     func() error { return os.RemoveAll(filepath.Dir(path)) },
		"moved":                  func() error { return os.Rename(path, path+".away") },
		"replaced by a dead one": func() error { defer leaveDead(); return os.Remove(path) },
	} {
		if err := takeAway(); err != nil {
			t.Fatal(err)
		}
		if answers() {
			t.Errorf("%s: it still answers", name)
		}
		socket.restore()
		if !answers() {
			t.Errorf("%s: it does not answer again", name)
		}
	}

	// What is another's stays, and is told of once.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	socket.restore()
	socket.restore()
	if text, err := os.ReadFile(path); err != nil || string(text) != "mine" {
		t.Errorf("somebody's file: %q, %v", text, err)
	}
	if n := strings.Count(log.String(), "can't be made anew"); n != 1 {
		t.Errorf("told %d times:\n%s", n, log)
	}
	server.Close()
	if err := <-served; err != http.ErrServerClosed {
		t.Error(err)
	}
	socket.restore()
	if text, err := os.ReadFile(path); err != nil || string(text) != "mine" {
		t.Errorf("somebody's file after the end: %q, %v", text, err)
	}
}

func TestSocketPathTooLong(t *testing.T) {
	_, err := listenUnix("/tmp/"+strings.Repeat("y", 200), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "107") || !strings.Contains(err.Error(), "--socket") {
		t.Errorf("got %v", err)
	}
}
