package metrics

import (
	"maps"
	"slices"
	"strconv"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/snapshot"
)

// Label names of devices. MIG instances have other ones than cards and their
// own families, so that a sum over cards never counts an instance again.
var (
	cardLabels = []string{"gpu", "uuid"}
	migLabels  = []string{"uuid", "parent_uuid", "profile"}
)

// putFunc takes one value of a device: the values of the labels that the
// family has beyond the device's.
type putFunc func(value float64, further ...string)

// ofCards reads every card, with the names of the family's further labels.
func ofCards(read func(c cardView, put putFunc), further ...string) func(*view, emitFunc) {
	return ofCardsSince(nil, read, further...)
}

// ofCardsSince is ofCards for counters that count since the exporter started.
func ofCardsSince(since func(*view) *timestamppb.Timestamp, read func(c cardView, put putFunc), further ...string) func(*view, emitFunc) {
	names := slices.Concat(cardLabels, further)
	return func(v *view, emit emitFunc) {
		var created *timestamppb.Timestamp
		if since != nil {
			created = since(v)
		}
		for _, card := range v.cards {
			read(card, func(value float64, values ...string) {
				labels := card.labels
				if len(values) > 0 {
					labels = labelPairs(names, append([]string{card.index, card.Identity.UUID}, values...)...)
				}
				emit(labels, value, created)
			})
		}
	}
}

// ofReadings reads every card that has a reading.
func ofReadings(read func(r *gpu.Reading, put putFunc), further ...string) func(*view, emitFunc) {
	return ofCards(func(c cardView, put putFunc) {
		if c.Reading != nil {
			read(c.Reading, put)
		}
	}, further...)
}

// integer is any kind of number a reading has.
type integer interface{ ~uint32 | ~uint64 | ~int64 }

// ofReading reads one optional number of each reading, in units of which
// there are perUnit in the family's unit.
func ofReading[T integer](pick func(*gpu.Reading) gpu.Optional[T], perUnit float64) func(*view, emitFunc) {
	return ofReadings(func(r *gpu.Reading, put putFunc) {
		if value, ok := pick(r).Get(); ok {
			put(float64(value) / perUnit)
		}
	})
}

// ofMIG reads every MIG instance.
func ofMIG(read func(i *gpu.Instance, put putFunc), further ...string) func(*view, emitFunc) {
	names := slices.Concat(migLabels, further)
	return func(v *view, emit emitFunc) {
		for _, instance := range v.instances {
			read(instance.Instance, func(value float64, values ...string) {
				labels := instance.labels
				if len(values) > 0 {
					labels = labelPairs(names, append([]string{instance.UUID, instance.parent, instance.Profile}, values...)...)
				}
				emit(labels, value, nil)
			})
		}
	}
}

func sinceStart(v *view) *timestamppb.Timestamp { return v.started }

// with adds label names to a device's.
func with(names []string, further ...string) []string { return slices.Concat(names, further) }

// putByKey puts a map's values in the order of its keys.
func putByKey(values map[string]int64, scale float64, put putFunc) {
	for _, key := range slices.Sorted(maps.Keys(values)) {
		put(float64(values[key])*scale, key)
	}
}

var nodeFamilies = []Family{
	{
		Name: "gpu_driver_info", Unit: Info, Group: GroupNode,
		Labels: []string{"driver_version", "cuda_version", "nvml_version"},
		Help:   "Versions of the driver, of the CUDA it supports and of NVML",
		Source: "nvmlSystemGetDriverVersion, nvmlSystemGetCudaDriverVersion_v2, nvmlSystemGetNVMLVersion",
		read: func(v *view, emit emitFunc) {
			driver := v.snapshot.Driver
			if v.snapshot.NVMLUp && driver != (gpu.Driver{}) {
				emit(labelPairs([]string{"driver_version", "cuda_version", "nvml_version"},
					driver.DriverVersion, driver.CUDAVersion, driver.NVMLVersion), 1, nil)
			}
		},
	},
	{
		Name: "gpu_exporter_nvml_up", Unit: Flag, Group: GroupNode,
		Help:   "Whether NVML as a whole is available",
		Source: "nvmlInit_v2",
		read:   ofNode(func(s *snapshot.Snapshot) (float64, bool) { return oneIf(s.NVMLUp), true }),
	},
	{
		Name: "gpu_exporter_devices_expected", Unit: Count, Group: GroupNode,
		Help:   "Cards that NVML counts, those it refuses to open included; absent while NVML is not available",
		Source: "nvmlDeviceGetCount_v2",
		read:   ofNode(func(s *snapshot.Snapshot) (float64, bool) { return float64(s.Expected), s.NVMLUp }),
	},
}

