package nvml

import (
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
)

// Now reads both clocks of the node: CLOCK_MONOTONIC, which is the same in
// every process of one boot, and the wall clock.
func Now() gpu.Instant {
	var monotonic, wall unix.Timespec
	// Neither call can fail for these clocks.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic)
	_ = unix.ClockGettime(unix.CLOCK_REALTIME, &wall)
	return gpu.Instant{
		MonotonicUS: monotonic.Nano() / int64(time.Microsecond),
		WallUS:      wall.Nano() / int64(time.Microsecond),
	}
}
