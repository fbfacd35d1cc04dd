package accounting

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/common/version"
	toolkit "github.com/prometheus/exporter-toolkit/web"
	"golang.org/x/sync/errgroup"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/accounting/nodes"
	"gpuledger/accounting/web"
)

// ServeOptions are what the command line says to the daemon.
type ServeOptions struct {
	Listen        []string // instead of the configuration's, if not empty
	WebConfigFile string   // TLS and basic auth, in Prometheus's format
	Log           *slog.Logger
	Now           func() time.Time
	// OnListen, if not nil, is called once the listeners are open.
	OnListen func([]net.Addr)
}

// Serve collects and serves until the context is done.
func Serve(ctx context.Context, config *Config, options ServeOptions) (err error) {
	log := options.Log
	if err := toolkit.Validate(options.WebConfigFile); err != nil {
		return fmt.Errorf("web configuration: %w", err)
	}
	store, err := openLedger(ctx, config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	access, err := web.NewAccess(web.AccessOptions{
		Admins: config.Admins, TokensFile: config.TokensFile, CloseLive: config.CloseLive, WebConfigFile: options.WebConfigFile, Log: log,
	})
	if err != nil {
		return err
	}
	metrics := web.NewMetrics(store)
	daemon := &daemon{config: config, store: store, now: options.Now}
	collector := collect.New(collect.Options{
		Interval: config.Interval, Targets: config.Targets, FileSD: config.FileSD, HTTP: config.HTTP,
		Ledger: store, Observer: metrics, Log: log, Now: options.Now,
	})
	board := nodes.NewBoard(nodes.Options{Collector: collector, Known: store.Targets, Log: log, Now: time.Now})
	handler, err := web.Handler(web.Options{
		Report: daemon.report, Nodes: board.Who, Status: daemon.status, Ready: daemon.ready, Access: access, Metrics: metrics, Log: log,
	})
	if err != nil {
		return err
	}
	addresses := config.Listen
	if len(options.Listen) > 0 {
		addresses = options.Listen
	}
	listeners, err := web.Listen(ctx, addresses)
	if err != nil {
		return err
	}
	if options.OnListen != nil {
		var bound []net.Addr
		for _, listener := range listeners {
			bound = append(bound, listener.Addr())
		}
		options.OnListen(bound)
	}
	log.Info("Starting gpu-accounting", "version", version.Info(), "ledger", store.Path(), "timezone", config.Book.Location.String())
	if len(config.Targets)+len(config.FileSD) == 0 {
		log.Warn("Nothing is collected: there are neither collect.targets nor collect.file_sd")
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		collector.Run(ctx)
		return nil
	})
	group.Go(func() error { return web.Serve(ctx, listeners, handler, options.WebConfigFile, log) })
	return group.Wait()
}

type daemon struct {
	config *Config
	store  *sqlite.Store
	now    func() time.Time
}

func (d *daemon) report(ctx context.Context, month, format string, bom bool) (web.Document, error) {
	contentType, ok := map[string]string{
		"csv": "text/csv; charset=utf-8; header=present", "json": "application/json", "table": "text/plain; charset=utf-8",
	}[format]
	if !ok {
		return web.Document{}, fmt.Errorf("%w: format %.100q: %w", web.ErrBadRequest, format, ErrFormat)
	}
	statement, _, err := makeStatement(ctx, d.store, d.config.Book, month, d.now())
	if err != nil {
		return web.Document{}, err
	}
	var body bytes.Buffer
	if err := writeStatement(&body, statement, ReportOptions{Format: format, BOM: bom}); err != nil {
		return web.Document{}, err
	}
	document := web.Document{ContentType: contentType, Body: body.Bytes()}
	if format == "csv" {
		document.Name = "gpu-usage-" + statement.Period.Name + ".csv"
	}
	return document, nil
}

func (d *daemon) ready(ctx context.Context) error {
	_, _, err := d.store.Quarantined(ctx, ledger.Span{}, 0)
	return err
}

// status is the answer of /api/v1/status. Times that never were are null.
type status struct {
	Version          string         `json:"version"`
	Now              time.Time      `json:"now"`
	Period           string         `json:"period"`
	LedgerBytes      int64          `json:"ledger_bytes"`
	QuarantinedRows  int64          `json:"quarantined_rows"`
	QuarantineSample []quarantined  `json:"quarantine_sample"`
	Targets          []targetStatus `json:"targets"`
}

type quarantined struct {
	Reason    string    `json:"reason"`
	Detail    string    `json:"detail"`
	Source    string    `json:"source"`
	FirstSeen time.Time `json:"first_seen"`
}

type targetStatus struct {
	URL             string     `json:"url"`
	Node            string     `json:"node"`
	LastSuccess     *time.Time `json:"last_success"`
	LastError       string     `json:"last_error"`
	LastErrorAt     *time.Time `json:"last_error_at"`
	CompleteThrough *time.Time `json:"complete_through"`
	LagSeconds      *int64     `json:"lag_seconds"` // now − complete_through
}

func (d *daemon) status(ctx context.Context) (any, error) {
	now := d.now().UTC()
	s := status{
		Version: version.Version, Now: now, Period: billing.PeriodAt(now, d.config.Book.Location).Name,
		QuarantineSample: []quarantined{}, Targets: []targetStatus{},
	}
	var err error
	if s.LedgerBytes, err = d.store.Size(); err != nil {
		return nil, err
	}
	sample, count, err := d.store.Quarantined(ctx, ledger.Span{}, 20)
	if err != nil {
		return nil, err
	}
	s.QuarantinedRows = count
	for _, q := range sample {
		s.QuarantineSample = append(s.QuarantineSample, quarantined{q.Reason, q.Detail, q.Source, q.FirstSeen})
	}
	targets, err := d.store.Targets(ctx)
	if err != nil {
		return nil, err
	}
	for _, t := range targets {
		shown := targetStatus{
			URL: t.URL, Node: t.Node, LastError: t.LastError,
			LastSuccess: known(t.LastSuccess), LastErrorAt: known(t.LastErrorAt), CompleteThrough: known(t.CompleteThrough),
		}
		if !t.CompleteThrough.IsZero() {
			lag := int64(now.Sub(t.CompleteThrough).Seconds())
			shown.LagSeconds = &lag
		}
		s.Targets = append(s.Targets, shown)
	}
	return s, nil
}

func known(at time.Time) *time.Time {
	if at.IsZero() {
		return nil
	}
	return &at
}
