package lab

import (
	"maps"
	"math"
	"slices"
	"strconv"
)

// Values are numbers that a card answers, by key. A key that is not there has
// the value of an idle H100. NotAvailable: the card has no such thing.
type Values map[Key]int64

// NotAvailable makes a card answer NOT_SUPPORTED.
const NotAvailable = math.MinInt64

// Key names one of a card's values; the text is the scenario's own.
type Key string

// Keys of Values. Flags are 0 or 1.
const (
	MemoryTotalMiB    Key = "mem_total_mib"
	MemoryUsedMiB     Key = "mem_used_mib" // without the reserve; default: the sum of the processes
	MemoryReservedMiB Key = "mem_reserved_mib"

	// The engines' use in per cent; default: what the processes ask for, at
	// most 100. What exceeds the processes' sum is nobody's.
	UtilizationPercent        Key = "util"
	MemoryUtilizationPercent  Key = "memutil"
	EncoderUtilizationPercent Key = "enc"
	DecoderUtilizationPercent Key = "dec"

	TemperatureC          Key = "temp"
	MemoryTemperatureC    Key = "mem_temp" // default: none
	ShutdownTemperatureC  Key = "temp_shutdown"
	SlowdownTemperatureC  Key = "temp_slowdown"
	MemoryMaxTemperatureC Key = "temp_mem_max"
	GPUMaxTemperatureC    Key = "temp_gpu_max"

	PowerMW              Key = "power_mw"
	PowerLimitMW         Key = "power_limit_mw"
	EnforcedPowerLimitMW Key = "power_enforced_mw" // default: PowerLimitMW
	DefaultPowerLimitMW  Key = "power_default_mw"
	MinPowerLimitMW      Key = "power_min_mw"
	MaxPowerLimitMW      Key = "power_max_mw"
	// EnergyMJ is the counter at the epoch; power adds to it from then on. In a
	// Change it is a driver reload: the counter starts again from this value.
	EnergyMJ Key = "energy_mj"

	GraphicsClockMHz    Key = "graphics_mhz"
	SMClockMHz          Key = "sm_mhz"
	MemoryClockMHz      Key = "mem_mhz"
	VideoClockMHz       Key = "video_mhz"
	MaxGraphicsClockMHz Key = "max_graphics_mhz"
	MaxSMClockMHz       Key = "max_sm_mhz"
	MaxMemoryClockMHz   Key = "max_mem_mhz"
	MaxVideoClockMHz    Key = "max_video_mhz"

	FanPercent      Key = "fan"  // default: no fans
	Fans            Key = "fans" // number of fans; default 1 if FanPercent is there
	ThrottleReasons Key = "throttle"

	PCIeGeneration    Key = "pcie_gen"
	PCIeGenerationMax Key = "pcie_gen_max"
	PCIeWidth         Key = "pcie_width"
	PCIeWidthMax      Key = "pcie_width_max"
	PCIeReplays       Key = "pcie_replays"
	PCIeTransmitKBs   Key = "pcie_tx_kbs"
	PCIeReceiveKBs    Key = "pcie_rx_kbs"

	ECCMode                 Key = "ecc" // flag
	ECCCorrected            Key = "ecc_corrected"
	ECCUncorrected          Key = "ecc_uncorrected"
	ECCCorrectedAggregate   Key = "ecc_corrected_aggregate"
	ECCUncorrectedAggregate Key = "ecc_uncorrected_aggregate"
	RemappedCorrected       Key = "remapped_corrected"
	RemappedUncorrected     Key = "remapped_uncorrected"
	RemapPending            Key = "remap_pending"   // flag
	RemapFailure            Key = "remap_failure"   // flag
	RetiredSingleBit        Key = "retired_sbe"     // default: not supported
	RetiredDoubleBit        Key = "retired_dbe"     // default: not supported
	RetiredPending          Key = "retired_pending" // flag; default: not supported

	NVLinks        Key = "nvlinks"
	NVLinkCRC      Key = "nvlink_crc"
	NVLinkReplay   Key = "nvlink_replay"
	NVLinkRecovery Key = "nvlink_recovery"

	MIGMode          Key = "mig"    // flag; default: on if the card has instances
	Slices           Key = "slices" // compute slices when cut: 7, or 4
	PersistenceMode  Key = "persistence"
	PerformanceState Key = "pstate"
	ComputeMode      Key = "compute_mode"
	MinorNumber      Key = "minor"
	AccountingMode   Key = "accounting" // 1: the card accounts its processes itself
	RecoveryAction   Key = "recovery_action"
	Architecture     Key = "arch"
	CUDAMajor        Key = "cuda_major"
	CUDAMinor        Key = "cuda_minor"
	CUDACores        Key = "cores"
	MemoryBusWidth   Key = "bus_width"

	// Lost (flag): every call on the card, its handle too, answers
	// GPU_IS_LOST. Fail is a return code for the same, e.g. 16 (reset required:
	// identity still answers), 4 or 17 (refused).
	Lost Key = "lost"
	Fail Key = "fail"
)

// defaultPowerMW is the library's, for folding changes.
const defaultPowerMW = 70000

func (v Values) write(l *line) {
	for _, k := range slices.Sorted(maps.Keys(v)) {
		if v[k] == NotAvailable {
			l.word(string(k) + "=na")
		} else {
			l.word(string(k) + "=" + strconv.FormatInt(v[k], 10))
		}
	}
}

// power is what the energy counter integrates.
func (v Values) power() int64 {
	p, ok := v[PowerMW]
	switch {
	case !ok:
		return defaultPowerMW
	case p == NotAvailable:
		return 0
	}
	return p
}

// fold is v as the change leaves it, with the energy base moved so that the
// counter reads the same ever after.
func (v Values) fold(c Change) Values {
	out := maps.Clone(v)
	if out == nil {
		out = Values{}
	}
	maps.Copy(out, c.Values)
	us := c.At.Microseconds()
	base := v[EnergyMJ]
	if base == NotAvailable {
		return out
	}
	if reload, ok := c.Values[EnergyMJ]; ok {
		if reload != NotAvailable {
			out[EnergyMJ] = reload - out.power()*us/1e6
		}
		return out
	}
	if difference := (v.power() - out.power()) * us / 1e6; difference != 0 {
		out[EnergyMJ] = base + difference
	}
	return out
}
