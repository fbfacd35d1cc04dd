package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/prometheus/common/promslog"
	"github.com/prometheus/common/version"
	"github.com/spf13/cobra"

	"gpuledger/accounting"
	"gpuledger/accounting/billing"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // it could not be done, or verify found something wrong
	exitUsage  = 2 // the command line can't be taken
)

// usageError is a command line that can't be taken.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// run is the program: it returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(stderr, "gpu-accounting:", err)
	if usage := (usageError{}); errors.As(err, &usage) {
		fmt.Fprintln(stderr, "Try: gpu-accounting --help")
		return exitUsage
	}
	return exitFailed
}

// settings are the flags that all commands have.
type settings struct {
	configFile string
	logLevel   *promslog.Level
	logFormat  *promslog.Format
}

func (s *settings) config() (*accounting.Config, error) { return accounting.LoadConfig(s.configFile) }

func newRoot() *cobra.Command {
	s := &settings{logLevel: promslog.NewLevel(), logFormat: promslog.NewFormat()}
	root := &cobra.Command{
		Use:   "gpu-accounting",
		Short: "Collects who used which GPU, and says what it costs",
		Long: `gpu-accounting pulls usage rows from gpu-exporter on every GPU node, keeps them in
a ledger, and reports who used what and what it costs.

Exit codes: 0 done, 1 failed (or verify found something wrong), 2 wrong command line.`,
		Version:       version.Print("gpu-accounting"),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usageError{fmt.Errorf("unknown command %q", args[0])}
			}
			return usageError{errors.New("a command is missing")}
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&s.configFile, "config.file", accounting.DefaultConfigFile, "configuration file")
	flags.Var(flagValue{s.logLevel}, "log.level", "debug, info, warn or error")
	flags.Var(flagValue{s.logFormat}, "log.format", "logfmt or json")
	root.AddCommand(s.serve(), s.importFiles(), s.report(), s.verify(),
		s.retire("node", "NODE", "all cards of a node", accounting.RetireNode),
		s.retire("device", "UUID", "a card, by its UUID", accounting.RetireDevice))
	return root
}

func (s *settings) serve() *cobra.Command {
	var options accounting.ServeOptions
	command := &cobra.Command{
		Use:   "serve",
		Short: "Collect from exporters, and serve reports, status and metrics",
		Args:  arguments(0, 0),
		RunE: func(command *cobra.Command, _ []string) error {
			config, err := s.config()
			if err != nil {
				return err
			}
			options.Log = promslog.New(&promslog.Config{Level: s.logLevel, Format: s.logFormat, Writer: command.ErrOrStderr()})
			options.Now = time.Now
			options.OnListen = func(addresses []net.Addr) {
				for _, address := range addresses {
					options.Log.Info("Listening", "address", address.String())
				}
			}
			return accounting.Serve(command.Context(), config, options)
		},
	}
	command.Flags().StringArrayVar(&options.Listen, "web.listen-address", nil,
		"HOST:PORT or unix:///PATH to listen on, instead of the configuration's; may be given more than once")
	command.Flags().StringVar(&options.WebConfigFile, "web.config.file", "", "file with TLS and basic auth, in Prometheus's format")
	return command
}

func (s *settings) importFiles() *cobra.Command {
	return &cobra.Command{
		Use:   "import FILE...",
		Short: "Read usage rows (NDJSON) from files into the ledger; - is standard input",
		Args:  arguments(1, -1),
		RunE: func(command *cobra.Command, files []string) error {
			config, err := s.config()
			if err != nil {
				return err
			}
			return accounting.Import(command.Context(), config, files, time.Now, command.InOrStdin(), command.OutOrStdout())
		},
	}
}

func (s *settings) report() *cobra.Command {
	var options accounting.ReportOptions
	command := &cobra.Command{
		Use:   "report",
		Short: "Write a month's statement",
		Args:  arguments(0, 0),
		RunE: func(command *cobra.Command, _ []string) error {
			switch options.Format {
			case "csv", "json", "table":
			default:
				return usageError{fmt.Errorf("--format %q: %w", options.Format, accounting.ErrFormat)}
			}
			config, err := s.config()
			if err != nil {
				return err
			}
			return monthError(accounting.Report(command.Context(), config, options, time.Now(), command.OutOrStdout(), command.ErrOrStderr()))
		},
	}
	command.Flags().StringVar(&options.Month, "month", "", "month YYYY-MM (default: the present one)")
	command.Flags().StringVar(&options.Format, "format", "table", "csv, json or table")
	command.Flags().BoolVar(&options.BOM, "bom", false, "begin CSV with a byte order mark, for Excel")
	return command
}

func (s *settings) verify() *cobra.Command {
	var options accounting.VerifyOptions
	command := &cobra.Command{
		Use:   "verify",
		Short: "Prove that every bucket of every card adds up, and print the ledger's hash",
		Args:  arguments(0, 0),
		RunE: func(command *cobra.Command, _ []string) error {
			config, err := s.config()
			if err != nil {
				return err
			}
			return monthError(accounting.Verify(command.Context(), config, options, time.Now(), command.OutOrStdout()))
		},
	}
	command.Flags().StringVar(&options.Month, "month", "", "month YYYY-MM (default: everything)")
	return command
}

type retireFunc func(ctx context.Context, config *accounting.Config, name string, at, now time.Time) (time.Time, error)

func (s *settings) retire(noun, argument, what string, do retireFunc) *cobra.Command {
	parent := &cobra.Command{
		Use:   noun,
		Short: "Take " + what + " out of service",
		Args: func(*cobra.Command, []string) error {
			return usageError{fmt.Errorf("it is %s retire %s", noun, argument)}
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	var at string
	retire := &cobra.Command{
		Use:   "retire " + argument,
		Short: "From then on " + what + " is not missed: its silence is no longer unobserved time",
		Args:  arguments(1, 1),
		RunE: func(command *cobra.Command, args []string) error {
			now := time.Now()
			moment := now
			if at != "" {
				var err error
				if moment, err = time.Parse(time.RFC3339, at); err != nil {
					return usageError{fmt.Errorf("--at %q is not a time such as 2026-11-03T08:15:00Z", at)}
				}
			}
			config, err := s.config()
			if err != nil {
				return err
			}
			when, err := do(command.Context(), config, args[0], moment, now)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(command.OutOrStdout(), "%s %s is out of service from %s on, until a later row comes from it\n", noun, args[0], when.Format(time.RFC3339))
			return err
		},
	}
	retire.Flags().StringVar(&at, "at", "", "when, RFC 3339 (default: now); it is rounded up to the next quarter hour")
	parent.AddCommand(retire)
	return parent
}

// monthError makes a wrong --month a wrong command line.
func monthError(err error) error {
	if errors.Is(err, billing.ErrPeriod) {
		return usageError{fmt.Errorf("--month: %w", err)}
	}
	return err
}

// arguments takes from least to most arguments, any number if most is negative.
func arguments(least, most int) cobra.PositionalArgs {
	return func(command *cobra.Command, args []string) error {
		switch {
		case len(args) < least:
			return usageError{fmt.Errorf("an argument is missing: %s", command.UseLine())}
		case most >= 0 && len(args) > most:
			return usageError{fmt.Errorf("unexpected argument %q: %s", args[most], command.UseLine())}
		}
		return nil
	}
}

// flagValue lets promslog's values be flags.
type flagValue struct {
	value interface {
		Set(string) error
		String() string
	}
}

func (f flagValue) Set(text string) error { return f.value.Set(text) }
func (f flagValue) String() string        { return f.value.String() }
func (f flagValue) Type() string          { return "string" }
