package runtimes

import (
	"strconv"
	"strings"
)

// Device names GPUs in one of the ways in which engines and schedulers do.
type Device struct {
	// UUID is NVML's full form of a card's or MIG instance's UUID, or its
	// beginning; empty if named otherwise.
	UUID string
	// All means every card of the node.
	All bool
	// Index is NVML's index of a card, and Minor the N of its device file
	// /dev/nvidiaN. They count only if UUID is empty and All is not set; -1 is
	// none.
	Index, Minor int
	// Instance is which MIG device of the card is meant, by NVML's number of MIG
	// devices on that card; -1 is the whole card.
	Instance int
}

// ByUUID is the device with that UUID.
func ByUUID(uuid string) Device { return Device{UUID: uuid, Index: -1, Minor: -1, Instance: -1} }

// ByIndex is the card with that NVML index.
func ByIndex(index int) Device { return Device{Index: index, Minor: -1, Instance: -1} }

// ByMinor is the card whose device file is /dev/nvidiaN.
func ByMinor(minor int) Device { return Device{Index: -1, Minor: minor, Instance: -1} }

// AllDevices is every card of the node.
func AllDevices() Device { return Device{All: true, Index: -1, Minor: -1, Instance: -1} }

// ParseDevice reads a GPU as people and engines write it: all, an index (3), a
// MIG device of a card (3:1), a UUID of a card or MIG instance, a CDI name
// (nvidia.com/gpu=3), or a device file (/dev/nvidia3). It is false for anything
// else, such as none, void or /dev/nvidiactl.
func ParseDevice(name string) (Device, bool) {
	if vendor, device, ok := strings.Cut(name, "="); ok {
		if class, ok := strings.CutPrefix(vendor, "nvidia.com/"); !ok || class != "gpu" && !strings.HasPrefix(class, "mig") {
			return Device{}, false
		}
		name = device
	}
	switch {
	case name == "all":
		return AllDevices(), true
	case strings.HasPrefix(name, "GPU-"), strings.HasPrefix(name, "MIG-"):
		return ByUUID(name), len(name) > len("GPU-")
	case strings.HasPrefix(name, "/dev/nvidia"):
		minor, ok := smallNumber(strings.TrimPrefix(name, "/dev/nvidia"))
		return ByMinor(minor), ok
	}
	card, instance, mig := strings.Cut(name, ":")
	index, ok := smallNumber(card)
	device := ByIndex(index)
	if mig {
		var whole bool
		device.Instance, whole = smallNumber(instance)
		ok = ok && whole
	}
	return device, ok
}

// smallNumber reads a decimal number without sign, as devices are counted.
func smallNumber(s string) (int, bool) {
	n, err := strconv.ParseUint(s, 10, 16)
	return int(n), err == nil && strconv.FormatUint(n, 10) == s
}
