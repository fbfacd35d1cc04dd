package main

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/spf13/cobra"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/gpu/child"
	"gpuledger/exporter/gpu/nvml"
	"gpuledger/exporter/who"
)

// Without an exporter gwho reads NVML itself: in a child process, because a
// driver can end or hang the process that calls it.

const (
	readCommand = "read-nvml" // hidden
	// readDeadline is how long a card may take.
	readDeadline = time.Second
	// readPatience is how long NVML may take to start: without persistence
	// mode cards are woken first.
	readPatience = 15 * time.Second
)

// newRead is the command that the child runs.
func newRead() *cobra.Command {
	var library string
	read := &cobra.Command{
		Use:    readCommand,
		Short:  "Read NVML for the gwho that started this",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			reader, err := nvml.Open(nvml.Options{
				LibraryPath: library, FirstSamples: true, Deadline: readDeadline, Logger: slog.New(slog.DiscardHandler),
			})
			if err == nil {
				err = child.Main(command.Context(), reader)
			}
			if err != nil {
				return exit{exitNoGPU, err}
			}
			return nil
		},
	}
	read.Flags().StringVar(&library, "nvml.library-path", "", "libnvidia-ml.so.1 to use")
	return read
}

// readPass hands one good pass to deliver, or one that says why there is none.
// What processes did is the mean of the some seconds that the driver keeps. It returns an error only if no pass can be had or ctx ends.
func readPass(ctx context.Context, library string, deliver func(gpu.Pass)) error {
	reader, err := child.NewSupervisor(child.Options{
		Command:  []string{"/proc/self/exe", readCommand, "--nvml.library-path=" + library},
		Interval: readDeadline, // longer than that the child is never silent
		Logger:   slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return err
	}
	reading, cancel := context.WithTimeout(ctx, readPatience)
	defer cancel()
	good := false
	var last *gpu.Pass
	err = reader.Run(reading, func(pass gpu.Pass) {
		if reading.Err() != nil {
			return
		}
		if last = &pass; pass.Error == "" {
			deliver(pass)
			good = true
			cancel()
			return
		}
		// A pass that used up its time is about NVML still starting. Any other
		// is the answer: there is no NVML here.
		if took := time.Duration(nvml.Now().MonotonicUS-pass.At.MonotonicUS) * time.Microsecond; took < readDeadline {
			cancel()
		}
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case last == nil:
		return err
	case !good:
		deliver(*last)
	}
	return nil
}

// direct makes the answer without an exporter.
func direct(ctx context.Context, o options) (who.Answer, error) {
	node, err := os.Hostname()
	if err != nil {
		node = "" // shown as unknown
	}
	join := newJoin(ctx, o, node)
	defer join.close()
	if err := readPass(ctx, o.libraryPath, func(pass gpu.Pass) { join.pass(ctx, pass) }); err != nil {
		if ctx.Err() != nil {
			return who.Answer{}, err
		}
		return who.Answer{}, exit{exitNoGPU, err}
	}
	return join.answer(ctx), nil
}
