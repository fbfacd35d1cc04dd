package runtimes

import "testing"

func TestParseDevice(t *testing.T) {
	instance := ByIndex(3)
	instance.Instance = 1
	for name, want := range map[string]Device{
		"all": AllDevices(), "0": ByIndex(0), "3:1": instance, "nvidia.com/gpu=3:1": instance, "nvidia.com/gpu=all": AllDevices(),
		"nvidia.com/mig-1g.10gb=MIG-5": ByUUID("MIG-5"), "GPU-1f": ByUUID("GPU-1f"), "/dev/nvidia12": ByMinor(12),
	} {
		if got, ok := ParseDevice(name); !ok || got != want {
			t.Errorf("ParseDevice(%q) = %+v, %t; want %+v", name, got, ok, want)
		}
	}
	for _, name := range []string{
		"", "none", "void", "GPU-", "-1", "+1", "01", "1:", ":1", "1:x", "1:1:1", "99999999", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia",
		"/dev/dri/card0", "amd.com/gpu=0", "nvidia.com/nic=0", "nvidia.com/gpu=", "all ", "0,1",
	} {
		if got, ok := ParseDevice(name); ok {
			t.Errorf("ParseDevice(%q) = %+v", name, got)
		}
	}
}
