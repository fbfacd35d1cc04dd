package web

import (
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// Bounds of what clients can take from the exporter. Clients that hang must
// not keep Prometheus, or each other, from being answered.
const (
	maxConnections       = 256 // of one listener
	maxConnectionsPerUID = 32  // of one uid on the unix socket
)

// boundedListener keeps at most max connections open. When that is reached, a
// new one takes the place of the one that has been waiting longest, without a
// request in work; if all have one, the new one is closed. A uid that has too
// many loses its own.
//
// The server must use track as its ConnState.
type boundedListener struct {
	net.Listener
	max, maxPerUID int
	logger         *slog.Logger

	mu     sync.Mutex
	open   map[net.Conn]*connection
	warned time.Time
}

type connection struct {
	peer   peer
	active bool
	since  time.Time // of its last change of state
}

func newBoundedListener(l net.Listener, logger *slog.Logger) *boundedListener {
	return &boundedListener{
		Listener:  l,
		max:       maxConnections,
		maxPerUID: maxConnectionsPerUID,
		logger:    logger,
		open:      map[net.Conn]*connection{},
	}
}

// Accept waits for a connection that there is room for.
func (b *boundedListener) Accept() (net.Conn, error) {
	for {
		c, err := b.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if evicted, ok := b.admit(c); evicted != nil || !ok {
			if evicted != nil {
				evicted.Close()
			}
			if !ok {
				c.Close()
				continue
			}
		}
		return c, nil
	}
}

// admit takes c in, and names the connection that has to go for it.
func (b *boundedListener) admit(c net.Conn) (evicted net.Conn, ok bool) {
	return b.admitPeer(c, peerOf(c))
}

func (b *boundedListener) admitPeer(c net.Conn, p peer) (evicted net.Conn, ok bool) {
	entry := &connection{peer: p, since: time.Now()}
	b.mu.Lock()
	defer b.mu.Unlock()
	sameUID := func(other *connection) bool { return other.peer == entry.peer }
	everyone := func(*connection) bool { return true }
	full := false
	switch {
	// Not root: a bound on who can stop us anyway would bound only us.
	case entry.peer.unix && entry.peer.uid != 0 && b.count(sameUID) >= b.maxPerUID:
		full = true
		evicted = b.waitingLongest(sameUID)
	case len(b.open) >= b.max:
		full = true
		evicted = b.waitingLongest(everyone)
	}
	if full {
		if now := time.Now(); now.Sub(b.warned) > time.Minute {
			b.warned = now
			b.logger.Warn("Too many open connections: closing those that wait", "address", b.Addr().String(),
				"open", len(b.open), "unix", entry.peer.unix, "uid", entry.peer.uid)
		}
		if evicted == nil {
			return nil, false
		}
		delete(b.open, evicted)
	}
	b.open[c] = entry
	return evicted, true
}

func (b *boundedListener) count(of func(*connection) bool) int {
	n := 0
	for _, entry := range b.open {
		if of(entry) {
			n++
		}
	}
	return n
}

func (b *boundedListener) waitingLongest(of func(*connection) bool) net.Conn {
	var found net.Conn
	var since time.Time
	for c, entry := range b.open {
		if !entry.active && of(entry) && (found == nil || entry.since.Before(since)) {
			found, since = c, entry.since
		}
	}
	return found
}

// track is the server's ConnState.
func (b *boundedListener) track(c net.Conn, state http.ConnState) {
	if wrapped, ok := c.(interface{ NetConn() net.Conn }); ok {
		c = wrapped.NetConn() // *tls.Conn
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	entry, ok := b.open[c]
	if !ok {
		return
	}
	switch state {
	case http.StateClosed, http.StateHijacked:
		delete(b.open, c)
	default:
		entry.active = state == http.StateActive
		entry.since = time.Now()
	}
}

// peerOf is what the kernel says of the other end.
func peerOf(c net.Conn) peer {
	unixConn, ok := c.(*net.UnixConn)
	if !ok {
		return peer{}
	}
	p := peer{unix: true}
	if uid, err := peerUID(unixConn); err == nil && uid != overflowUID() {
		p.uid, p.known = uid, true
	}
	return p
}
