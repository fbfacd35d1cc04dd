package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"

	"gpuledger/exporter/history"
)

// Exit codes.
const (
	exitOK      = 0
	exitNoGPU   = 1 // no GPU or driver
	exitUsage   = 2
	exitMissing = 3 // part of the answer, or all of it, is missing
	exitNotFree = 4 // --free: fewer are free than are wanted
)

// exit is an error that says with which code to end.
type exit struct {
	code int
	err  error
}

func (e exit) Error() string { return e.err.Error() }
func (e exit) Unwrap() error { return e.err }

// defaultSocket is where gpu-exporter listens unless told otherwise.
const defaultSocket = "/run/gpu-exporter/exporter.sock"

// options are the flags.
type options struct {
	json, verbose bool
	socket        string
	socketGiven   bool
	url           string
	tokenFile     string
	libraryPath   string
	procfs        string
	cards         []string
	watch         length
	history       string // how far back
	nodes, free   bool
	count         int
	idle          length
	sort          string
	server        string
	configFile    string
}

// defaultHistory is how far back --history goes by itself.
const defaultHistory = "24h"

const long = `Shows who holds which GPU of this node: a line for each card, and under it
every user with a process on it, or to whom it was given.

Arguments choose what is shown: a user (alice, or a uid), a card (its index, or
8 and more characters of a UUID), a workload (train, docker:train, a container,
a pod, a job, a unit) or a PID. gpu:3, user:alice and pid:1001 leave no doubt.

The answer comes from gpu-exporter on this node if there is one, otherwise from
NVML and /proc directly; then less is known, above all without root.

The program's name is shown of everybody's processes, the whole command line
(-v, --json) only of your own; root sees all.

Exit codes: 0 all is well; 1 no GPU or no driver; 2 wrong usage; 3 part of the
answer is missing (lines that begin with "!" say which); 4 with --free: fewer
are free than are wanted.`

// defaultWatch is how often --watch shows anew by itself, and defaultIdle from
// when on --idle shows who does nothing.
const (
	defaultWatch = 2 * time.Second
	defaultIdle  = time.Hour
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()

	code := exitOK
	command := newCommand(&code, stdout, stderr)
	command.SetArgs(args)
	command.SetOut(stdout)
	command.SetErr(stderr)
	err := command.ExecuteContext(ctx)
	if err == nil {
		return code
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return code
	}
	fmt.Fprintln(stderr, "gwho: "+clean(err.Error()))
	var e exit
	if errors.As(err, &e) {
		return e.code
	}
	fmt.Fprintln(stderr, "Try: gwho --help")
	return exitUsage // cobra's own errors are about flags and arguments
}

