package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"

	"gpuledger/lab/server"
)

func command(stdout, stderr io.Writer) *cobra.Command {
	root := &cobra.Command{
		Use:           "gpu-lab",
		Short:         "A simulated GPU server for demonstrations and tests",
		Version:       cmp.Or(version.Version, "unreleased"),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetVersionTemplate(version.Print("gpu-lab") + "\n")
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.AddCommand(upCommand(stdout, stderr), scenarioCommand(stdout), workerCommand())
	return root
}

func upCommand(stdout, stderr io.Writer) *cobra.Command {
	var (
		o                     server.Options
		users, library, level string
		duration              time.Duration
	)
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Start the processes, write the scenario, keep it current until interrupted",
		Long: `Starts real processes under the given users, in cgroups that look like login
sessions and services, and in Docker containers if --docker-host is given. Writes
a scenario with their PIDs for the stand-in NVML library and keeps it current as
processes come and go. On an interrupt, SIGTERM or after --duration it ends every
process it started; if it is killed, they end by themselves.

As root the processes run under the given users; otherwise under your own.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var lv slog.Level
			if err := lv.UnmarshalText([]byte(level)); err != nil {
				return fmt.Errorf("--log.level: %w", err)
			}
			var err error
			if o.Users, err = server.ParseUsers(users); err != nil {
				return fmt.Errorf("--users: %w", err)
			}
			if o.CreateUsers && os.Geteuid() != 0 {
				return fmt.Errorf("--create-users needs root")
			}
			o.Log = slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: lv}))
			o.Stderr = stderr
			o.Ready = func(scenario string) {
				fmt.Fprintf(stdout, "export GPULAB_SCENARIO='%s'\n", scenario)
				if library != "" {
					fmt.Fprintf(stdout, "export LD_LIBRARY_PATH='%s'\n", filepath.Dir(library))
				}
			}
			ctx := cmd.Context()
			if duration > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, duration)
				defer cancel()
			}
			return server.Run(ctx, o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.State, "state", filepath.Join(os.TempDir(), "gpu-lab"), "folder for the scenario and the workers' program; other users must be able to enter it")
	f.StringVar(&o.ScenarioFile, "scenario", "", "scenario file to write (default STATE/scenario)")
	f.StringVar(&users, "users", "alice:1001,bob:1002,carol:1003", "people of the server, as NAME:UID,…")
	f.BoolVar(&o.CreateUsers, "create-users", false, "make the users that the system doesn't have, so that their names resolve; deleted afterwards")
	f.IntVar(&o.GPUs, "gpus", 2, "number of GPUs")
	f.BoolVar(&o.MIG, "mig", false, "cut the last GPU into MIG instances")
	f.StringVar(&o.DockerHost, "docker-host", "", "Docker daemon for the workload in a container, e.g. unix:///var/run/docker.sock (default: no containers)")
	f.StringVar(&o.Driver, "driver", "", "driver version that the library answers (default: its own)")
	f.StringVar(&library, "library", "", "stand-in libnvidia-ml.so.1, to print the LD_LIBRARY_PATH for it")
	f.DurationVar(&duration, "duration", 0, "end after this time (default: when interrupted)")
	f.StringVar(&level, "log.level", "info", "debug, info, warn or error")
	return cmd
}

func scenarioCommand(stdout io.Writer) *cobra.Command {
	return &cobra.Command{
		Use:   "scenario",
		Short: "Print an example scenario for the stand-in library",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			_, err := io.WriteString(stdout, server.Example(time.Now()).String())
			return err
		},
	}
}

func workerCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:    "worker",
		Short:  "Be a process of the simulated server (started by up)",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return server.Work(cmd.Context(), name, os.Stdin)
		},
	}
	cmd.Flags().StringVar(&name, "name", "worker", "name of the process")
	return cmd
}
