package nvml

import (
	"errors"
	"fmt"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/exporter/gpu"
)

// ErrLibraryMismatch is a library of another version than the kernel module:
// the driver was upgraded under a running process. The old library stays
// mapped for as long as the process lives, so only a new process can help.
var ErrLibraryMismatch = errors.New("the NVML library and the NVIDIA kernel module are of different versions")

// returnNames are NVML's own names. The library has a function for this; it
// is not used, because go-nvml's way to it changes while a library is loaded.
var returnNames = map[gonvml.Return]string{
	returnPanicked:                         "PANIC",
	gonvml.SUCCESS:                         "SUCCESS",
	gonvml.ERROR_UNINITIALIZED:             "UNINITIALIZED",
	gonvml.ERROR_INVALID_ARGUMENT:          "INVALID_ARGUMENT",
	gonvml.ERROR_NOT_SUPPORTED:             "NOT_SUPPORTED",
	gonvml.ERROR_NO_PERMISSION:             "NO_PERMISSION",
	gonvml.ERROR_NOT_FOUND:                 "NOT_FOUND",
	gonvml.ERROR_INSUFFICIENT_SIZE:         "INSUFFICIENT_SIZE",
	gonvml.ERROR_INSUFFICIENT_POWER:        "INSUFFICIENT_POWER",
	gonvml.ERROR_DRIVER_NOT_LOADED:         "DRIVER_NOT_LOADED",
	gonvml.ERROR_TIMEOUT:                   "TIMEOUT",
	gonvml.ERROR_IRQ_ISSUE:                 "IRQ_ISSUE",
	gonvml.ERROR_LIBRARY_NOT_FOUND:         "LIBRARY_NOT_FOUND",
	gonvml.ERROR_FUNCTION_NOT_FOUND:        "FUNCTION_NOT_FOUND",
	gonvml.ERROR_CORRUPTED_INFOROM:         "CORRUPTED_INFOROM",
	gonvml.ERROR_GPU_IS_LOST:               "GPU_IS_LOST",
	gonvml.ERROR_RESET_REQUIRED:            "RESET_REQUIRED",
	gonvml.ERROR_OPERATING_SYSTEM:          "OPERATING_SYSTEM",
	gonvml.ERROR_LIB_RM_VERSION_MISMATCH:   "LIB_RM_VERSION_MISMATCH",
	gonvml.ERROR_IN_USE:                    "IN_USE",
	gonvml.ERROR_MEMORY:                    "MEMORY",
	gonvml.ERROR_NO_DATA:                   "NO_DATA",
	gonvml.ERROR_INSUFFICIENT_RESOURCES:    "INSUFFICIENT_RESOURCES",
	gonvml.ERROR_ARGUMENT_VERSION_MISMATCH: "ARGUMENT_VERSION_MISMATCH",
	gonvml.ERROR_DEPRECATED:                "DEPRECATED",
	gonvml.ERROR_NOT_READY:                 "NOT_READY",
	gonvml.ERROR_GPU_NOT_FOUND:             "GPU_NOT_FOUND",
	gonvml.ERROR_INVALID_STATE:             "INVALID_STATE",
	gonvml.ERROR_UNKNOWN:                   "UNKNOWN",
}

// failure names call and return code: "GetUUID: GPU_IS_LOST (15)".
func failure(f function, ret gonvml.Return) string {
	name, known := returnNames[ret]
	if !known {
		name = "unknown return code"
	}
	return fmt.Sprintf("%s: %s (%d)", manifest[f].method, name, int32(ret))
}

// downReason says whether a return code is the card saying that it can't
// work. Refusals count only from the calls without which there is no reading:
// many metrics are refused to all but root on a card that works.
func downReason(ret gonvml.Return, essential bool) (reason string, down bool) {
	switch ret {
	case gonvml.ERROR_GPU_IS_LOST:
		return gpu.DownLost, true
	case gonvml.ERROR_RESET_REQUIRED:
		return gpu.DownResetRequired, true
	case gonvml.ERROR_NO_PERMISSION, gonvml.ERROR_OPERATING_SYSTEM:
		return gpu.DownRefused, essential
	}
	return "", false
}

// ofWholeNVML says whether a return code is about NVML as a whole and not
// about the card that was asked.
func ofWholeNVML(ret gonvml.Return) bool {
	switch ret {
	case gonvml.ERROR_UNINITIALIZED, gonvml.ERROR_DRIVER_NOT_LOADED, gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return true
	}
	return false
}

// remedy says what to do about a return code that stops NVML as a whole.
func remedy(ret gonvml.Return) string {
	switch ret {
	case gonvml.ERROR_DRIVER_NOT_LOADED:
		return "the NVIDIA kernel module is not loaded: load it (modprobe nvidia) and look for NVRM in dmesg if that fails; trying again"
	case gonvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "the driver was upgraded: reboot, or stop every GPU program and reload the nvidia kernel modules"
	case gonvml.ERROR_NO_PERMISSION:
		return "the NVIDIA device files can't be opened: check the modes of /dev/nvidiactl and /dev/nvidia* and the unit's DeviceAllow"
	case gonvml.ERROR_UNINITIALIZED:
		return "NVML is started again"
	}
	return "look for NVRM in dmesg; in a container, restart it, as its access to the devices may have been taken away; trying again"
}
