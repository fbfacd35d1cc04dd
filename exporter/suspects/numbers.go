package suspects

import (
	"path"
	"strconv"
	"strings"

	"gpuledger/exporter/procfs"
)

// Device numbers of NVIDIA's driver. Major 195 is its own for ever; the others
// are given out when a module is loaded, and /proc/devices says them.
const (
	gpuMajor     = 195
	modesetMinor = 254
	controlMinor = 255
	uvmName      = "nvidia-uvm"
	capsName     = "nvidia-caps"
)

// Numbers are the device numbers of NVIDIA's driver on this node.
type Numbers struct {
	// UVM and Caps are majors, of unified memory and of MIG's capabilities; 0
	// while the module is not loaded.
	UVM, Caps uint32
}

// NumbersOf picks them from the node's majors by name.
func NumbersOf(majors map[string]uint32) Numbers {
	return Numbers{UVM: majors[uvmName], Caps: majors[capsName]}
}

// device says what a number stands for: a card by its minor number, or the
// driver as such by a name.
func (n Numbers) device(number procfs.DeviceNumber) (minor int64, driver string) {
	switch {
	case number.Major == gpuMajor && number.Minor < modesetMinor:
		return int64(number.Minor), ""
	case number.Major == gpuMajor && number.Minor == controlMinor:
		return -1, "nvidiactl"
	case n.UVM != 0 && number.Major == n.UVM:
		return -1, uvmName
	case n.Caps != 0 && number.Major == n.Caps:
		return -1, capsName
	}
	return -1, ""
}

// wanted reports the devices that make a suspect.
func (n Numbers) wanted(number procfs.DeviceNumber) bool {
	minor, driver := n.device(number)
	return minor >= 0 || driver != ""
}

// byName knows a card's device by the name that the driver gives it.
func byName(name string) (procfs.DeviceNumber, bool) {
	number, ok := strings.CutPrefix(path.Clean(name), "/dev/nvidia")
	minor, err := strconv.ParseUint(number, 10, 32)
	if !ok || err != nil || minor >= modesetMinor || strconv.FormatUint(minor, 10) != number {
		return procfs.DeviceNumber{}, false
	}
	return procfs.DeviceNumber{Major: gpuMajor, Minor: uint32(minor)}, true
}
