package web

import (
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Clients that hang take no more than their bound, and keep nobody out.
func TestHungClientsKeepNobodyOut(t *testing.T) {
	r := start(t, nil)
	for range maxConnections + 10 {
		c, err := net.Dial("tcp", r.addresses[0])
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET /metrics HT"); err != nil {
			t.Fatal(err)
		}
	}
	var clients sync.WaitGroup
	for range 20 {
		clients.Go(func() { expect(t, tcpClient(), "http://"+r.addresses[0]+"/metrics", nil, 200, "metrics") })
	}
	clients.Wait()
}

// fakeListener hands out connections that never say anything.
type fakeListener struct{ net.Listener }

func (fakeListener) Accept() (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
func (fakeListener) Addr() net.Addr            { return &net.TCPAddr{} }

func TestConnectionWithWorkIsNotClosed(t *testing.T) {
	b := newBoundedListener(fakeListener{}, slog.New(slog.DiscardHandler))
	b.max = 3
	accept := func() net.Conn {
		t.Helper()
		c, err := b.Accept()
		if err != nil {
			t.Fatal(err)
		}
		b.track(c, http.StateNew)
		return c
	}
	first, second, third := accept(), accept(), accept()
	b.track(first, http.StateActive)
	fourth := accept()
	if _, ok := b.open[second]; ok || len(b.open) != 3 {
		t.Errorf("the one that waited longest is still there, of %d", len(b.open))
	}
	for _, c := range []net.Conn{third, fourth} {
		b.track(c, http.StateActive)
	}
	extra, _ := net.Pipe()
	if evicted, ok := b.admit(extra); ok || evicted != nil {
		t.Error("a connection with a request in work had to go")
	}
	b.track(third, http.StateClosed)
	if _, ok := b.admit(extra); !ok {
		t.Error("no room although one has ended")
	}
}

func TestUIDLosesItsOwnConnections(t *testing.T) {
	b := newBoundedListener(fakeListener{}, slog.New(slog.DiscardHandler))
	b.maxPerUID = 1
	mine, yours := peer{unix: true, uid: 1, known: true}, peer{unix: true, uid: 2, known: true}
	first, _ := net.Pipe()
	second, _ := net.Pipe()
	third, _ := net.Pipe()
	b.admitPeer(first, yours)
	b.admitPeer(second, mine)
	evicted, ok := b.admitPeer(third, mine)
	if !ok || evicted != second {
		t.Error("one uid's connection had to go for another's")
	}
}

func TestStopsWithHungClients(t *testing.T) {
	release := make(chan struct{})
	entered := make(chan struct{})
	r := start(t, func(o *Options) {
		o.Metrics = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { close(entered); <-release })
	})
	defer close(release)
	for _, network := range []struct{ name, address string }{{"tcp", r.addresses[0]}, {"unix", r.socket}} {
		c, err := net.Dial(network.name, network.address)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := io.WriteString(c, "GET / HT"); err != nil {
			t.Fatal(err)
		}
	}
	go get(tcpClient(), "http://"+r.addresses[0]+"/metrics", nil)
	<-entered
	r.stop()
	select {
	case err := <-r.done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second): // it has five; machines under load have more
		t.Fatal("still running")
	}
}
