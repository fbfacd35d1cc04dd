package web

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
)

// listenTCP opens address.
func listenTCP(address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	if err == nil {
		return l, nil
	}
	_, port, _ := net.SplitHostPort(address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("listen on %s: another program has this port (see it with: ss -ltnp 'sport = :%s'); "+
			"stop that, or choose another address with --web.listen-address: %w", address, port, err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("listen on %s: ports below 1024 are root's; choose another with --web.listen-address: %w", address, err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("listen on %s: this machine does not have that address; correct --web.listen-address: %w", address, err)
	}
	return nil, fmt.Errorf("listen on %s: --web.listen-address takes host:port, such as %s: %w", address, DefaultListenAddress, err)
}

// unixSocket is a listener that removes its own file, and only that.
type unixSocket struct {
	*net.UnixListener
	path string
	file fs.FileInfo
}

func (u *unixSocket) Close() error {
	// Another exporter may have put its own in this place.
	if now, err := os.Lstat(u.path); err == nil && os.SameFile(now, u.file) {
		// A file that stays does no harm: the next start removes it.
		_ = os.Remove(u.path)
	}
	return u.UnixListener.Close()
}

// listenUnix opens a socket that everyone on the node may connect to: what it
// shows to whom is decided by the uid of the peer.
func listenUnix(path string) (net.Listener, error) {
	const remedy = "choose another path with --socket, or none with --socket=''"
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("directory of the socket %s: %w; %s", path, err, remedy)
	}
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("socket %s: %w; %s", path, err, remedy)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w; %s", path, err, remedy)
	}
	l.SetUnlinkOnClose(false)
	info, err := os.Lstat(path)
	if err == nil {
		err = os.Chmod(path, 0o666)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s: %w; %s", path, err, remedy)
	}
	return &unixSocket{UnixListener: l, path: path, file: info}, nil
}

// removeStale removes the socket that a dead process left.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSocket {
		return errors.New("this path exists and is not a socket")
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		c.Close()
		return errors.New("another gpu-exporter is answering on it; stop that one first")
	}
	// Only "nobody is listening" means dead: a full backlog is a live process.
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("another process seems to use it: %w", err)
	}
	return os.Remove(path)
}

// listenSystemd takes the sockets that systemd passes.
func listenSystemd() ([]net.Listener, error) {
	listeners, err := activation.Listeners()
	if err != nil {
		return nil, fmt.Errorf("sockets from systemd: %w", err)
	}
	if len(listeners) == 0 {
		return nil, errors.New("systemd passed no socket: start through a .socket unit, or leave --web.systemd-socket out")
	}
	return listeners, nil
}
