package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"
)

// What somebody waits at most who types gwho at the usual load, by way of the
// exporter and without one.
const (
	socketBudgetMS = 30
	directBudgetMS = 150
	looks          = 7
)

// look times gwho from its start to its end, and gpustat beside it where that is
// installed: it shows the same cards by the same library.
func (l load) look(ctx context.Context, programs, socket, scenario string, stdout io.Writer) error {
	library, err := filepath.Abs(filepath.Join(programs, "lab"))
	if err != nil {
		return err
	}
	environment := append(os.Environ(), "GPULAB_SCENARIO="+scenario, "LD_LIBRARY_PATH="+library)
	gwho := filepath.Join(programs, "gwho")
	for _, way := range []struct {
		figure   string
		budgetMS float64
		command  []string
	}{
		{"gwho through the socket", socketBudgetMS, []string{gwho, "--socket", socket}},
		{"gwho without an exporter", directBudgetMS, []string{gwho, "--socket", ""}},
		{"gpustat, for comparison", 0, []string{"gpustat", "-cupF"}},
	} {
		var took []time.Duration
		for range looks {
			command := exec.CommandContext(ctx, way.command[0], way.command[1:]...)
			command.Env = environment
			begun := time.Now()
			output, err := command.CombinedOutput()
			if errors.Is(err, exec.ErrNotFound) {
				fmt.Fprintf(stdout, "%-6s  %-34s is not installed (lab/setup-peers.sh)\n", l.name, way.command[0])
				break
			}
			if err != nil {
				return fmt.Errorf("%q: %w\n%s", way.command, err, output)
			}
			took = append(took, time.Since(begun))
		}
		if len(took) < looks {
			continue
		}
		slices.Sort(took)
		median, worst := took[looks/2].Seconds()*1000, took[looks-1].Seconds()*1000
		verdict := ""
		if way.budgetMS > 0 && l.name == loads[0].name {
			verdict = fmt.Sprintf("%6.0f ms  ok", way.budgetMS)
			if worst > way.budgetMS {
				verdict = fmt.Sprintf("%6.0f ms  over", way.budgetMS)
			}
		}
		fmt.Fprintf(stdout, "%-6s  %-34s %7.2f ms (worst of %d: %.2f) %s\n", l.name, way.figure, median, looks, worst, verdict)
	}
	return nil
}
