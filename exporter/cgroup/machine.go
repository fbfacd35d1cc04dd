package cgroup

import "strings"

// machine reads system containers and virtual machines.
func (w *walk) machine(rest []string, previous string, i int) int {
	segment := rest[0]
	enter := func(runtime, name string, used int) int {
		w.enter(Level{Kind: LevelMachine, System: runtime, ID: name})
		return used
	}
	if name, ok := strings.CutPrefix(segment, "lxc.payload."); ok && name != "" {
		return enter("lxc", name, 1)
	}
	if name, ok := strings.CutPrefix(segment, "lxc.monitor."); ok && name != "" {
		enter("lxc", name, 1)
		w.chain.Monitor = true
		return 1
	}
	if len(rest) > 1 {
		switch {
		case segment == "lxc.payload":
			return enter("lxc", rest[1], 2)
		case segment == "lxc.monitor":
			enter("lxc", rest[1], 2)
			w.chain.Monitor = true
			return 2
		// In the middle of a host path "lxc" may be any directory's name.
		case segment == "lxc" && (i == 0 || w.closed):
			return enter("lxc", rest[1], 2)
		case segment == "qemu.slice" && i == 0:
			if name, ok := between(rest[1], "", ".scope"); ok && digits(name) { // Proxmox
				w.unit(rest[1])
				return enter("qemu", name, 2)
			}
		case segment == "machine" && i == 0:
			if runtime, name, ok := libvirtName(rest[len(rest)-1]); ok {
				return enter(runtime, name, len(rest))
			}
			for j := 1; j < len(rest); j++ {
				if runtime, name, ok := libvirtName(rest[j]); ok {
					return enter(runtime, name, j+1)
				}
			}
		}
	}
	if name, ok := between(segment, "systemd-nspawn@", ".service"); ok && !w.closed {
		w.unit(segment)
		enter("nspawn", unescape(name), 1)
		return 1 + w.supervisor(rest)
	}
	if escaped, ok := between(segment, "machine-", ".scope"); ok && !w.closed {
		runtime, name := machineScope(escaped)
		w.unit(segment)
		enter(runtime, name, 1)
		return 1 + w.supervisor(rest)
	}
	return 0
}

// supervisor marks nspawn's own side of its unit.
func (w *walk) supervisor(rest []string) int {
	if len(rest) > 1 && rest[1] == "supervisor" {
		w.chain.Monitor = true
		return 1
	}
	return 0
}

// machineScope reads the name of a scope that systemd-machined registered:
// libvirt's are DRIVER-NUMBER-NAME, of which the first number alone is
// libvirt's; the others are nspawn's and bear the machine's name alone.
func machineScope(escaped string) (runtime, name string) {
	for driver, runtime := range map[string]string{"qemu": "qemu", "lxc": "libvirt-lxc"} {
		rest, ok := strings.CutPrefix(escaped, driver+`\x2d`)
		if !ok {
			continue
		}
		if number, after, ok := strings.Cut(rest, `\x2d`); ok && digits(number) && after != "" {
			rest = after
		}
		return runtime, unescape(rest)
	}
	return "nspawn", unescape(escaped)
}

// libvirtName reads libvirt's names on hosts without systemd:
// qemu-1-NAME.libvirt-qemu, or NAME.libvirt-qemu before numbers were added.
func libvirtName(segment string) (runtime, name string, ok bool) {
	for driver, runtime := range map[string]string{"qemu": "qemu", "lxc": "libvirt-lxc"} {
		name, ok := strings.CutSuffix(segment, ".libvirt-"+driver)
		if !ok || name == "" {
			continue
		}
		if rest, ok := strings.CutPrefix(name, driver+"-"); ok {
			if number, after, ok := strings.Cut(rest, "-"); ok && digits(number) && after != "" {
				name = after
			}
		}
		return runtime, name, true
	}
	return "", "", false
}
