package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/prometheus/common/promslog"
	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"

	"gpuledger/exporter"
	"gpuledger/exporter/gpu/child"
	"gpuledger/exporter/gpu/nvml"
)

// serve is the daemon.
func (s *settings) serve(ctx context.Context, stderr io.Writer) error {
	logger := promslog.New(&promslog.Config{Level: &s.logLevel, Format: &s.logFormat, Writer: stderr})
	options := s.options
	options.Logger, options.Version = logger, version.Version
	if options.SampleInterval < exporter.MinSampleInterval {
		return usageError{fmt.Errorf("--sample.interval %v is below %v", options.SampleInterval, exporter.MinSampleInterval)}
	}
	if options.MaxGap < 2*options.SampleInterval {
		return usageError{fmt.Errorf("--sample.max-gap %v is below twice --sample.interval %v: one late reading would lose its time", options.MaxGap, options.SampleInterval)}
	}
	if options.JournalMaxBytes <= 0 {
		return usageError{fmt.Errorf("--journal.max-size %d is not above 0", options.JournalMaxBytes)}
	}
	if options.MaxWorkloads < 0 {
		return usageError{fmt.Errorf("--metrics.max-workloads %d is below 0", options.MaxWorkloads)}
	}
	var err error
	if options.NodeName, err = nodeName(options.NodeName); err != nil {
		return err
	}
	if options.Config, err = exporter.LoadConfig(s.configFile); err != nil {
		return err
	}
	supervisor, err := child.NewSupervisor(child.Options{
		Arguments: []string{
			"--sample.interval=" + options.SampleInterval.String(), "--nvml.library-path=" + s.libraryPath,
			"--log.level=" + s.logLevel.String(),
		},
		Interval: options.SampleInterval,
		Logger:   logger.With("component", "nvml"),
	})
	if err != nil {
		return err
	}
	options.Source, options.ChildRestarts = supervisor, supervisor.Restarts
	logger.Info("gpu-exporter starts", "version", version.Version, "revision", version.Revision, "node", options.NodeName)
	if err := exporter.Run(ctx, options); err != nil {
		return err
	}
	logger.Info("gpu-exporter ends")
	return nil
}

// newRead is the NVML child: it writes passes to standard output for the
// daemon that started it.
func newRead(s *settings) *cobra.Command {
	var interval time.Duration
	read := &cobra.Command{
		Use: "read", Hidden: true, Args: noArgs,
		Short: "Read NVML and write passes to standard output (started by the exporter)",
		RunE: func(command *cobra.Command, _ []string) error {
			reader, err := nvml.Open(nvml.Options{
				LibraryPath: s.libraryPath, Interval: interval,
				Logger: promslog.New(&promslog.Config{Level: &s.logLevel, Format: &s.logFormat, Writer: command.ErrOrStderr()}),
			})
			if err != nil {
				return err
			}
			return child.Main(command.Context(), reader)
		},
	}
	read.Flags().DurationVar(&interval, "sample.interval", exporter.DefaultSampleInterval, "time between two readings of a card")
	return read
}
