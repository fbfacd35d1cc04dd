package nvml

import (
	"encoding/binary"
	"math"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// The ranges beyond which a value is a driver's slip and no measurement. They
// are wide: they are there to keep a wrapped counter or an uninitialised field
// out of bills and graphs, not to judge the card.
const (
	leastCelsius       = -50
	mostCelsius        = 200
	mostPowerMW        = 10_000_000 // 10 kW, several times a superchip
	mostEnergyMJ       = 1 << 60    // 36 000 years at 1 kW
	mostClockMHz       = 100_000
	mostFanPercent     = 200 // NVML: may exceed 100 in certain cases
	mostFans           = 32
	mostMemoryBytes    = 1 << 50
	mostMinorNumber    = 1 << 20 // what the kernel has for a minor number
	mostPCIeGeneration = 16
	mostPCIeWidth      = 64
	mostECCErrors      = 1 << 62
)

var thresholds = []struct {
	name, metric string
	threshold    gonvml.TemperatureThresholds
}{
	{gpu.ThresholdShutdown, "threshold_shutdown", gonvml.TEMPERATURE_THRESHOLD_SHUTDOWN},
	{gpu.ThresholdSlowdown, "threshold_slowdown", gonvml.TEMPERATURE_THRESHOLD_SLOWDOWN},
	{gpu.ThresholdMemoryMax, "threshold_memory_max", gonvml.TEMPERATURE_THRESHOLD_MEM_MAX},
	{gpu.ThresholdMaxOperating, "threshold_max_operating", gonvml.TEMPERATURE_THRESHOLD_GPU_MAX},
}

var clocks = []struct {
	name, metric string
	clock        gonvml.ClockType
}{
	{"graphics", "clock_graphics", gonvml.CLOCK_GRAPHICS},
	{"sm", "clock_sm", gonvml.CLOCK_SM},
	{"memory", "clock_memory", gonvml.CLOCK_MEM},
	{"video", "clock_video", gonvml.CLOCK_VIDEO},
}

var eccKinds = []struct {
	name, metric string
	kind         gonvml.MemoryErrorType
}{
	{"corrected", "ecc_corrected", gonvml.MEMORY_ERROR_TYPE_CORRECTED},
	{"uncorrected", "ecc_uncorrected", gonvml.MEMORY_ERROR_TYPE_UNCORRECTED},
}

// readMetrics asks for everything that changes and is not a process. What
// can't be had stays unknown; it never spoils the reading, unless the card
// turns out to be lost.
func (c *cardReader) readMetrics(reading *gpu.Reading) {
	l, d := c.library, c.device

	if use, known := ask(c, metric{"utilization", fnGetUtilizationRates}, func() (gonvml.Utilization, gonvml.Return) { return l.utilization(d) }); known {
		reading.UtilizationPercent = c.percent("utilization", use.Gpu)
		reading.MemoryUtilizationPercent = c.percent("memory_utilization", use.Memory)
	}
	if use, known := ask(c, metric{"encoder_utilization", fnGetEncoderUtilization}, func() (uint32, gonvml.Return) { return l.encoderUtilization(d) }); known {
		reading.EncoderUtilizationPercent = c.percent("encoder_utilization", use)
	}
	if use, known := ask(c, metric{"decoder_utilization", fnGetDecoderUtilization}, func() (uint32, gonvml.Return) { return l.decoderUtilization(d) }); known {
		reading.DecoderUtilizationPercent = c.percent("decoder_utilization", use)
	}
	c.readMemory(reading)
	c.readTemperatures(reading)
	if power, known := ask(c, metric{"power", fnGetPowerUsage}, func() (uint32, gonvml.Return) { return l.power(d) }); known {
		reading.PowerMW = c.within("power", int64(power), 0, mostPowerMW)
	}
	if limit, known := ask(c, metric{"power_limit", fnGetEnforcedPowerLimit}, func() (uint32, gonvml.Return) { return l.powerLimit(d) }); known {
		reading.PowerLimitMW = c.within("power_limit", int64(limit), 0, mostPowerMW)
	}
	if energy, known := ask(c, metric{"energy", fnGetTotalEnergyConsumption}, func() (uint64, gonvml.Return) { return l.energy(d) }); known {
		reading.EnergyMJ = c.within("energy", toInt64(energy), 0, mostEnergyMJ)
	}
	for _, k := range clocks {
		mhz, known := ask(c, metric{k.metric, fnGetClockInfo}, func() (uint32, gonvml.Return) { return l.clock(d, k.clock) })
		if !known {
			continue
		}
		if sane, in := c.within(k.metric, int64(mhz), 0, mostClockMHz).Get(); in {
			if reading.ClocksMHz == nil {
				reading.ClocksMHz = make(map[string]int64, len(clocks))
			}
			reading.ClocksMHz[k.name] = sane
		}
	}
	c.readFans(reading)
	reading.ThrottleReasons = c.throttleReasons()
	reading.PCIeGenerationMax, reading.PCIeWidthMax = c.fixed.pcieGenerationMax, c.fixed.pcieWidthMax
	reading.PCIeGeneration = c.askInt(metric{"pcie_generation", fnGetCurrPcieLinkGeneration}, l.pcieGeneration, 1, mostPCIeGeneration)
	reading.PCIeWidth = c.askInt(metric{"pcie_width", fnGetCurrPcieLinkWidth}, l.pcieWidth, 1, mostPCIeWidth)
	for _, k := range eccKinds {
		count, known := ask(c, metric{k.metric, fnGetTotalEccErrors}, func() (uint64, gonvml.Return) { return l.eccErrors(d, k.kind) })
		if !known {
			continue
		}
		if sane, in := c.within(k.metric, toInt64(count), 0, mostECCErrors).Get(); in {
			if reading.ECCErrors == nil {
				reading.ECCErrors = make(map[string]int64, len(eccKinds))
			}
			reading.ECCErrors[k.name] = sane
		}
	}
	if mode, known := ask(c, metric{"persistence_mode", fnGetPersistenceMode}, func() (gonvml.EnableState, gonvml.Return) { return l.persistenceMode(d) }); known {
		reading.Card.PersistenceMode = gpu.Some(mode == gonvml.FEATURE_ENABLED)
	}
}

func (c *cardReader) percent(name string, value uint32) gpu.Optional[uint32] {
	if value > 100 {
		c.drop(name)
		return gpu.Optional[uint32]{}
	}
	return gpu.Some(value)
}

// readMemory prefers the second version of the call: the first counts the
// driver's own reserve as used and does not say how much that is, so where it
// is all there is, MemoryReservedBytes stays unknown.
func (c *cardReader) readMemory(reading *gpu.Reading) {
	l, d := c.library, c.device
	keep := func(into *gpu.Optional[uint64], name string, value, most uint64) {
		if value > most {
			c.drop(name)
			return
		}
		*into = gpu.Some(value)
	}
	if memory, known := ask(c, metric{"memory_v2", fnGetMemoryInfoV2}, func() (gonvml.Memory_v2, gonvml.Return) { return l.memoryV2(d) }); known {
		keep(&reading.MemoryTotalBytes, "memory_total", memory.Total, mostMemoryBytes)
		most := min(memory.Total, mostMemoryBytes)
		keep(&reading.MemoryUsedBytes, "memory_used", memory.Used, most)
		keep(&reading.MemoryReservedBytes, "memory_reserved", memory.Reserved, most)
		keep(&reading.MemoryFreeBytes, "memory_free", memory.Free, most)
		return
	}
	if memory, known := ask(c, metric{"memory", fnGetMemoryInfo}, func() (gonvml.Memory, gonvml.Return) { return l.memory(d) }); known {
		keep(&reading.MemoryTotalBytes, "memory_total", memory.Total, mostMemoryBytes)
		most := min(memory.Total, mostMemoryBytes)
		keep(&reading.MemoryUsedBytes, "memory_used", memory.Used, most)
		keep(&reading.MemoryFreeBytes, "memory_free", memory.Free, most)
	}
}

func (c *cardReader) readTemperatures(reading *gpu.Reading) {
	l, d := c.library, c.device
	if celsius, known := ask(c, metric{"temperature_v1", fnGetTemperature}, func() (uint32, gonvml.Return) { return l.temperature(d) }); known {
		reading.TemperatureC = c.within("temperature", int64(int32(celsius)), leastCelsius, mostCelsius)
	} else if celsius, known := ask(c, metric{"temperature", fnGetTemperatureV}, func() (gonvml.Temperature, gonvml.Return) { return l.temperatureV(d) }); known {
		reading.TemperatureC = c.within("temperature", int64(celsius.Temperature), leastCelsius, mostCelsius)
	}
	const memory = "memory_temperature"
	_, known := ask(c, metric{memory, fnGetFieldValues}, func() (nothing, gonvml.Return) {
		c.fields[0] = gonvml.FieldValue{FieldId: gonvml.FI_DEV_MEMORY_TEMP}
		ret := l.fieldValues(d, c.fields[:])
		if ret == gonvml.SUCCESS {
			// The call as a whole succeeds and each field has its own code.
			ret = gonvml.Return(int32(c.fields[0].NvmlReturn))
		}
		return nothing{}, ret
	})
	// Cards without the sensor answer 0.
	if value, decoded := fieldInt(c.fields[0]); known && decoded && value != 0 {
		reading.MemoryTemperatureC = c.within(memory, value, leastCelsius, mostCelsius)
	}
	reading.ThresholdsC = c.fixed.thresholds
}

// fieldInt decodes a whole number out of a field value by its type.
func fieldInt(field gonvml.FieldValue) (int64, bool) {
	switch gonvml.ValueType(field.ValueType) {
	case gonvml.VALUE_TYPE_UNSIGNED_INT:
		return int64(binary.NativeEndian.Uint32(field.Value[:])), true
	case gonvml.VALUE_TYPE_SIGNED_INT:
		return int64(int32(binary.NativeEndian.Uint32(field.Value[:]))), true
	case gonvml.VALUE_TYPE_UNSIGNED_LONG, gonvml.VALUE_TYPE_UNSIGNED_LONG_LONG:
		return toInt64(binary.NativeEndian.Uint64(field.Value[:])), true
	case gonvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return int64(binary.NativeEndian.Uint64(field.Value[:])), true
	case gonvml.VALUE_TYPE_UNSIGNED_SHORT:
		return int64(binary.NativeEndian.Uint16(field.Value[:])), true
	case gonvml.VALUE_TYPE_DOUBLE:
		value := math.Float64frombits(binary.NativeEndian.Uint64(field.Value[:]))
		if math.Abs(value) < 1<<53 {
			return int64(math.Round(value)), true
		}
	}
	return 0, false
}

func (c *cardReader) readFans(reading *gpu.Reading) {
	l, d := c.library, c.device
	const name = "fan"
	speeds := make([]int64, 0, c.fixed.fans)
	for fan := range c.fixed.fans {
		speed, known := ask(c, metric{"fan_v2", fnGetFanSpeedV2}, func() (uint32, gonvml.Return) { return l.fanSpeedV2(d, fan) })
		if !known {
			break
		}
		percent, sane := c.within(name, int64(speed), 0, mostFanPercent).Get()
		if !sane {
			break // the place in the list is the fan's number, so no gaps
		}
		speeds = append(speeds, percent)
	}
	if len(speeds) == 0 && c.unsupported["fan_v2"] || c.unsupported["fans"] {
		if speed, known := ask(c, metric{name, fnGetFanSpeed}, func() (uint32, gonvml.Return) { return l.fanSpeed(d) }); known {
			if percent, sane := c.within(name, int64(speed), 0, mostFanPercent).Get(); sane {
				speeds = append(speeds, percent)
			}
		}
	}
	if len(speeds) > 0 {
		reading.FanPercent = speeds
	}
}

// throttleReasons uses the older of the two names where the newer is missing.
func (c *cardReader) throttleReasons() gpu.Optional[uint64] {
	l, d := c.library, c.device
	if mask, known := ask(c, metric{"event_reasons", fnGetCurrentClocksEventReasons}, func() (uint64, gonvml.Return) { return l.clocksEventReasons(d) }); known {
		return gpu.Some(mask)
	}
	if mask, known := ask(c, metric{"throttle_reasons", fnGetCurrentClocksThrottleReasons}, func() (uint64, gonvml.Return) { return l.clocksThrottleReasons(d) }); known {
		return gpu.Some(mask)
	}
	return gpu.Optional[uint64]{}
}
