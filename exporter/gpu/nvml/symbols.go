package nvml

// function names one function of go-nvml that this package calls.
type function int

const (
	fnInit function = iota
	fnShutdown
	fnSystemGetDriverVersion
	fnSystemGetNVMLVersion
	fnSystemGetCudaDriverVersion
	fnSystemGetCudaDriverVersionV2
	fnDeviceGetCount
	fnDeviceGetHandleByIndex
	fnGetUUID
	fnGetName
	fnGetSerial
	fnGetMinorNumber
	fnGetVbiosVersion
	fnGetPciInfo
	fnGetPersistenceMode
	fnGetAccountingMode
	fnGetMigMode
	fnGetMaxMigDeviceCount
	fnGetMigDeviceHandleByIndex
	fnGetGpuInstanceID
	fnGetComputeInstanceID
	fnGetAttributes
	fnGetGpuInstanceProfileInfo
	fnGetComputeRunningProcesses
	fnGetGraphicsRunningProcesses
	fnGetMPSComputeRunningProcesses
	fnGetProcessUtilization
	fnGetUtilizationRates
	fnGetEncoderUtilization
	fnGetDecoderUtilization
	fnGetMemoryInfo
	fnGetMemoryInfoV2
	fnGetTemperature
	fnGetTemperatureV
	fnGetTemperatureThreshold
	fnGetFieldValues
	fnGetPowerUsage
	fnGetEnforcedPowerLimit
	fnGetTotalEnergyConsumption
	fnGetClockInfo
	fnGetNumFans
	fnGetFanSpeed
	fnGetFanSpeedV2
	fnGetCurrentClocksEventReasons
	fnGetCurrentClocksThrottleReasons
	fnGetCurrPcieLinkGeneration
	fnGetMaxPcieLinkGeneration
	fnGetCurrPcieLinkWidth
	fnGetMaxPcieLinkWidth
	fnGetTotalEccErrors
	fnEventSetCreate
	fnEventSetFree
	fnEventSetWait
	fnRegisterEvents
	functionCount
)

// entry is what a function of go-nvml needs of the library.
type entry struct {
	// method is go-nvml's name for it.
	method string
	// versions are the C symbols go-nvml may call for it, oldest first. When
	// it loads a library go-nvml moves to the newest version that is there,
	// and it never moves back; the others are never called.
	versions []string
}