var cardFamilies = []Family{
	{
		Name: "gpu_info", Unit: Info, Group: GroupCard,
		Labels: with(cardLabels, "name", "pci_bus_id", "vbios", "serial", "mig_mode"),
		Help:   "Identity of the card; mig_mode is enabled, disabled or, where the card has no MIG, empty",
		Source: "nvmlDeviceGetName, nvmlDeviceGetPciInfo_v3, nvmlDeviceGetVbiosVersion, nvmlDeviceGetSerial, nvmlDeviceGetMigMode",
		read: ofCards(func(c cardView, put putFunc) {
			mode := ""
			if on, ok := c.Identity.MIGMode.Get(); ok {
				mode = "disabled"
				if on {
					mode = "enabled"
				}
			}
			put(1, c.Identity.Name, c.Identity.PCIBusID, c.Identity.VBIOS, c.Identity.Serial, mode)
		}, "name", "pci_bus_id", "vbios", "serial", "mig_mode"),
	},
	{
		Name: "gpu_utilization_ratio", Unit: Ratio, Group: GroupCard, Labels: cardLabels,
		Help:   "Part of the driver's last sample period in which at least one kernel ran",
		Source: "nvmlDeviceGetUtilizationRates",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint32] { return r.UtilizationPercent }, 100),
	},
	{
		Name: "gpu_memory_utilization_ratio", Unit: Ratio, Group: GroupCard, Labels: cardLabels,
		Help:   "Part of the driver's last sample period in which device memory was read or written",
		Source: "nvmlDeviceGetUtilizationRates",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint32] { return r.MemoryUtilizationPercent }, 100),
	},
	{
		Name: "gpu_encoder_utilization_ratio", Unit: Ratio, Group: GroupCard, Labels: cardLabels,
		Help:   "Utilization of the video encoder",
		Source: "nvmlDeviceGetEncoderUtilization",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint32] { return r.EncoderUtilizationPercent }, 100),
	},
	{
		Name: "gpu_decoder_utilization_ratio", Unit: Ratio, Group: GroupCard, Labels: cardLabels,
		Help:   "Utilization of the video decoder",
		Source: "nvmlDeviceGetDecoderUtilization",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint32] { return r.DecoderUtilizationPercent }, 100),
	},
	{
		Name: "gpu_memory_total_bytes", Unit: Bytes, Group: GroupCard, Labels: cardLabels,
		Help:   "Device memory of the card",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint64] { return r.MemoryTotalBytes }, 1),
	},
	{
		Name: "gpu_memory_used_bytes", Unit: Bytes, Group: GroupCard, Labels: cardLabels,
		Help:   "Device memory in use, without the driver's reserve",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint64] { return r.MemoryUsedBytes }, 1),
	},
	{
		Name: "gpu_memory_reserved_bytes", Unit: Bytes, Group: GroupCard, Labels: cardLabels,
		Help:   "Device memory that the driver and the firmware keep for themselves",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint64] { return r.MemoryReservedBytes }, 1),
	},
	{
		Name: "gpu_memory_free_bytes", Unit: Bytes, Group: GroupCard, Labels: cardLabels,
		Help:   "Device memory that can be allocated",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[uint64] { return r.MemoryFreeBytes }, 1),
	},
	{
		Name: "gpu_memory_unattributed_bytes", Unit: Bytes, Group: GroupCard, Labels: cardLabels,
		Help:   "Device memory in use that no listed process explains",
		Source: "used memory of the card minus that of its processes",
		read: ofCards(func(c cardView, put putFunc) {
			if value, ok := c.UnattributedMemoryBytes.Get(); ok {
				put(float64(value))
			}
		}),
	},
	{
		Name: "gpu_memory_suspects", Unit: Count, Group: GroupCard, Labels: cardLabels,
		Help:   "Processes that may have the device memory that no listed process explains",
		Source: "open files and mappings under /proc; gwho names the processes",
		read: ofCards(func(c cardView, put putFunc) {
			if count, known := suspectCount(c.Card); known {
				put(float64(count))
			}
		}),
	},
	{
		Name: "gpu_temperature_celsius", Unit: Celsius, Group: GroupCard, Labels: with(cardLabels, "sensor"),
		Help:   "Temperature by sensor, core or memory",
		Source: "nvmlDeviceGetTemperature, nvmlDeviceGetFieldValues",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			if value, ok := r.TemperatureC.Get(); ok {
				put(float64(value), "core")
			}
			if value, ok := r.MemoryTemperatureC.Get(); ok {
				put(float64(value), "memory")
			}
		}, "sensor"),
	},
	{
		Name: "gpu_temperature_threshold_celsius", Unit: Celsius, Group: GroupCard, Labels: with(cardLabels, "threshold"),
		Help:   "Temperature at which the card slows down, shuts down or leaves its operating range, by threshold",
		Source: "nvmlDeviceGetTemperatureThreshold",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			putByKey(r.ThresholdsC, 1, put)
		}, "threshold"),
	},
	{
		Name: "gpu_power_watts", Unit: Watts, Group: GroupCard, Labels: cardLabels,
		Help:   "Power that the card draws",
		Source: "nvmlDeviceGetPowerUsage",
		read:   ofReading(func(r *gpu.Reading) gpu.Optional[int64] { return r.PowerMW }, 1000),
	},
	{
		Name: "gpu_power_limit_watts", Unit: Watts, Group: GroupCard, Labels: with(cardLabels, "limit"),
		Help:   "Power limit by kind; enforced is the lowest of all limits in force",
		Source: "nvmlDeviceGetEnforcedPowerLimit",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			if value, ok := r.PowerLimitMW.Get(); ok {
				put(thousandths(value), "enforced")
			}
		}, "limit"),
	},
	{
		Name: "gpu_energy_joules_total", Type: Counter, Unit: Joules, Group: GroupCard, Labels: cardLabels,
		Help:   "Energy of the card since the exporter started, as it was metered",
		Source: "nvmlDeviceGetTotalEnergyConsumption, else nvmlDeviceGetPowerUsage over time",
		read: ofCardsSince(sinceStart, func(c cardView, put putFunc) {
			if value, ok := c.EnergyMJ.Get(); ok {
				put(thousandths(value))
			}
		}),
	},
	{
		Name: "gpu_clock_hertz", Unit: Hertz, Group: GroupCard, Labels: with(cardLabels, "clock"),
		Help:   "Frequency by clock: sm, memory, graphics or video",
		Source: "nvmlDeviceGetClockInfo",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			putByKey(r.ClocksMHz, 1e6, put)
		}, "clock"),
	},
	{
		Name: "gpu_fan_speed_ratio", Unit: Ratio, Group: GroupCard, Labels: with(cardLabels, "fan"),
		Help:   "Intended speed by fan; absent for cards that have no fan of their own",
		Source: "nvmlDeviceGetFanSpeed_v2",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			for fan, percent := range r.FanPercent {
				put(float64(percent)/100, strconv.Itoa(fan))
			}
		}, "fan"),
	},
	{
		Name: "gpu_persistence_mode", Unit: Flag, Group: GroupCard, Labels: cardLabels,
		Help:   "Whether the driver keeps the card initialised while nobody uses it",
		Source: "nvmlDeviceGetPersistenceMode",
		read: ofCards(func(c cardView, put putFunc) {
			if on, ok := c.Identity.PersistenceMode.Get(); ok {
				put(oneIf(on))
			}
		}),
	},
	{
		Name: "gpu_pcie_link_generation", Unit: Generation, Group: GroupCard, Labels: with(cardLabels, "state"),
		Help:   "PCIe generation of the link, current or the max that card and slot can do; idle cards lower the current one",
		Source: "nvmlDeviceGetCurrPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			putCurrentAndMax(r.PCIeGeneration, r.PCIeGenerationMax, put)
		}, "state"),
	},
	{
		Name: "gpu_pcie_link_width", Unit: Lanes, Group: GroupCard, Labels: with(cardLabels, "state"),
		Help:   "Width of the PCIe link, current or the max that card and slot can do",
		Source: "nvmlDeviceGetCurrPcieLinkWidth, nvmlDeviceGetMaxPcieLinkWidth",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			putCurrentAndMax(r.PCIeWidth, r.PCIeWidthMax, put)
		}, "state"),
	},
}

