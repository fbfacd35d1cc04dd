package exporter

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/history"
	"gpuledger/exporter/holders"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/metrics"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/passthrough"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/resources"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/slurm"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/suspects"
	"gpuledger/exporter/web"
)

// flushWithin is how long the last rows may take on the way out. With the
// listeners' own deadline it stays under the 5 s that SIGTERM is given.
const flushWithin = 2 * time.Second

// Run is the exporter until ctx ends; it then makes every row final and
// returns nil. Errors are about what can't be started: a second exporter on
// the node, a port in use, a procfs of another PID namespace.
func Run(ctx context.Context, options Options) error {
	if options.Now == nil {
		options.Now = Now
	}
	if options.ChildRestarts == nil {
		options.ChildRestarts = func() int64 { return 0 }
	}
	options.store = &snapshot.Store{}
	proc, err := procfs.Open(options.ProcFS)
	if err != nil {
		return err
	}
	rows, err := journal.Open(ctx, journal.Options{
		Dir: options.StateDir, LockPath: options.LockPath, MaxBytes: options.JournalMaxBytes, Node: options.NodeName, BootID: proc.BootID(),
		Logger: options.Logger,
	})
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		return fmt.Errorf("%w; make it writable, run as root, or choose another place with --state.dir and --state.lock", err)
	}
	if err != nil {
		return err
	}
	options.Source = passthrough.New(passthrough.Options{Source: options.Source, FS: proc, SysFS: options.SysFS, Logger: options.Logger})
	options.suspects = suspects.New(suspects.Options{FS: proc, ThresholdBytes: options.Config.Suspects.thresholdBytes(), Logger: options.Logger})
	table := holders.New(options.holders(proc))
	defer table.Close()
	scrape := metrics.NewHandler(options.store, metrics.Options{
		MaxWorkloads: options.MaxWorkloads, Runtime: metrics.NewRuntimeRegistry(), Logger: options.Logger,
	})
	server, err := options.server(scrape, rows.Handler(), history.Handler(rows.Back, options.NodeName, nil, options.Logger))
	if err != nil {
		return err
	}
	buffer := journal.NewBuffer(rows, journal.BufferOptions{})
	output := newWriter(buffer, options.Logger)
	measured := resources.New(resources.Options{FS: proc, Logger: options.Logger})
	sampler := newSampler(options, table, measured, output, rows.LastInstantUS())

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return server.Run(ctx) })
	group.Go(func() error { table.Run(ctx); return nil })
	group.Go(func() error { options.suspects.Run(ctx); return nil })
	group.Go(func() error { output.run(ctx); return nil })
	group.Go(func() error { measured.Run(ctx); return nil })
	group.Go(func() error {
		err := options.Source.Run(ctx, func(pass gpu.Pass) { sampler.pass(ctx, pass) })
		if err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("read GPUs: %w", err)
		}
		return nil
	})
	err = group.Wait()
	// Every goroutine has ended: the rows are ours alone.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushWithin)
	defer cancel()
	sampler.finish()
	return errors.Join(err, buffer.Close(last, output.take()))
}

func (o Options) holders(proc *procfs.FS) holders.Options {
	engines, granters := o.engines(proc)
	pods, kubelets := o.kubernetes()
	options := holders.Options{
		FS: proc, Owner: o.Config.Owner, Accounts: owner.NewHostAccounts(o.Logger),
		Engines: append(engines, pods...), Granters: append(granters, kubelets...), Logger: o.Logger,
	}
	if jobs := o.Config.Runtimes.Slurm; jobs.Jobs {
		options.Slurm = slurm.New(slurm.Options{
			Proc: proc, Ask: jobs.Ask, Programs: jobs.Programs, GresConf: jobs.GresConf, Logger: o.Logger,
		})
		options.Granters = append(options.Granters, options.Slurm)
	}
	if o.Config.Runtimes.Personal {
		options.Personal = runtimes.NewPersonal(proc, o.Logger)
	}
	return options
}

func (o Options) server(scrape, usage, before http.Handler) (*web.Server, error) {
	settings := o.Web
	settings.Access = o.Config.Access
	settings.Store, settings.Metrics, settings.Usage, settings.History = o.store, scrape, usage, before
	settings.Node, settings.Version, settings.Logger = o.NodeName, o.Version, o.Logger
	return web.New(settings)
}

// HoldersOptions are those of a table that knows what the exporter would know,
// for whoever looks at single processes.
func HoldersOptions(config Config, proc *procfs.FS, logger *slog.Logger) holders.Options {
	return Options{Config: config, Logger: logger}.holders(proc)
}