// manifest declares every go-nvml call of this package with the symbols it
// ends in. Calling a symbol that the library lacks ends the process with exit
// status 127, which no code can catch, so nothing is called that is not
// declared here and was not found in the loaded library. A test derives the
// same table from go-nvml's source and from the calls in this package.
var manifest = [functionCount]entry{
	fnInit:                            {"Init", []string{"nvmlInit", "nvmlInit_v2"}},
	fnShutdown:                        {"Shutdown", []string{"nvmlShutdown"}},
	fnSystemGetDriverVersion:          {"SystemGetDriverVersion", []string{"nvmlSystemGetDriverVersion"}},
	fnSystemGetNVMLVersion:            {"SystemGetNVMLVersion", []string{"nvmlSystemGetNVMLVersion"}},
	fnSystemGetCudaDriverVersion:      {"SystemGetCudaDriverVersion", []string{"nvmlSystemGetCudaDriverVersion"}},
	fnSystemGetCudaDriverVersionV2:    {"SystemGetCudaDriverVersion_v2", []string{"nvmlSystemGetCudaDriverVersion_v2"}},
	fnDeviceGetCount:                  {"DeviceGetCount", []string{"nvmlDeviceGetCount", "nvmlDeviceGetCount_v2"}},
	fnDeviceGetHandleByIndex:          {"DeviceGetHandleByIndex", []string{"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2"}},
	fnGetUUID:                         {"GetUUID", []string{"nvmlDeviceGetUUID"}},
	fnGetName:                         {"GetName", []string{"nvmlDeviceGetName"}},
	fnGetSerial:                       {"GetSerial", []string{"nvmlDeviceGetSerial"}},
	fnGetMinorNumber:                  {"GetMinorNumber", []string{"nvmlDeviceGetMinorNumber"}},
	fnGetVbiosVersion:                 {"GetVbiosVersion", []string{"nvmlDeviceGetVbiosVersion"}},
	fnGetPciInfo:                      {"GetPciInfo", []string{"nvmlDeviceGetPciInfo", "nvmlDeviceGetPciInfo_v2", "nvmlDeviceGetPciInfo_v3"}},
	fnGetPersistenceMode:              {"GetPersistenceMode", []string{"nvmlDeviceGetPersistenceMode"}},
	fnGetAccountingMode:               {"GetAccountingMode", []string{"nvmlDeviceGetAccountingMode"}},
	fnGetMigMode:                      {"GetMigMode", []string{"nvmlDeviceGetMigMode"}},
	fnGetMaxMigDeviceCount:            {"GetMaxMigDeviceCount", []string{"nvmlDeviceGetMaxMigDeviceCount"}},
	fnGetMigDeviceHandleByIndex:       {"GetMigDeviceHandleByIndex", []string{"nvmlDeviceGetMigDeviceHandleByIndex"}},
	fnGetGpuInstanceID:                {"GetGpuInstanceId", []string{"nvmlDeviceGetGpuInstanceId"}},
	fnGetComputeInstanceID:            {"GetComputeInstanceId", []string{"nvmlDeviceGetComputeInstanceId"}},
	fnGetAttributes:                   {"GetAttributes", []string{"nvmlDeviceGetAttributes", "nvmlDeviceGetAttributes_v2"}},
	fnGetGpuInstanceProfileInfo:       {"GetGpuInstanceProfileInfo", []string{"nvmlDeviceGetGpuInstanceProfileInfo"}},
	fnGetComputeRunningProcesses:      {"GetComputeRunningProcesses", []string{"nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3"}},
	fnGetGraphicsRunningProcesses:     {"GetGraphicsRunningProcesses", []string{"nvmlDeviceGetGraphicsRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses_v2", "nvmlDeviceGetGraphicsRunningProcesses_v3"}},
	fnGetMPSComputeRunningProcesses:   {"GetMPSComputeRunningProcesses", []string{"nvmlDeviceGetMPSComputeRunningProcesses", "nvmlDeviceGetMPSComputeRunningProcesses_v2", "nvmlDeviceGetMPSComputeRunningProcesses_v3"}},
	fnGetProcessUtilization:           {"GetProcessUtilization", []string{"nvmlDeviceGetProcessUtilization"}},
	fnGetUtilizationRates:             {"GetUtilizationRates", []string{"nvmlDeviceGetUtilizationRates"}},
	fnGetEncoderUtilization:           {"GetEncoderUtilization", []string{"nvmlDeviceGetEncoderUtilization"}},
	fnGetDecoderUtilization:           {"GetDecoderUtilization", []string{"nvmlDeviceGetDecoderUtilization"}},
	fnGetMemoryInfo:                   {"GetMemoryInfo", []string{"nvmlDeviceGetMemoryInfo"}},
	fnGetMemoryInfoV2:                 {"GetMemoryInfo_v2", []string{"nvmlDeviceGetMemoryInfo_v2"}},
	fnGetTemperature:                  {"GetTemperature", []string{"nvmlDeviceGetTemperature"}},
	fnGetTemperatureV:                 {"GetTemperatureV", []string{"nvmlDeviceGetTemperatureV"}},
	fnGetTemperatureThreshold:         {"GetTemperatureThreshold", []string{"nvmlDeviceGetTemperatureThreshold"}},
	fnGetFieldValues:                  {"GetFieldValues", []string{"nvmlDeviceGetFieldValues"}},
	fnGetPowerUsage:                   {"GetPowerUsage", []string{"nvmlDeviceGetPowerUsage"}},
	fnGetEnforcedPowerLimit:           {"GetEnforcedPowerLimit", []string{"nvmlDeviceGetEnforcedPowerLimit"}},
	fnGetTotalEnergyConsumption:       {"GetTotalEnergyConsumption", []string{"nvmlDeviceGetTotalEnergyConsumption"}},
	fnGetClockInfo:                    {"GetClockInfo", []string{"nvmlDeviceGetClockInfo"}},
	fnGetNumFans:                      {"GetNumFans", []string{"nvmlDeviceGetNumFans"}},
	fnGetFanSpeed:                     {"GetFanSpeed", []string{"nvmlDeviceGetFanSpeed"}},
	fnGetFanSpeedV2:                   {"GetFanSpeed_v2", []string{"nvmlDeviceGetFanSpeed_v2"}},
	fnGetCurrentClocksEventReasons:    {"GetCurrentClocksEventReasons", []string{"nvmlDeviceGetCurrentClocksEventReasons"}},
	fnGetCurrentClocksThrottleReasons: {"GetCurrentClocksThrottleReasons", []string{"nvmlDeviceGetCurrentClocksThrottleReasons"}},
	fnGetCurrPcieLinkGeneration:       {"GetCurrPcieLinkGeneration", []string{"nvmlDeviceGetCurrPcieLinkGeneration"}},
	fnGetMaxPcieLinkGeneration:        {"GetMaxPcieLinkGeneration", []string{"nvmlDeviceGetMaxPcieLinkGeneration"}},
	fnGetCurrPcieLinkWidth:            {"GetCurrPcieLinkWidth", []string{"nvmlDeviceGetCurrPcieLinkWidth"}},
	fnGetMaxPcieLinkWidth:             {"GetMaxPcieLinkWidth", []string{"nvmlDeviceGetMaxPcieLinkWidth"}},
	fnGetTotalEccErrors:               {"GetTotalEccErrors", []string{"nvmlDeviceGetTotalEccErrors"}},
	fnEventSetCreate:                  {"EventSetCreate", []string{"nvmlEventSetCreate"}},
	fnEventSetFree:                    {"EventSetFree", []string{"nvmlEventSetFree"}},
	fnEventSetWait:                    {"EventSetWait", []string{"nvmlEventSetWait", "nvmlEventSetWait_v2"}},
	fnRegisterEvents:                  {"RegisterEvents", []string{"nvmlDeviceRegisterEvents"}},
}