func putCurrentAndMax(current, most gpu.Optional[int64], put putFunc) {
	if value, ok := current.Get(); ok {
		put(float64(value), "current")
	}
	if value, ok := most.Get(); ok {
		put(float64(value), "max")
	}
}

// downReasons bounds the label reason: a Reason may carry free text.
var downReasons = []string{gpu.DownLost, gpu.DownResetRequired, gpu.DownRefused, "hung", "missing", "failed"}

var healthFamilies = []Family{
	{
		Name: "gpu_up", Unit: Flag, Group: GroupHealth, Labels: cardLabels,
		Help:   "Whether the card answered in the newest pass and can work",
		Source: "all NVML calls on the card",
		read:   ofCards(func(c cardView, put putFunc) { put(oneIf(c.Up)) }),
	},
	{
		Name: "gpu_down_reason", Unit: Info, Group: GroupHealth, Labels: with(cardLabels, "reason"),
		Help:   "Why the card is not up: lost, reset_required, refused, hung, missing or failed; absent while it is up",
		Source: "NVML's return codes, hung: a call past its deadline, missing: no longer listed",
		read: ofCards(func(c cardView, put putFunc) {
			if c.Up {
				return
			}
			reason := c.Reason
			if !slices.Contains(downReasons, reason) {
				reason = "failed"
			}
			put(1, reason)
		}, "reason"),
	},
	{
		Name: "gpu_throttle_seconds_total", Type: Counter, Unit: Seconds, Group: GroupHealth, Labels: with(cardLabels, "reason"),
		Help:   "Time for which the card was held back, by reason, since the exporter started",
		Source: "nvmlDeviceGetCurrentClocksEventReasons over time",
		read: ofCardsSince(sinceStart, func(c cardView, put putFunc) {
			seconds := maps.Clone(c.ThrottleUS)
			// A card that says its reasons had none of the others.
			if c.Reading != nil && c.Reading.ThrottleReasons.Known {
				if seconds == nil {
					seconds = map[string]int64{}
				}
				for _, reason := range gpu.ThrottleReasons {
					seconds[reason.Name] += 0
				}
			}
			for _, reason := range slices.Sorted(maps.Keys(seconds)) {
				put(flooredSeconds(seconds[reason]), reason)
			}
		}, "reason"),
	},
	{
		Name: "gpu_throttle_active", Unit: Flag, Group: GroupHealth, Labels: with(cardLabels, "reason"),
		Help:   "Whether the card is held back now, by reason",
		Source: "nvmlDeviceGetCurrentClocksEventReasons",
		read: ofReadings(func(r *gpu.Reading, put putFunc) {
			mask, ok := r.ThrottleReasons.Get()
			if !ok {
				return
			}
			for _, reason := range gpu.ThrottleReasons {
				put(oneIf(mask&reason.Mask != 0), reason.Name)
			}
		}, "reason"),
	},
	{
		Name: "gpu_xid_errors_total", Type: Counter, Unit: Count, Group: GroupHealth, Labels: with(cardLabels, "xid"),
		Help:   "XID errors of the card by number, since the exporter started",
		Source: "nvmlEventSetWait_v2",
		read: ofCardsSince(sinceStart, func(c cardView, put putFunc) {
			for _, xid := range slices.Sorted(maps.Keys(c.XIDs)) {
				put(float64(c.XIDs[xid].Count), strconv.FormatUint(xid, 10))
			}
		}, "xid"),
	},
	{
		Name: "gpu_xid_last_timestamp_seconds", Unit: UnixSeconds, Group: GroupHealth, Labels: with(cardLabels, "xid"),
		Help:   "When the card last reported the XID",
		Source: "nvmlEventSetWait_v2",
		read: ofCards(func(c cardView, put putFunc) {
			for _, xid := range slices.Sorted(maps.Keys(c.XIDs)) {
				if last := c.XIDs[xid].Last; !last.IsZero() {
					put(unixSeconds(last), strconv.FormatUint(xid, 10))
				}
			}
		}, "xid"),
	},
	{
		Name: "gpu_ecc_errors_total", Type: Counter, Unit: Count, Group: GroupHealth, Labels: with(cardLabels, "kind", "scope"),
		Help:   "Memory errors by kind, corrected or uncorrected, and scope; volatile ones count since the driver was loaded",
		Source: "nvmlDeviceGetTotalEccErrors",
		read: ofCards(func(c cardView, put putFunc) {
			for _, kind := range slices.Sorted(maps.Keys(c.ECCErrors)) {
				put(float64(c.ECCErrors[kind]), kind, "volatile")
			}
		}, "kind", "scope"),
	},
}

