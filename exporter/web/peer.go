package web

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// peerUID is the uid that the other end of a unix socket had when it
// connected, from the kernel (SO_PEERCRED, unix(7)).
func peerUID(c *net.UnixConn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, fmt.Errorf("peer of unix socket: %w", err)
	}
	var credentials *unix.Ucred
	var inner error
	if err := raw.Control(func(fd uintptr) {
		credentials, inner = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, fmt.Errorf("peer of unix socket: %w", err)
	}
	if inner != nil {
		return 0, fmt.Errorf("peer of unix socket: %w", inner)
	}
	return credentials.Uid, nil
}

// overflowUID is what the kernel reports for every uid that has none in this
// user namespace (user_namespaces(7)). Many share it, so it is nobody.
var overflowUID = sync.OnceValue(func() uint32 {
	const usual = 65534
	text, err := os.ReadFile("/proc/sys/kernel/overflowuid")
	if err != nil {
		return usual
	}
	uid, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return usual
	}
	return uint32(uid)
})
