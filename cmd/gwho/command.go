package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"gpuledger/exporter/who"
)

// Exit codes.
const (
	exitOK      = 0
	exitNoGPU   = 1 // no GPU or driver
	exitUsage   = 2
	exitMissing = 3 // part of the answer, or all of it, is missing
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
	watch         time.Duration
	history       string // how far back
	nodes, free   bool
	server        string
	configFile    string
}

// defaultHistory is how far back --history goes by itself.
const defaultHistory = "24h"

const long = `Shows who holds which GPU of this node: a line for each card, and under it
every user with a process on it, or to whom it was given.

The answer comes from gpu-exporter on this node if there is one, otherwise from
NVML and /proc directly; then less is known, above all without root.

The program's name is shown of everybody's processes, the whole command line
(-v, --json) only of your own; root sees all.

Exit codes: 0 all is well; 1 no GPU or no driver; 2 wrong usage; 3 part of the
answer is missing (lines that begin with "!" say which).`

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()

	var o options
	code := exitOK
	command := &cobra.Command{
		Use:   "gwho [flags] [USER...]",
		Short: "Show who holds which GPU",
		Long:  long,
		Example: `  gwho                  who holds what
  gwho alice            what alice holds
  gwho --gpu 3 -v       all about GPU 3
  gwho --json           for scripts (docs/gwho.md)`,
		Version:           version.Print("gwho"),
		SilenceErrors:     true,
		SilenceUsage:      true,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, users []string) error {
			o.socketGiven = command.Flags().Changed("socket")
			if o.watch != 0 && o.watch < time.Second {
				return exit{exitUsage, fmt.Errorf("--watch %s: at least 1s", o.watch)}
			}
			if o.free && !o.nodes {
				return exit{exitUsage, errors.New("--free goes with --nodes")}
			}
			var err error
			if command.Flags().Changed("history") {
				code, err = showHistory(command.Context(), o, users, stdout)
				return err
			}
			if o.nodes {
				code, err = showNodes(command.Context(), o, users, stdout)
				return err
			}
			code, err = show(command.Context(), o, users, stdout, stderr)
			return err
		},
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.BoolVar(&o.json, "json", false, "print JSON")
	flags.BoolVarP(&o.verbose, "verbose", "v", false, "also show UUIDs, containers, how the user was found, and your own command lines")
	flags.StringSliceVar(&o.cards, "gpu", nil, "only these cards: index, or UUID of a card or MIG instance")
	flags.DurationVar(&o.watch, "watch", 0, "show again and again, every so often, such as 2s")
	flags.StringVar(&o.history, "history", "", "who held the cards before, so long back: 24h, 90m, 7d")
	flags.Lookup("history").NoOptDefVal = defaultHistory
	flags.BoolVar(&o.nodes, "nodes", false, "all nodes, asked of gpu-accounting; USER... may also be nodes, cards and workloads")
	flags.BoolVar(&o.free, "free", false, "with --nodes: only what is free, with UUIDs")
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
	command.MarkFlagsMutuallyExclusive("history", "watch")
	command.SetVersionTemplate("{{.Version}}\n")
	command.SetArgs(args)
	command.SetOut(stdout)
	command.SetErr(stderr)
	command.AddCommand(newRead())

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

// show answers once, or again and again until ctx ends.
func show(ctx context.Context, o options, users []string, stdout, stderr io.Writer) (int, error) {
	for {
		a, err := ask(ctx, o)
		if err != nil {
			return exitOK, err
		}
		filter := who.Filter{Cards: o.cards, Users: users}
		filtered, unknown := filter.Apply(a)
		if len(unknown) > 0 && a.Error == "" {
			return exitOK, exit{exitUsage, fmt.Errorf("--gpu %s: no such card here; there is %s", strings.Join(unknown, ","), cardList(a))}
		}
		code := judge(a, filtered)
		if code == exitNoGPU && len(a.Cards) == 0 && !o.json {
			fmt.Fprintln(stderr, "gwho: "+clean(noGPU(a)))
		} else if err := print(o, users, filtered, stdout); err != nil {
			return exitOK, exit{exitMissing, fmt.Errorf("print the answer: %w", err)}
		}
		if o.watch == 0 {
			return code, nil
		}
		select {
		case <-ctx.Done():
			return code, nil
		case <-time.After(o.watch):
		}
	}
}

// judge is the exit code for an answer.
func judge(whole, filtered who.Answer) int {
	switch {
	case whole.Error != "", whole.Expected == 0 && len(whole.Cards) == 0:
		return exitNoGPU
	case !filtered.Complete():
		return exitMissing
	}
	return exitOK
}

func noGPU(a who.Answer) string {
	if a.Error != "" {
		return a.Error
	}
	return "the driver is loaded, but NVML counts no GPU; see lspci and dmesg"
}

func cardList(a who.Answer) string {
	if len(a.Cards) == 0 {
		return "none"
	}
	names := make([]string, len(a.Cards))
	for i, c := range a.Cards {
		names[i] = fmt.Sprint(c.Index)
	}
	return strings.Join(names, ", ")
}

func print(o options, users []string, a who.Answer, stdout io.Writer) error {
	if o.json {
		encoder := json.NewEncoder(stdout)
		if o.watch == 0 { // with --watch, an answer is a line
			encoder.SetIndent("", "  ")
		}
		return encoder.Encode(a)
	}
	width, terminal := terminalWidth(stdout)
	colour := terminal && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	text := table(a, tableOptions{Width: width, Colour: colour, Verbose: o.verbose, Zone: time.Local})
	if len(users) > 0 && len(a.Cards) == 0 && a.Error == "" {
		text += strings.Join(cleanAll(users), ", ") + ": on no GPU here\n"
	}
	if o.watch > 0 && terminal {
		text = "\x1b[H\x1b[2J" + text
	}
	_, err := io.WriteString(stdout, text)
	return err
}

func cleanAll(names []string) []string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = clean(name)
	}
	return out
}

// terminalWidth is how wide the terminal behind w is; false if there is none.
func terminalWidth(w io.Writer) (int, bool) {
	file, ok := w.(*os.File)
	if !ok {
		return 0, false
	}
	if _, err := unix.IoctlGetTermios(int(file.Fd()), unix.TCGETS); err != nil {
		return 0, false
	}
	size, err := unix.IoctlGetWinsize(int(file.Fd()), unix.TIOCGWINSZ)
	if err != nil {
		return 0, true // a terminal that does not say: nothing is cut
	}
	return int(size.Col), true
}
