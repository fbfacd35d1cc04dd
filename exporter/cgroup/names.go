package cgroup

import (
	"strconv"
	"strings"

	"gpuledger/exporter/procfs/text"
)

const (
	initScope     = "init.scope"
	runtimePodman = "podman"
	maxNameBytes  = 256
)

// Names of cgroups that look like a containerd namespace and are not one.
var notContainerdNamespace = map[string]bool{
	"docker": true, "lxc": true, "kubepods": true, "podruntime": true, "system": true, "libpod_parent": true,
	"user": true, "machine": true, "slurm": true, "oar": true, "lsf": true, "mesos": true, "ecs": true,
	"htcondor": true, "garden": true, "buildkit": true, "actions_job": true, "process_api": true, "torque": true,
}

func digits(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return false
		}
	}
	return s != ""
}

func hexOnly(s string) bool {
	for i := 0; i < len(s); i++ {
		if !isHex(s[i]) {
			return false
		}
	}
	return s != ""
}

func isHex(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }

// fullID reports a whole container id: 64 lower-case hex digits, neither more
// nor less.
func fullID(s string) bool { return len(s) == 64 && hexOnly(s) }

// uuid reports 8-4-4-4-12 hex digits whose separators are all in separators.
func uuid(s, separators string) bool {
	if len(s) != 36 {
		return false
	}
	for i := 0; i < len(s); i++ {
		switch i {
		case 8, 13, 18, 23:
			if !strings.ContainsRune(separators, rune(s[i])) {
				return false
			}
		default:
			if !isHex(s[i]) {
				return false
			}
		}
	}
	return true
}

// podUID reads a pod's uid, which systemd's slice names write with underscores
// and static pods as a bare hash.
func podUID(s string) (string, bool) {
	if uuid(s, "-_") {
		return strings.ReplaceAll(s, "_", "-"), true
	}
	return s, len(s) == 32 && hexOnly(s)
}

// parseUID reads a uid as systemd prints it. 4294967296 must not become 0, and
// 4294967295 is no user.
func parseUID(s string) (uint32, bool) {
	if !digits(s) || len(s) > 1 && s[0] == '0' {
		return 0, false
	}
	uid, err := strconv.ParseUint(s, 10, 32)
	return uint32(uid), err == nil && uid != 1<<32-1
}

// hasUnitSuffix reports names of systemd units that hold processes, and of
// those that look as if they did. Slices are not units here: they only order
// others.
func hasUnitSuffix(s string) bool {
	for _, suffix := range []string{".service", ".scope", ".mount", ".socket", ".swap"} {
		if strings.HasSuffix(s, suffix) && len(s) > len(suffix) {
			return true
		}
	}
	return false
}

// unescape undoes systemd's \xNN. It is only ever applied to a name that has
// been cut out of its path, because it can yield a slash.
func unescape(s string) string {
	if !strings.Contains(s, `\x`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if i+3 < len(s) && s[i] == '\\' && s[i+1] == 'x' {
			if v, err := strconv.ParseUint(s[i+2:i+4], 16, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return text.Clean(b.String(), maxNameBytes)
}

// between cuts prefix and suffix off s; false unless both are there and
// something is left.
func between(s, prefix, suffix string) (string, bool) {
	s, ok := strings.CutPrefix(s, prefix)
	if !ok {
		return "", false
	}
	s, ok = strings.CutSuffix(s, suffix)
	return s, ok && s != ""
}

// containerdName is the grammar of containerd's namespaces and ids.
func containerdName(s string) bool {
	if s == "" || len(s) > 76 {
		return false
	}
	alphanumeric := func(c byte) bool {
		return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
	}
	for i := 0; i < len(s); i++ {
		if !alphanumeric(s[i]) && (i == 0 || i == len(s)-1 || !strings.ContainsRune("-_.", rune(s[i]))) {
			return false
		}
	}
	return true
}
