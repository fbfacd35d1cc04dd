package nvml

import (
	"fmt"
	"math"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// defaultMIGSlices is the number of compute slices of every card with MIG but
// the smaller ones, which have 4.
const defaultMIGSlices = 7

// readInstances fills Instances and SlicesTotal of a card with MIG on. The
// instances are asked for each time: they can be made and destroyed at will.
func (c *cardReader) readInstances(reading *gpu.Reading) {
	if c.fixed.migDevices == 0 {
		count, known := c.askInt(metric{"mig_devices", fnGetMaxMigDeviceCount}, c.library.maxMIGDevices, 0, 64).Get()
		if !known {
			c.needed(metric{"mig_devices", fnGetMaxMigDeviceCount})
			return
		}
		c.fixed.migDevices = int(count)
	}
	if c.fixed.migSlices == 0 {
		c.fixed.migSlices = c.slicesTotal()
	}
	reading.SlicesTotal = c.fixed.migSlices
	var used int64
	for index := 0; index < c.fixed.migDevices && !c.stopped; index++ {
		device, ret := c.library.migDevice(c.device, index)
		if ret == gonvml.ERROR_NOT_FOUND {
			continue // no instance has this number
		}
		if ret != gonvml.SUCCESS {
			c.essential(fnGetMigDeviceHandleByIndex, ret)
			return
		}
		instance, ok := c.readInstance(device)
		if !ok {
			return
		}
		used += instance.Slices
		reading.Instances = append(reading.Instances, instance)
	}
	reading.SlicesTotal = max(reading.SlicesTotal, used)
}

// essential ends the reading for a failed call that the instances depend on. A
// refusal here says that we lack a right (reading other people's instances
// takes the monitor capability), not that the card is down.
func (c *cardReader) essential(f function, ret gonvml.Return) {
	if c.stopped || c.condemned(f, ret) {
		return
	}
	if ret == gonvml.ERROR_INVALID_ARGUMENT {
		c.out.stale = true // the instances were changed under us
	}
	reason := failure(f, ret) + " on a MIG instance"
	if ret == gonvml.ERROR_NO_PERMISSION {
		reason += ": reading all instances takes /dev/nvidia-caps access to mig/monitor, or root"
	}
	c.failed(reason)
}

// needed ends the reading for a metric that it can't do without.
func (c *cardReader) needed(m metric) {
	if !c.stopped {
		c.failed(manifest[m.f].method + ": not had, and MIG instances can't be read without it")
	}
}

func (c *cardReader) readInstance(d gonvml.Device) (gpu.Instance, bool) {
	l := c.library
	var instance gpu.Instance
	uuid, ret := l.uuid(d)
	if ret != gonvml.SUCCESS {
		c.essential(fnGetUUID, ret)
		return instance, false
	}
	instance.UUID = printable(uuid)
	gpuInstance, ret := l.gpuInstance(d)
	if ret != gonvml.SUCCESS {
		c.essential(fnGetGpuInstanceID, ret)
		return instance, false
	}
	computeInstance, ret := l.computeInstance(d)
	if ret != gonvml.SUCCESS {
		c.essential(fnGetComputeInstanceID, ret)
		return instance, false
	}
	instance.GPUInstance, instance.ComputeInstance = gpuInstance, computeInstance
	attributes, ret := l.attributes(d)
	if ret != gonvml.SUCCESS {
		c.essential(fnGetAttributes, ret)
		return instance, false
	}
	instance.Slices = int64(attributes.ComputeInstanceSliceCount)
	if instance.Slices < 1 || instance.Slices > 64 {
		c.failed(fmt.Sprintf("GetAttributes: a MIG instance of %d slices can't be", instance.Slices))
		return instance, false
	}
	name, ret := l.name(d)
	if ret != gonvml.SUCCESS {
		name = ""
	}
	instance.Profile = profile(printable(name), attributes)
	if total := attributes.MemorySizeMB; total > 0 && total < mostMemoryBytes>>20 {
		instance.MemoryTotalBytes = gpu.Some(total << 20)
	}
	if memory, ret := l.memory(d); ret == gonvml.SUCCESS {
		if memory.Total <= mostMemoryBytes {
			instance.MemoryTotalBytes = gpu.Some(memory.Total)
		}
		if memory.Used <= min(memory.Total, mostMemoryBytes) {
			instance.MemoryUsedBytes = gpu.Some(memory.Used)
		} else {
			c.drop("instance_memory_used")
		}
	} else if c.condemned(fnGetMemoryInfo, ret) {
		return instance, false
	}
	processes, f, ret := c.processesOf(d, uint32(gpuInstance), uint32(computeInstance))
	if ret != gonvml.SUCCESS {
		c.essential(f, ret)
		return instance, false
	}
	instance.Processes = processes
	return instance, !c.stopped
}

// profile is the name of an instance's cut: what follows "MIG " in its product
// name, else made of its attributes in NVIDIA's way.
func profile(name string, attributes gonvml.DeviceAttributes) string {
	if at := strings.LastIndex(name, "MIG "); at >= 0 {
		if cut := strings.TrimSpace(name[at+len("MIG "):]); cut != "" {
			return cut
		}
	}
	compute, whole := attributes.ComputeInstanceSliceCount, attributes.GpuInstanceSliceCount
	cut := fmt.Sprintf("%dg.%dgb", whole, int64(math.Round(float64(attributes.MemorySizeMB)/1024)))
	if compute != whole {
		cut = fmt.Sprintf("%dc.%s", compute, cut)
	}
	return cut
}

// slicesTotal is the number of compute slices of the whole card: those of the
// largest instance that can be cut from it.
func (c *cardReader) slicesTotal() int64 {
	var most int64
	for cut := range gonvml.GPU_INSTANCE_PROFILE_COUNT {
		info, ret := c.library.instanceProfile(c.device, cut)
		if ret == gonvml.SUCCESS && info.SliceCount <= 64 {
			most = max(most, int64(info.SliceCount))
		}
	}
	if most == 0 {
		return defaultMIGSlices
	}
	return most
}
