package web

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
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