// Symbols that are looked at but never called: they tell driver generations apart.
const (
	symbolComputeProcessesV3    = "nvmlDeviceGetComputeRunningProcesses_v3"
	symbolRunningProcessDetails = "nvmlDeviceGetRunningProcessDetailList"
)

// symbols is what a loaded library offers; it never changes once taken.
type symbols struct {
	callable [functionCount]bool
	// moved is the version go-nvml calls from now on.
	moved [functionCount]int
	// processesV3 and processDetails are there or not; see brokenProcessLists.
	processesV3, processDetails bool
}

// takeSymbols looks every symbol of the manifest up. before is the snapshot
// taken earlier in this process, nil at first: go-nvml keeps the newest
// version it has ever moved to, so a function whose newest version went away
// can't be called, even if an older one is there.
func takeSymbols(has func(symbol string) bool, before *symbols) *symbols {
	taken := &symbols{
		processesV3:    has(symbolComputeProcessesV3),
		processDetails: has(symbolRunningProcessDetails),
	}
	for f, e := range manifest {
		moved := 0
		if before != nil {
			moved = before.moved[f]
		}
		for version := moved + 1; version < len(e.versions); version++ {
			if has(e.versions[version]) {
				moved = version
			}
		}
		taken.moved[f] = moved
		taken.callable[f] = has(e.versions[moved])
	}
	return taken
}
