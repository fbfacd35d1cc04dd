package kubelet

import (
	"strings"

	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"gpuledger/exporter/runtimes"
)

// maxDevices bounds what is kept of one container: 16 cards in 7 instances
// each, and replicas of them.
const maxDevices = 1024

// given are the GPUs that a container was given, by device plugin or by claim.
func given(container *podresources.ContainerResources) []runtimes.Device {
	var all devices
	for _, resource := range container.GetDevices() {
		for _, id := range resource.GetDeviceIds() {
			all.add(pluginDevice(id))
		}
	}
	for _, dynamic := range container.GetDynamicResources() {
		for _, claimed := range dynamic.GetClaimResources() {
			if claimed.GetDriverName() == "gpu.nvidia.com" {
				all.add(claimedDevice(claimed.GetDeviceName()))
			}
		}
	}
	return all
}

// devices are in the order in which they were given, each once.
type devices []runtimes.Device

func (d *devices) add(device runtimes.Device, ok bool) {
	if !ok || len(*d) == maxDevices {
		return
	}
	for _, known := range *d {
		if known == device {
			return
		}
	}
	*d = append(*d, device)
}

// uuidLength is that of GPU-01234567-89ab-cdef-0123-456789abcdef.
const uuidLength = len("GPU-") + 36

// pluginDevice reads a device id as NVIDIA's device plugin and its kin make them:
// a UUID, of a card or MIG instance, behind which a replica may be counted
// (GPU-…::3, GPU-…-3), or GKE's nvidia0 and nvidia0/vgpu1. Ids of other makers'
// devices look otherwise.
func pluginDevice(id string) (runtimes.Device, bool) {
	switch {
	case strings.HasPrefix(id, "MIG-GPU-"): // MIG-GPU-UUID/GI/CI, of drivers before 470
		id, _, _ = strings.Cut(id, "::")
		return runtimes.ByUUID(id), true
	case strings.HasPrefix(id, "GPU-"), strings.HasPrefix(id, "MIG-"):
		if len(id) < uuidLength {
			return runtimes.Device{}, false
		}
		return runtimes.ByUUID(id[:uuidLength]), true
	case strings.HasPrefix(id, "nvidia"):
		card, part, _ := strings.Cut(id, "/")
		if part != "" && !strings.HasPrefix(part, "vgpu") {
			return runtimes.Device{}, false // an instance, numbered as nobody else does
		}
		return runtimes.ParseDevice("/dev/" + card)
	}
	return runtimes.Device{}, false
}

// claimedDevice reads the name that NVIDIA's driver for dynamic resource
// allocation gives a card: gpu-N, by its device file. Its MIG instances are named
// by profile and place, which tells no UUID.
func claimedDevice(name string) (runtimes.Device, bool) {
	minor, ok := strings.CutPrefix(name, "gpu-")
	if !ok {
		return runtimes.Device{}, false
	}
	return runtimes.ParseDevice("/dev/nvidia" + minor)
}
