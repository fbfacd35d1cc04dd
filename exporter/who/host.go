package who

import (
	"net"
	"net/netip"
	"os"
	"strings"
)

// LocalHost reports whether the Host of a request is a name under which this
// machine is asked by those on it: an address, localhost, a name without a dot,
// or the machine's own. A page from elsewhere can make a browser here ask a
// loopback address under a name of its own (DNS rebinding), but under none of
// these.
func LocalHost(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	name = strings.TrimSuffix(strings.ToLower(name), ".")
	if _, err := netip.ParseAddr(strings.Trim(name, "[]")); err == nil {
		return true
	}
	if !strings.Contains(name, ".") || strings.HasSuffix(name, ".localhost") {
		return true
	}
	own, err := os.Hostname()
	return err == nil && name == strings.ToLower(own)
}
