package nvml

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

const (
	// valueNotAvailable is NVML_VALUE_NOT_AVAILABLE.
	valueNotAvailable = ^uint64(0)
	// noInstance is the instance id of a process outside MIG.
	noInstance = ^uint32(0)
	// mostPID is the kernel's own limit (PID_MAX_LIMIT). A list that goes
	// beyond was not written by a driver that agrees with us on its shape.
	mostPID = 1 << 22
)

// listedProcess is one line of one of NVML's three lists.
type listedProcess struct {
	pid                         uint32
	compute, graphics, mps      bool
	memory                      gpu.Optional[uint64]
	gpuInstance, computeSubpart uint32
}

// brokenProcessLists says why the process lists of a driver must not be asked
// for, empty if they may. Drivers 535.43 to 535.86 write entries of 32 bytes
// into the array of 24-byte entries that the interface declares, which
// overruns the caller's memory. 535.98 withdrew the call and 535.104 brought it
// back in its old shape, together with the process detail list.
func brokenProcessLists(have *symbols, driverVersion, nvmlVersion string) string {
	if !have.processesV3 || have.processDetails {
		return ""
	}
	version := driverVersion
	if version == "" {
		// NVML's version is the driver's with the major version of NVML before it.
		_, version, _ = strings.Cut(nvmlVersion, ".")
	}
	major, _, _ := strings.Cut(version, ".")
	number, err := strconv.Atoi(major)
	switch {
	case err != nil:
		return "process lists refused: the driver does not say which version it is, and it may be one that overruns memory (535.43 to 535.86): install 535.104 or newer"
	case number == 535:
		return "process lists refused: driver " + version + " overruns memory when it writes them: install 535.104 or newer"
	}
	return ""
}

// readProcesses fills the process lists of the card, or of its instances. A
// reading without whole lists is no reading: State says so.
func (c *cardReader) readProcesses(reading *gpu.Reading, driver driverTraits) {
	if c.stopped {
		return
	}
	if driver.brokenProcessLists != "" {
		c.failed(driver.brokenProcessLists)
		return
	}
	if on, known := reading.Card.MIGMode.Get(); known && on {
		c.readInstances(reading)
		return
	}
	processes, f, ret := c.processesOf(c.device, noInstance, noInstance)
	if ret != gonvml.SUCCESS {
		if !c.condemned(f, ret) {
			c.fail(f, ret)
		}
		return
	}
	if !c.stopped {
		reading.Processes = processes
	}
}

// processesOf asks for the three lists of a card or instance and makes one of
// them, one entry per PID, in the order of PIDs.
func (c *cardReader) processesOf(d gonvml.Device, gpuInstance, computeInstance uint32) ([]gpu.Process, function, gonvml.Return) {
	l := c.library
	c.listed = c.listed[:0]
	kinds := []struct {
		f    function
		list func(gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return)
		mark func(*listedProcess)
	}{
		{fnGetComputeRunningProcesses, l.computeProcesses, func(p *listedProcess) { p.compute = true }},
		{fnGetGraphicsRunningProcesses, l.graphicsProcesses, func(p *listedProcess) { p.graphics = true }},
		{fnGetMPSComputeRunningProcesses, l.mpsProcesses, func(p *listedProcess) { p.mps = true }},
	}
	for _, kind := range kinds {
		infos, ret := kind.list(d)
		switch ret {
		case gonvml.SUCCESS:
		case gonvml.ERROR_NOT_FOUND:
			continue // an empty list
		case gonvml.ERROR_NOT_SUPPORTED, gonvml.ERROR_FUNCTION_NOT_FOUND:
			// Cards without graphics, and drivers older than the MPS list
			// (whose clients are on the compute list as well).
			if kind.f == fnGetComputeRunningProcesses {
				return nil, kind.f, ret
			}
			continue
		default:
			return nil, kind.f, ret
		}
		for _, info := range infos {
			if info.Pid == 0 {
				c.drop("process_pid") // nobody: the idle task has no context
				continue
			}
			if info.Pid > mostPID {
				c.drop("process_pid")
				c.failed(fmt.Sprintf("%s: PID %d can't be: the list is not to be trusted", manifest[kind.f].method, info.Pid))
				return nil, kind.f, gonvml.SUCCESS
			}
			p := listedProcess{pid: info.Pid, gpuInstance: info.GpuInstanceId, computeSubpart: info.ComputeInstanceId}
			if ofAnother(p.gpuInstance, gpuInstance) || ofAnother(p.computeSubpart, computeInstance) {
				continue
			}
			kind.mark(&p)
			switch {
			case info.UsedGpuMemory == valueNotAvailable:
			case info.UsedGpuMemory > mostMemoryBytes:
				c.drop("process_memory")
			default:
				p.memory = gpu.Some(info.UsedGpuMemory)
			}
			c.listed = append(c.listed, p)
		}
	}
	return merge(c.listed), 0, gonvml.SUCCESS
}

// ofAnother says that a process is of another instance than the one asked.
// Outside MIG neither side names an instance.
func ofAnother(listed, asked uint32) bool {
	return listed != noInstance && asked != noInstance && listed != asked
}

// merge makes one entry per PID, which counts its memory once: each list gives
// the process's whole memory on the device.
func merge(listed []listedProcess) []gpu.Process {
	if len(listed) == 0 {
		return nil
	}
	slices.SortFunc(listed, func(a, b listedProcess) int { return cmp.Compare(a.pid, b.pid) })
	merged := make([]gpu.Process, 0, len(listed))
	for _, p := range listed {
		if last := len(merged) - 1; last < 0 || merged[last].PID != p.pid {
			merged = append(merged, gpu.Process{PID: p.pid})
		}
		entry := &merged[len(merged)-1]
		entry.Compute = entry.Compute || p.compute
		entry.Graphics = entry.Graphics || p.graphics
		entry.MPS = entry.MPS || p.mps
		if p.memory.Known && (!entry.MemoryBytes.Known || p.memory.Value > entry.MemoryBytes.Value) {
			entry.MemoryBytes = p.memory
		}
	}
	return merged
}
