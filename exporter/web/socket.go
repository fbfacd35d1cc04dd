package web

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"
)

// lookAtSocket is how often the socket's file is looked at.
const lookAtSocket = 5 * time.Second

// maxSocketPath is what a socket's address has room for.
const maxSocketPath = 107

// unixSocket is a listener that removes its own file, and only that. If
// somebody else removes it, such as whoever cleans /run up, it makes another:
// nobody can connect to a socket without a file.
type unixSocket struct {
	path   string
	logger *slog.Logger
	ended  chan struct{}

	mu      sync.Mutex
	current *net.UnixListener
	file    fs.FileInfo
	closed  bool
	told    string
}

// listenUnix opens a socket that everyone on the node may connect to: what it
// shows to whom is decided by the uid of the peer.
func listenUnix(path string, logger *slog.Logger) (*unixSocket, error) {
	u := &unixSocket{path: path, logger: logger, ended: make(chan struct{})}
	if err := u.open(); err != nil {
		return nil, fmt.Errorf("socket %s: %w; choose another path with --socket, or none with --socket=''", path, err)
	}
	go u.watch()
	return u, nil
}

// open makes the file. It needs the lock, or nobody else to know of u.
func (u *unixSocket) open() error {
	if len(u.path) > maxSocketPath {
		return fmt.Errorf("a path of %d bytes is too long: sockets have room for %d", len(u.path), maxSocketPath)
	}
	if err := os.MkdirAll(filepath.Dir(u.path), 0o755); err != nil {
		return err
	}
	if err := removeStale(u.path); err != nil {
		return err
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: u.path, Net: "unix"})
	if err != nil {
		return err
	}
	l.SetUnlinkOnClose(false)
	info, err := os.Lstat(u.path)
	if err == nil {
		err = os.Chmod(u.path, 0o666)
	}
	if err != nil {
		l.Close()
		return err
	}
	u.current, u.file = l, info
	return nil
}

func (u *unixSocket) listener() *net.UnixListener {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.current
}

func (u *unixSocket) Accept() (net.Conn, error) {
	for {
		l := u.listener()
		c, err := l.Accept()
		if err == nil {
			return c, nil
		}
		if l == u.listener() {
			return nil, err
		}
	}
}

func (u *unixSocket) Addr() net.Addr { return &net.UnixAddr{Name: u.path, Net: "unix"} }

func (u *unixSocket) Close() error {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.closed {
		u.closed = true
		close(u.ended)
	}
	// Another exporter may have put its own in this place.
	if u.inPlace() {
		// A file that stays does no harm: the next start removes it.
		_ = os.Remove(u.path)
	}
	return u.current.Close()
}

func (u *unixSocket) inPlace() bool {
	now, err := os.Lstat(u.path)
	return err == nil && os.SameFile(now, u.file)
}

func (u *unixSocket) watch() {
	tick := time.NewTicker(lookAtSocket)
	defer tick.Stop()
	for {
		select {
		case <-u.ended:
			return
		case <-tick.C:
			u.restore()
		}
	}
}

// restore makes the file anew if it is gone. One that another process listens
// on, or that is no socket, is left alone.
func (u *unixSocket) restore() {
	u.mu.Lock()
	defer u.mu.Unlock()
	now, err := os.Lstat(u.path)
	if u.closed || err == nil && os.SameFile(now, u.file) || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	before := u.current
	if err := u.open(); err != nil {
		if u.told != err.Error() {
			u.told = err.Error()
			u.logger.Error("The socket is gone and can't be made anew: nobody can connect to it", "socket", u.path, "err", err)
		}
		return
	}
	u.told = ""
	u.logger.Warn("The socket was removed while in use: made anew", "socket", u.path)
	before.Close()
}
