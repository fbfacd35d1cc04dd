// Command gendocs prints docs/metrics.md, which is made from the table of
// metric families.
package main

import (
	"fmt"
	"os"

	"gpuledger/exporter/metrics"
)

func main() {
	if err := metrics.WriteDocumentation(os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "gendocs:", err)
		os.Exit(1)
	}
}
