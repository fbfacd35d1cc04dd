package main

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"gpuledger/exporter"
	"gpuledger/exporter/doctor"
	"gpuledger/exporter/gpu/child"
	"gpuledger/exporter/web"
)

// doctorInterval is how often the doctor's reader of cards passes.
const doctorInterval = time.Second

// problemsFound ends the program with 1 and says nothing more: all has been
// said.
type problemsFound struct{ error }

func newDoctor(s *settings) *cobra.Command {
	var options doctor.Options
	var listeners web.Options
	var asJSON bool
	command := &cobra.Command{
		Use: "doctor", Args: noArgs,
		Short: "Check what this host lets gpu-exporter see, and say what to change",
		Long: `Check what this host lets gpu-exporter see, and say line by line what to change.
Give it the flags of the service. It changes nothing, takes no lock and meters
nothing; it may run beside an exporter. Without root it says what root would see
more. Exit code 0: no problem, 1: problems.`,
		RunE: func(command *cobra.Command, _ []string) error {
			supervisor, err := child.NewSupervisor(child.Options{
				Arguments: []string{"--sample.interval=" + doctorInterval.String(), "--nvml.library-path=" + s.libraryPath},
				Interval:  doctorInterval, Logger: slog.New(slog.DiscardHandler),
			})
			if err != nil {
				return err
			}
			options.Source = supervisor
			options.Socket, options.WebConfigFile = listeners.Socket, listeners.ConfigFile
			if !listeners.SystemdSocket {
				options.ListenAddresses = listeners.ListenAddresses
			}
			findings := doctor.Examine(command.Context(), options)
			write := doctor.WriteText
			if asJSON {
				write = doctor.WriteJSON
			}
			if err := write(command.OutOrStdout(), findings); err != nil {
				return err
			}
			if problems := doctor.Count(findings, doctor.Problem); problems > 0 {
				return problemsFound{fmt.Errorf("%d problems", problems)}
			}
			return nil
		},
	}
	flags := command.Flags()
	web.AddFlags(flags, &listeners)
	flags.StringVar(&options.ConfigFile, "config.file", "", "configuration file (YAML) to check and to go by")
	flags.StringVar(&options.StateDir, "state.dir", exporter.DefaultStateDir, "directory of the journal")
	flags.StringVar(&options.LockPath, "state.lock", "", "lock file that keeps a second exporter off the node (default: under /run)")
	flags.StringVar(&options.ProcFS, "path.procfs", exporter.DefaultProcFS, "procfs of the initial PID namespace")
	flags.BoolVar(&asJSON, "json", false, "write the findings as JSON")
	return command
}
