// Package exporter is the node: it joins source, holders, meter, journal and
// web into one process.
package exporter

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/binary"
	"log/slog"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/suspects"
	"gpuledger/exporter/web"
)

// Defaults of Options.
const (
	DefaultStateDir       = "/var/lib/gpu-exporter"
	DefaultProcFS         = "/proc"
	DefaultSysFS          = "/sys"
	DefaultSampleInterval = time.Second
	DefaultMaxGap         = 10 * time.Second
	// MinSampleInterval keeps a mistyped interval from costing a core.
	MinSampleInterval = 100 * time.Millisecond
)

// Options of Run.
type Options struct {
	NodeName string
	StateDir string
	LockPath string // empty for the journal's default outside StateDir
	// JournalMaxBytes bounds the journal on disk; 0 for the journal's default.
	JournalMaxBytes int64
	ProcFS          string
	// SysFS is where sysfs is mounted; empty for DefaultSysFS.
	SysFS          string
	SampleInterval time.Duration
	MaxGap         time.Duration
	// MaxWorkloads is how many workloads /metrics shows before it folds.
	MaxWorkloads int
	Config       Config
	Web          web.Options
	Version      string
	Logger       *slog.Logger

	// Source delivers the readings.
	Source gpu.Source
	// ChildRestarts counts restarts of the source's child; may be nil.
	ChildRestarts func() int64
	// Now may be nil for the node's clocks.
	Now func() gpu.Instant

	store    *snapshot.Store
	suspects *suspects.Watcher
}

// Now reads both clocks of the node.
func Now() gpu.Instant {
	var monotonic unix.Timespec
	// clock_gettime(CLOCK_MONOTONIC) can't fail with a valid pointer.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &monotonic)
	return gpu.Instant{MonotonicUS: monotonic.Nano() / 1000, WallUS: time.Now().UnixMicro()}
}

// crockford is the alphabet of ULIDs: no letter is taken for a digit.
var crockford = base32.NewEncoding("0123456789ABCDEFGHJKMNPQRSTVWXYZ").WithPadding(base32.NoPadding)

// newRunID is random and sorts by the time the run began.
func newRunID(now time.Time) string {
	var id [16]byte
	binary.BigEndian.PutUint64(id[:8], uint64(now.UnixMilli())<<16)
	// crypto/rand.Read never returns an error: it ends the program instead.
	_, _ = rand.Read(id[6:])
	return crockford.EncodeToString(id[:])
}
