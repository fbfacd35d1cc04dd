package nvml

import gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

// Every call of go-nvml stands in this file, each within guarded and under its
// own name of the manifest; calls_test.go holds the package to that.

func (l *library) init() gonvml.Return {
	_, ret := guarded(l, fnInit, func() (nothing, gonvml.Return) { return nothing{}, l.api.Init() })
	return ret
}

func (l *library) shutdown() gonvml.Return {
	_, ret := guarded(l, fnShutdown, func() (nothing, gonvml.Return) { return nothing{}, l.api.Shutdown() })
	return ret
}

func (l *library) driverVersion() (string, gonvml.Return) {
	return guarded(l, fnSystemGetDriverVersion, l.api.SystemGetDriverVersion)
}

func (l *library) nvmlVersion() (string, gonvml.Return) {
	return guarded(l, fnSystemGetNVMLVersion, l.api.SystemGetNVMLVersion)
}

func (l *library) cudaVersion() (int, gonvml.Return) {
	return guarded(l, fnSystemGetCudaDriverVersion, l.api.SystemGetCudaDriverVersion)
}

func (l *library) cudaVersionV2() (int, gonvml.Return) {
	return guarded(l, fnSystemGetCudaDriverVersionV2, l.api.SystemGetCudaDriverVersion_v2)
}

func (l *library) deviceCount() (int, gonvml.Return) {
	return guarded(l, fnDeviceGetCount, l.api.DeviceGetCount)
}

func (l *library) deviceByIndex(index int) (gonvml.Device, gonvml.Return) {
	return guarded(l, fnDeviceGetHandleByIndex, func() (gonvml.Device, gonvml.Return) { return l.api.DeviceGetHandleByIndex(index) })
}

func (l *library) uuid(d gonvml.Device) (string, gonvml.Return) {
	return guarded(l, fnGetUUID, d.GetUUID)
}

func (l *library) name(d gonvml.Device) (string, gonvml.Return) {
	return guarded(l, fnGetName, d.GetName)
}

func (l *library) serial(d gonvml.Device) (string, gonvml.Return) {
	return guarded(l, fnGetSerial, d.GetSerial)
}

func (l *library) minorNumber(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetMinorNumber, d.GetMinorNumber)
}

func (l *library) vbios(d gonvml.Device) (string, gonvml.Return) {
	return guarded(l, fnGetVbiosVersion, d.GetVbiosVersion)
}

func (l *library) pci(d gonvml.Device) (gonvml.PciInfo, gonvml.Return) {
	return guarded(l, fnGetPciInfo, d.GetPciInfo)
}

func (l *library) persistenceMode(d gonvml.Device) (gonvml.EnableState, gonvml.Return) {
	return guarded(l, fnGetPersistenceMode, d.GetPersistenceMode)
}

func (l *library) accountingMode(d gonvml.Device) (gonvml.EnableState, gonvml.Return) {
	return guarded(l, fnGetAccountingMode, d.GetAccountingMode)
}

// migMode gives the current mode, which is what holds until the next reset.
func (l *library) migMode(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetMigMode, func() (int, gonvml.Return) {
		current, _, ret := d.GetMigMode()
		return current, ret
	})
}

func (l *library) maxMIGDevices(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetMaxMigDeviceCount, d.GetMaxMigDeviceCount)
}

func (l *library) migDevice(d gonvml.Device, index int) (gonvml.Device, gonvml.Return) {
	return guarded(l, fnGetMigDeviceHandleByIndex, func() (gonvml.Device, gonvml.Return) { return d.GetMigDeviceHandleByIndex(index) })
}

func (l *library) gpuInstance(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetGpuInstanceID, d.GetGpuInstanceId)
}

func (l *library) computeInstance(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetComputeInstanceID, d.GetComputeInstanceId)
}

func (l *library) attributes(d gonvml.Device) (gonvml.DeviceAttributes, gonvml.Return) {
	return guarded(l, fnGetAttributes, d.GetAttributes)
}

func (l *library) instanceProfile(d gonvml.Device, profile int) (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
	return guarded(l, fnGetGpuInstanceProfileInfo, func() (gonvml.GpuInstanceProfileInfo, gonvml.Return) {
		return d.GetGpuInstanceProfileInfo(profile)
	})
}

func (l *library) computeProcesses(d gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(l, fnGetComputeRunningProcesses, d.GetComputeRunningProcesses)
}

func (l *library) graphicsProcesses(d gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(l, fnGetGraphicsRunningProcesses, d.GetGraphicsRunningProcesses)
}

func (l *library) mpsProcesses(d gonvml.Device) ([]gonvml.ProcessInfo, gonvml.Return) {
	return guarded(l, fnGetMPSComputeRunningProcesses, d.GetMPSComputeRunningProcesses)
}

func (l *library) processUtilization(d gonvml.Device, lastSeen uint64) ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
	return guarded(l, fnGetProcessUtilization, func() ([]gonvml.ProcessUtilizationSample, gonvml.Return) {
		return d.GetProcessUtilization(lastSeen)
	})
}

func (l *library) utilization(d gonvml.Device) (gonvml.Utilization, gonvml.Return) {
	return guarded(l, fnGetUtilizationRates, d.GetUtilizationRates)
}

