package main

import (
	"bufio"

	"github.com/spf13/cobra"

	"gpuledger/exporter"
	"gpuledger/exporter/journal"
)

func newExport() *cobra.Command {
	var stateDir string
	export := &cobra.Command{
		Use:   "export",
		Short: "Write the journal's final rows to standard output, for gpu-accounting import",
		Long: `Write the journal's final rows to standard output as NDJSON, one row a line, in
the form of GET /api/v1/usage. Works beside a running exporter and without one.`,
		Args: noArgs,
		RunE: func(command *cobra.Command, _ []string) error {
			output := bufio.NewWriter(command.OutOrStdout())
			if _, err := journal.Export(command.Context(), stateDir, output); err != nil {
				return err
			}
			return output.Flush()
		},
	}
	export.Flags().StringVar(&stateDir, "state.dir", exporter.DefaultStateDir, "directory of the journal")
	return export
}
