package child

import (
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
)

// now reads both clocks, as the child does.
func now() gpu.Instant {
	var monotonic, wall unix.Timespec
	// Neither call can fail for these clocks.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic)
	_ = unix.ClockGettime(unix.CLOCK_REALTIME, &wall)
	return gpu.Instant{MonotonicUS: monotonic.Nano() / int64(time.Microsecond), WallUS: wall.Nano() / int64(time.Microsecond)}
}
