package child

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
)

// Serve writes the passes of source to w until ctx or the source ends, or w
// takes no more.
func Serve(ctx context.Context, w io.Writer, source gpu.Source) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	out := newEncoder(w)
	err := source.Run(ctx, func(pass gpu.Pass) {
		if err := out.encode(&pass); err != nil {
			cancel(err)
		}
	})
	if cause := context.Cause(ctx); cause != nil && errors.Is(err, context.Canceled) {
		return cause
	}
	return err
}

const (
	// The child's live heap is a pass or two, so collecting it often is cheap
	// and keeps the process small. The limit is soft: passes larger than it
	// cost time, not the process.
	childGCPercent   = 50
	childMemoryLimit = 32 << 20
	childProcs       = 2
	// mostGrowth is hard. go-nvml asks for a list again and again, with twice
	// the room each time, for as long as the driver calls the room too small; a
	// driver that never stops must cost a child, not the node's memory.
	mostGrowth = 512 << 20
)

// Main is the whole life of the child process: it writes the passes of source
// to standard output until its parent goes or tells it to go, and returns nil
// then. Any other end of the source is an error, for the process to exit
// non-zero and be replaced.
//
// Standard input is the parent's hold on the child: when it ends, so does the
// child. Whatever else in the process prints to standard output (some NVML
// stubs do) goes to standard error.
func Main(ctx context.Context, source gpu.Source) error {
	debug.SetGCPercent(childGCPercent)
	debug.SetMemoryLimit(childMemoryLimit)
	runtime.GOMAXPROCS(min(childProcs, runtime.GOMAXPROCS(0)))
	limitGrowth(mostGrowth)
	// Started through /proc/self/exe the process would be called "exe".
	_ = os.WriteFile("/proc/self/comm", []byte("gpu-exporter"), 0)

	out, err := takeStdout()
	if err != nil {
		return err
	}
	defer out.Close()
	// A parent that is gone must be an error to handle, not a signal to die of.
	signal.Ignore(syscall.SIGPIPE)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	err = Serve(ctx, out, source)
	if errors.Is(err, context.Canceled) || errors.Is(err, syscall.EPIPE) {
		return nil
	}
	return err
}

// takeStdout moves standard output out of the reach of others in the process.
func takeStdout() (*os.File, error) {
	fd, err := unix.FcntlInt(1, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, fmt.Errorf("take standard output for passes: %w", err)
	}
	if err := unix.Dup3(2, 1, 0); err != nil {
		return nil, fmt.Errorf("send what others print to standard error: %w", err)
	}
	return os.NewFile(uintptr(fd), "passes"), nil
}

// limitGrowth makes the kernel refuse this process more than so many bytes of
// memory beyond what it has mapped. Where that can't be had there is no limit.
func limitGrowth(bytes uint64) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return
	}
	_, after, found := strings.Cut(string(status), "VmData:")
	fields := strings.Fields(after)
	if !found || len(fields) == 0 {
		return
	}
	kib, err := strconv.ParseUint(fields[0], 10, 64)
	if err != nil {
		return
	}
	limit := kib<<10 + bytes
	_ = unix.Setrlimit(unix.RLIMIT_DATA, &unix.Rlimit{Cur: limit, Max: limit})
}