// newCommand is gwho with all its flags. It leaves the exit code in code.
func newCommand(code *int, stdout, stderr io.Writer) *cobra.Command {
	var o options
	command := &cobra.Command{
		Use:   "gwho [flags] [USER|GPU|WORKLOAD...]",
		Short: "Show who holds which GPU",
		Long:  long,
		Example: `  gwho                  who holds what
  gwho alice            what alice holds
  gwho 3 -v             all about GPU 3
  gwho -w               a live screen; q quits, ? tells the keys
  gwho --free -n 2      two free GPUs, and the line that takes them
  gwho --idle 12h       who has held a GPU for so long and done nothing
  gwho --history 24h    who held them before
  gwho --json           for scripts (docs/gwho.md)`,
		Version:       version.Print("gwho"),
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		ValidArgsFunction: func(command *cobra.Command, given []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			return complete(command.Context(), o, given), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(command *cobra.Command, selectors []string) error {
			selectors, err := o.settle(command, selectors)
			if err != nil {
				return err
			}
			if command.Flags().Changed("history") {
				*code, err = showHistory(command.Context(), o, selectors, stdout)
				return err
			}
			if o.nodes {
				*code, err = showNodes(command.Context(), o, selectors, stdout)
				return err
			}
			*code, err = show(command.Context(), o, selectors, stdout, stderr)
			return err
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.BoolVar(&o.json, "json", false, "print JSON")
	flags.BoolVarP(&o.verbose, "verbose", "v", false, "also show UUIDs, containers, how the user was found, and your own command lines")
	flags.StringSliceVar(&o.cards, "gpu", nil, "only these cards: index, or UUID of a card or MIG instance")
	flags.VarP(&o.watch, "watch", "w", "show again and again, every so often (2s); on a terminal a live screen")
	flags.Lookup("watch").NoOptDefVal = defaultWatch.String()
	flags.Var(&o.idle, "idle", "only who holds or was given a card and has done nothing on it for so long (1h)")
	flags.Lookup("idle").NoOptDefVal = defaultIdle.String()
	flags.StringVar(&o.sort, "sort", "", "one list by "+strings.Join(sortKeys[1:], ", "))
	flags.StringVar(&o.history, "history", "", "who held the cards before, so long back: 24h, 90m, 7d")
	flags.Lookup("history").NoOptDefVal = defaultHistory
	flags.BoolVar(&o.nodes, "nodes", false, "all nodes, asked of gpu-accounting; USER... may also be nodes, cards and workloads")
	flags.BoolVar(&o.free, "free", false, "only what is free, with the UUIDs for CUDA_VISIBLE_DEVICES")
	flags.IntVarP(&o.count, "count", "n", 0, "with --free: so many are wanted")
	flags.StringVar(&o.server, "server", "", "gpu-accounting for --nodes: http://host:port, https://host:port or unix:///path (default "+defaultServer+", or $"+serverVariable+")")
	flags.StringVar(&o.configFile, "config.file", defaultConfigFile, "file that names the server")
	flags.StringVar(&o.socket, "socket", defaultSocket, "unix socket of gpu-exporter")
	flags.StringVar(&o.url, "url", "", "ask the gpu-exporter at this address instead, such as http://gpu01:10094")
	flags.StringVar(&o.tokenFile, "token-file", "", "file with the token for --url or --server")
	flags.StringVar(&o.libraryPath, "nvml.library-path", "", "libnvidia-ml.so.1 to use when there is no exporter")
	flags.StringVar(&o.procfs, "path.procfs", "/proc", "procfs of the node, when there is no exporter")
	command.MarkFlagsMutuallyExclusive("socket", "url")
	for _, other := range []string{"history", "watch", "socket", "url"} {
		command.MarkFlagsMutuallyExclusive("nodes", other)
	}
	for _, other := range []string{"watch", "free", "idle", "sort"} {
		command.MarkFlagsMutuallyExclusive("history", other)
	}
	for _, other := range []string{"idle", "sort", "count"} {
		command.MarkFlagsMutuallyExclusive("nodes", other)
	}
	command.MarkFlagsMutuallyExclusive("free", "idle", "sort")
	command.SetVersionTemplate("{{.Version}}\n")
	command.AddCommand(newRead())
	// Only a name that is no flag can be wrong here.
	_ = command.RegisterFlagCompletionFunc("gpu", func(command *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		return completeCards(command.Context(), o), cobra.ShellCompDirectiveNoFileComp
	})
	_ = command.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(sortKeys, cobra.ShellCompDirectiveNoFileComp))
	for _, length := range []string{"watch", "idle", "history"} {
		_ = command.RegisterFlagCompletionFunc(length, cobra.NoFileCompletions)
	}
	return command
}

// settle checks the flags. A length of time behind --watch or --idle is theirs,
// as one behind --history is.
func (o *options) settle(command *cobra.Command, selectors []string) ([]string, error) {
	o.socketGiven = command.Flags().Changed("socket")
	for _, flag := range []struct {
		name   string
		length *length
		usual  time.Duration
	}{{"watch", &o.watch, defaultWatch}, {"idle", &o.idle, defaultIdle}} {
		if !command.Flags().Changed(flag.name) {
			continue
		}
		if given, err := firstLength(selectors); err == nil && time.Duration(*flag.length) == flag.usual {
			*flag.length, selectors = length(given), selectors[1:]
		}
		if time.Duration(*flag.length) < time.Second {
			return nil, exit{exitUsage, fmt.Errorf("--%s %s: at least 1s", flag.name, flag.length)}
		}
	}
	if o.sort != "" && !slices.Contains(sortKeys, o.sort) {
		return nil, exit{exitUsage, fmt.Errorf("--sort %s: there is %s", clean(o.sort), strings.Join(sortKeys, ", "))}
	}
	if command.Flags().Changed("count") && (!o.free || o.count < 1) {
		return nil, exit{exitUsage, errors.New("--count goes with --free, and is 1 or more")}
	}
	return selectors, nil
}

// firstLength is the length of time that the first selector is.
func firstLength(selectors []string) (time.Duration, error) {
	if len(selectors) == 0 {
		return 0, errors.New("no argument")
	}
	return history.ParseLength(selectors[0])
}
