package gpu

// ThrottleReason is one bit of NVML's clocks event reasons and the name it has
// in labels and in totals by reason.
type ThrottleReason struct {
	Mask uint64
	Name string
}

// ThrottleReasons are the reasons for which a card runs slower than it could,
// by rising bit (nvmlClocksEventReason… in nvml.h). Bit 0, "idle", is left out:
// a card without work isn't held back.
var ThrottleReasons = []ThrottleReason{
	{0x2, "applications_clocks_setting"},
	{0x4, "sw_power_cap"},
	{0x8, "hw_slowdown"},
	{0x10, "sync_boost"},
	{0x20, "sw_thermal_slowdown"},
	{0x40, "hw_thermal_slowdown"},
	{0x80, "hw_power_brake_slowdown"},
	{0x100, "display_clock_setting"},
}
