// gpu-lab is a simulated GPU server: real processes of several users, and a
// scenario for the stand-in NVML library that says what they do on which card.
package main

import (
	"context"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run is the whole program: its exit code is 0, or 1 with the error on stderr.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := command(stdout, stderr)
	root.SetArgs(args)
	if err := root.ExecuteContext(ctx); err != nil {
		_, _ = io.WriteString(stderr, "gpu-lab: "+err.Error()+"\n")
		return 1
	}
	return 0
}