func (l *library) encoderUtilization(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetEncoderUtilization, func() (uint32, gonvml.Return) {
		percent, _, ret := d.GetEncoderUtilization()
		return percent, ret
	})
}

func (l *library) decoderUtilization(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetDecoderUtilization, func() (uint32, gonvml.Return) {
		percent, _, ret := d.GetDecoderUtilization()
		return percent, ret
	})
}

func (l *library) memory(d gonvml.Device) (gonvml.Memory, gonvml.Return) {
	return guarded(l, fnGetMemoryInfo, d.GetMemoryInfo)
}

func (l *library) memoryV2(d gonvml.Device) (gonvml.Memory_v2, gonvml.Return) {
	return guarded(l, fnGetMemoryInfoV2, d.GetMemoryInfo_v2)
}

func (l *library) temperature(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetTemperature, func() (uint32, gonvml.Return) { return d.GetTemperature(gonvml.TEMPERATURE_GPU) })
}

func (l *library) temperatureV(d gonvml.Device) (gonvml.Temperature, gonvml.Return) {
	return guarded(l, fnGetTemperatureV, func() (gonvml.Temperature, gonvml.Return) { return d.GetTemperatureV().V1() })
}

func (l *library) temperatureThreshold(d gonvml.Device, threshold gonvml.TemperatureThresholds) (uint32, gonvml.Return) {
	return guarded(l, fnGetTemperatureThreshold, func() (uint32, gonvml.Return) { return d.GetTemperatureThreshold(threshold) })
}

// fieldValues fills values in place; each has a return code of its own.
func (l *library) fieldValues(d gonvml.Device, values []gonvml.FieldValue) gonvml.Return {
	_, ret := guarded(l, fnGetFieldValues, func() (nothing, gonvml.Return) { return nothing{}, d.GetFieldValues(values) })
	return ret
}

func (l *library) power(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetPowerUsage, d.GetPowerUsage)
}

func (l *library) powerLimit(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetEnforcedPowerLimit, d.GetEnforcedPowerLimit)
}

func (l *library) energy(d gonvml.Device) (uint64, gonvml.Return) {
	return guarded(l, fnGetTotalEnergyConsumption, d.GetTotalEnergyConsumption)
}

func (l *library) clock(d gonvml.Device, clock gonvml.ClockType) (uint32, gonvml.Return) {
	return guarded(l, fnGetClockInfo, func() (uint32, gonvml.Return) { return d.GetClockInfo(clock) })
}

func (l *library) fanCount(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetNumFans, d.GetNumFans)
}

func (l *library) fanSpeed(d gonvml.Device) (uint32, gonvml.Return) {
	return guarded(l, fnGetFanSpeed, d.GetFanSpeed)
}

func (l *library) fanSpeedV2(d gonvml.Device, fan int) (uint32, gonvml.Return) {
	return guarded(l, fnGetFanSpeedV2, func() (uint32, gonvml.Return) { return d.GetFanSpeed_v2(fan) })
}

func (l *library) clocksEventReasons(d gonvml.Device) (uint64, gonvml.Return) {
	return guarded(l, fnGetCurrentClocksEventReasons, d.GetCurrentClocksEventReasons)
}

func (l *library) clocksThrottleReasons(d gonvml.Device) (uint64, gonvml.Return) {
	return guarded(l, fnGetCurrentClocksThrottleReasons, d.GetCurrentClocksThrottleReasons)
}

func (l *library) pcieGeneration(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetCurrPcieLinkGeneration, d.GetCurrPcieLinkGeneration)
}

func (l *library) pcieGenerationMax(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetMaxPcieLinkGeneration, d.GetMaxPcieLinkGeneration)
}

func (l *library) pcieWidth(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetCurrPcieLinkWidth, d.GetCurrPcieLinkWidth)
}

func (l *library) pcieWidthMax(d gonvml.Device) (int, gonvml.Return) {
	return guarded(l, fnGetMaxPcieLinkWidth, d.GetMaxPcieLinkWidth)
}

// eccErrors are the volatile counts, those since the driver was loaded.
func (l *library) eccErrors(d gonvml.Device, kind gonvml.MemoryErrorType) (uint64, gonvml.Return) {
	return guarded(l, fnGetTotalEccErrors, func() (uint64, gonvml.Return) { return d.GetTotalEccErrors(kind, gonvml.VOLATILE_ECC) })
}

func (l *library) eventSet() (gonvml.EventSet, gonvml.Return) {
	return guarded(l, fnEventSetCreate, l.api.EventSetCreate)
}

func (l *library) freeEventSet(set gonvml.EventSet) gonvml.Return {
	_, ret := guarded(l, fnEventSetFree, func() (nothing, gonvml.Return) { return nothing{}, l.api.EventSetFree(set) })
	return ret
}

func (l *library) waitForEvent(set gonvml.EventSet, timeoutMS uint32) (gonvml.EventData, gonvml.Return) {
	return guarded(l, fnEventSetWait, func() (gonvml.EventData, gonvml.Return) { return l.api.EventSetWait(set, timeoutMS) })
}

func (l *library) registerXID(d gonvml.Device, set gonvml.EventSet) gonvml.Return {
	_, ret := guarded(l, fnRegisterEvents, func() (nothing, gonvml.Return) {
		return nothing{}, d.RegisterEvents(gonvml.EventTypeXidCriticalError, set)
	})
	return ret
}