var migFamilies = []Family{
	{
		Name: "gpu_mig_info", Unit: Info, Group: GroupMIG, Labels: with(migLabels, "gpu_instance", "compute_instance"),
		Help:   "Identity of the MIG instance",
		Source: "nvmlDeviceGetGpuInstanceId, nvmlDeviceGetComputeInstanceId",
		read: ofMIG(func(i *gpu.Instance, put putFunc) {
			put(1, strconv.Itoa(i.GPUInstance), strconv.Itoa(i.ComputeInstance))
		}, "gpu_instance", "compute_instance"),
	},
	{
		Name: "gpu_mig_slices", Unit: Count, Group: GroupMIG, Labels: migLabels,
		Help:   "Compute slices of the instance",
		Source: "nvmlDeviceGetAttributes_v2",
		read:   ofMIG(func(i *gpu.Instance, put putFunc) { put(float64(i.Slices)) }),
	},
	{
		Name: "gpu_mig_memory_total_bytes", Unit: Bytes, Group: GroupMIG, Labels: migLabels,
		Help:   "Device memory of the instance; compute instances of one GPU instance share it",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read: ofMIG(func(i *gpu.Instance, put putFunc) {
			if value, ok := i.MemoryTotalBytes.Get(); ok {
				put(float64(value))
			}
		}),
	},
	{
		Name: "gpu_mig_memory_used_bytes", Unit: Bytes, Group: GroupMIG, Labels: migLabels,
		Help:   "Device memory in use on the instance; compute instances of one GPU instance share it",
		Source: "nvmlDeviceGetMemoryInfo_v2",
		read: ofMIG(func(i *gpu.Instance, put putFunc) {
			if value, ok := i.MemoryUsedBytes.Get(); ok {
				put(float64(value))
			}
		}),
	},
}

// ofNode reads one number of the snapshot.
func ofNode(read func(s *snapshot.Snapshot) (float64, bool)) func(*view, emitFunc) {
	return func(v *view, emit emitFunc) {
		if value, ok := read(v.snapshot); ok {
			emit([]*dto.LabelPair{}, value, nil)
		}
	}
}
