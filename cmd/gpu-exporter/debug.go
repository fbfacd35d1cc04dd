package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"

	"github.com/spf13/cobra"

	"gpuledger/exporter"
	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/explain"
	"gpuledger/exporter/procfs"
)

// maxCgroupText bounds what is read of a cgroup file: the kernel's own never
// comes near it.
const maxCgroupText = 1 << 20

func newDebug() *cobra.Command {
	debug := &cobra.Command{Use: "debug", Short: "Show how the exporter reads what it finds", Args: cobra.NoArgs}
	debug.RunE = func(*cobra.Command, []string) error { return usageError{errors.New("debug what? (cgroup or pid)")} }
	var procFS string
	cgroupCommand := &cobra.Command{
		Use:   "cgroup FILE|-|PID",
		Short: "Print what /proc/PID/cgroup says of a process, as JSON",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("cgroup takes one FILE, - or PID")}
			}
			return nil
		},
		RunE: func(command *cobra.Command, args []string) error {
			text, err := cgroupText(args[0], procFS, command.InOrStdin())
			if err != nil {
				return err
			}
			encoder := json.NewEncoder(command.OutOrStdout())
			encoder.SetEscapeHTML(false)
			return encoder.Encode(cgroup.Parse(text).Identity())
		},
	}
	cgroupCommand.Flags().StringVar(&procFS, "path.procfs", exporter.DefaultProcFS, "procfs of the initial PID namespace")
	debug.AddCommand(cgroupCommand, newDebugPID())
	return debug
}

// newDebugPID says how the owner of a process is found.
func newDebugPID() *cobra.Command {
	var configFile, procFS string
	var asJSON bool
	command := &cobra.Command{
		Use:   "pid PID",
		Short: "Print how the owner of a process is found",
		Long: `Print the evidence on a process, what each step of finding its owner says, and
the answer. Give it the configuration file of the service. It needs no exporter
and no GPU; without root it says what it may not see.`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usageError{errors.New("pid takes one PID")}
			}
			return nil
		},
		RunE: func(command *cobra.Command, args []string) error {
			pid, err := strconv.ParseUint(args[0], 10, 32)
			if err != nil || pid == 0 {
				return usageError{fmt.Errorf("%q is no PID", args[0])}
			}
			config, err := exporter.LoadConfig(configFile)
			if err != nil {
				return err
			}
			report, err := explain.Process(command.Context(), config, procFS, uint32(pid))
			if err != nil {
				return err
			}
			if asJSON {
				return explain.WriteJSON(command.OutOrStdout(), report)
			}
			return explain.WriteText(command.OutOrStdout(), report)
		},
	}
	flags := command.Flags()
	flags.StringVar(&configFile, "config.file", "", "configuration file (YAML) of the exporter")
	flags.StringVar(&procFS, "path.procfs", exporter.DefaultProcFS, "procfs of the initial PID namespace")
	flags.BoolVar(&asJSON, "json", false, "write the report as JSON")
	return command
}

// cgroupText reads the text of a cgroup file: of a PID, of a file, or of
// standard input. A file whose name is a number is given as ./NUMBER.
func cgroupText(from, procFS string, stdin io.Reader) (string, error) {
	if from == "-" {
		return readBounded(stdin)
	}
	if pid, err := strconv.ParseUint(from, 10, 32); err == nil {
		proc, err := procfs.Open(procFS)
		if err != nil {
			return "", err
		}
		process, err := proc.Process(uint32(pid))
		if err != nil {
			return "", err
		}
		defer process.Close()
		return process.Cgroup()
	}
	file, err := os.Open(from)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return "", usageError{err}
		}
		return "", err
	}
	defer file.Close()
	return readBounded(file)
}

func readBounded(r io.Reader) (string, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxCgroupText+1))
	if err != nil {
		return "", err
	}
	if len(text) > maxCgroupText {
		return "", fmt.Errorf("more than %d bytes: this is no cgroup file", maxCgroupText)
	}
	return string(text), nil
}
