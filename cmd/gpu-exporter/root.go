package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/prometheus/common/promslog"
	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"

	"gpuledger/exporter"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/metrics"
	"gpuledger/exporter/web"
)

// usageError is a command line that can't be taken.
type usageError struct{ error }

// report prints an error and returns the exit code for it.
func report(stderr io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	if said := (problemsFound{}); errors.As(err, &said) {
		return exitFailed
	}
	fmt.Fprintln(stderr, "gpu-exporter:", err)
	if usage := (usageError{}); errors.As(err, &usage) {
		fmt.Fprintln(stderr, "Try: gpu-exporter --help")
		return exitUsage
	}
	return exitFailed
}

// settings are the flags of the daemon.
type settings struct {
	options     exporter.Options
	configFile  string
	libraryPath string
	logLevel    promslog.Level
	logFormat   promslog.Format
}

func newRoot() *cobra.Command {
	var s settings
	root := &cobra.Command{
		Use:   "gpu-exporter",
		Short: "Meters who holds the GPUs of this node, serves /metrics and keeps a journal",
		Args:  noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			return s.serve(command.Context(), command.ErrOrStderr())
		},
		Version: version.Print("gpu-exporter"), SilenceUsage: true, SilenceErrors: true,
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	flags := root.Flags()
	web.AddFlags(flags, &s.options.Web)
	flags.DurationVar(&s.options.SampleInterval, "sample.interval", exporter.DefaultSampleInterval, "time between two readings of a card")
	flags.DurationVar(&s.options.MaxGap, "sample.max-gap", exporter.DefaultMaxGap, "longest time between two readings that still counts; longer ones are unobserved")
	flags.StringVar(&s.options.StateDir, "state.dir", exporter.DefaultStateDir, "directory of the journal")
	flags.StringVar(&s.options.LockPath, "state.lock", "", "lock file that keeps a second exporter off the node (default: under /run)")
	flags.Int64Var(&s.options.JournalMaxBytes, "journal.max-size", journal.DefaultMaxBytes, "bound of the journal on disk, in bytes; the oldest rows go first")
	flags.StringVar(&s.options.NodeName, "node.name", "", "name of this node in rows and metrics (default: the host name)")
	flags.IntVar(&s.options.MaxWorkloads, "metrics.max-workloads", metrics.DefaultMaxWorkloads, "workloads shown on /metrics before further ones are folded per user")
	flags.StringVar(&s.configFile, "config.file", "", "configuration file (YAML); may be absent")
	flags.StringVar(&s.options.ProcFS, "path.procfs", exporter.DefaultProcFS, "procfs of the initial PID namespace")
	flags.StringVar(&s.options.SysFS, "path.sysfs", exporter.DefaultSysFS, "sysfs of the node, for GPUs given to virtual machines")
	root.PersistentFlags().StringVar(&s.libraryPath, "nvml.library-path", "", "libnvidia-ml.so.1 to load (default: the loader's choice)")
	s.logLevel, s.logFormat = *promslog.NewLevel(), *promslog.NewFormat()
	root.PersistentFlags().Var(flagValue{&s.logLevel}, "log.level", "debug, info, warn or error")
	root.PersistentFlags().Var(flagValue{&s.logFormat}, "log.format", "logfmt or json")
	root.AddCommand(newRead(&s), newDebug(), newExport(), newDoctor(&s))
	return root
}

// flagValue lets promslog's values be pflag values.
type flagValue struct {
	value interface {
		Set(string) error
		String() string
	}
}

func (f flagValue) Set(text string) error { return f.value.Set(text) }
func (f flagValue) String() string        { return f.value.String() }
func (f flagValue) Type() string          { return "string" }

func noArgs(command *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usageError{fmt.Errorf("unknown command or argument %q", args[0])}
	}
	return nil
}

// nodeName is the name given, or the host's.
func nodeName(given string) (string, error) {
	if given != "" {
		return given, nil
	}
	name, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find this node's name: %w; give one with --node.name", err)
	}
	return name, nil
}
