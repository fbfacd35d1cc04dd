package web

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/VictoriaMetrics/metrics"
	"github.com/prometheus/common/version"

	"gpuledger/accounting/ledger"
)

// families are all metrics of the daemon. The metrics library writes neither
// HELP nor TYPE as Prometheus wants them; this list does.
var families = map[string]struct{ kind, help string }{
	"gpu_accounting_build_info":                                {"gauge", "Version of gpu-accounting, with constant value 1."},
	"gpu_accounting_targets":                                   {"gauge", "Number of exporters that are pulled from."},
	"gpu_accounting_target_up":                                 {"gauge", "Whether the newest pull from the target succeeded."},
	"gpu_accounting_target_pulls_total":                        {"counter", "Pulls from the target, failed ones too."},
	"gpu_accounting_target_pull_failures_total":                {"counter", "Pulls from the target that failed."},
	"gpu_accounting_target_last_success_timestamp_seconds":     {"gauge", "Unix time of the newest successful pull from the target, from the ledger."},
	"gpu_accounting_target_complete_through_timestamp_seconds": {"gauge", "Unix time before which every row of the target's node is in the ledger."},
	"gpu_accounting_target_discovery_failures_total":           {"counter", "Readings of file_sd files that failed."},
	"gpu_accounting_pull_duration_seconds":                     {"histogram", "How long a pull from a target takes, all its pages together."},
	"gpu_accounting_rows_inserted_total":                       {"counter", "Usage rows that entered the ledger through pulls."},
	"gpu_accounting_rows_duplicate_total":                      {"counter", "Pulled usage rows that were in the ledger already."},
	"gpu_accounting_rows_quarantined_total":                    {"counter", "Pulled usage rows that were quarantined."},
	"gpu_accounting_quarantined_rows":                          {"gauge", "Usage rows in quarantine, which refuse the close of their period."},
	"gpu_accounting_ledger_size_bytes":                         {"gauge", "Size of the ledger's files."},
	"gpu_accounting_http_requests_total":                       {"counter", "HTTP requests that were answered, by status code."},
	"process_cpu_seconds_total":                                {"counter", "Total user and system CPU time spent in seconds."},
	"process_resident_memory_bytes":                            {"gauge", "Resident memory size in bytes."},
	"process_virtual_memory_bytes":                             {"gauge", "Virtual memory size in bytes."},
	"process_open_fds":                                         {"gauge", "Number of open file descriptors."},
	"process_max_fds":                                          {"gauge", "Maximum number of open file descriptors."},
	"process_start_time_seconds":                               {"gauge", "Start time of the process since the Unix epoch in seconds."},
	"go_goroutines":                                            {"gauge", "Number of goroutines that currently exist."},
	"go_memstats_alloc_bytes":                                  {"gauge", "Number of bytes allocated in the heap and still in use."},
}

// Source is what the metrics ask the ledger at each scrape.
type Source interface {
	Targets(ctx context.Context) ([]ledger.Target, error)
	Quarantined(ctx context.Context, span ledger.Span, limit int) ([]ledger.Quarantined, int64, error)
	Size() (int64, error)
}

// Metrics are the daemon's own metrics. They observe the collector.
type Metrics struct {
	set    *metrics.Set
	source Source

	mu       sync.Mutex
	watching map[string]bool
}

var pullBuckets = []float64{0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300}

// NewMetrics returns the metrics of a daemon that has just started.
func NewMetrics(source Source) *Metrics {
	m := &Metrics{set: metrics.NewSet(), source: source, watching: map[string]bool{}}
	m.set.NewGauge(series("gpu_accounting_build_info", "version", version.Version, "revision", version.GetRevision(), "goversion", version.GoVersion), func() float64 { return 1 })
	m.pulls()
	m.set.NewCounter("gpu_accounting_target_discovery_failures_total")
	m.rows(ledger.Result{})
	return m
}

// series is the name of a time series with labels, given in pairs.
func series(name string, labels ...string) string {
	var b strings.Builder
	b.WriteString(name)
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`)
	for i := 0; i+1 < len(labels); i += 2 {
		separator := ","
		if i == 0 {
			separator = "{"
		}
		b.WriteString(separator + labels[i] + `="` + escape.Replace(strings.ToValidUTF8(labels[i+1], "\uFFFD")) + `"`)
	}
	if len(labels) > 0 {
		b.WriteByte('}')
	}
	return b.String()
}

func (m *Metrics) pulls() *metrics.PrometheusHistogram {
	return m.set.GetOrCreatePrometheusHistogramExt("gpu_accounting_pull_duration_seconds", pullBuckets)
}

func (m *Metrics) rows(result ledger.Result) {
	m.set.GetOrCreateCounter("gpu_accounting_rows_inserted_total").AddInt64(result.Inserted)
	m.set.GetOrCreateCounter("gpu_accounting_rows_duplicate_total").AddInt64(result.Duplicate)
	m.set.GetOrCreateCounter("gpu_accounting_rows_quarantined_total").AddInt64(result.Quarantined)
}

// Pulled counts a pull.
func (m *Metrics) Pulled(target string, result ledger.Result, took time.Duration, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rows(result)
	m.pulls().Update(took.Seconds())
	if !m.watching[target] {
		return // it was taken off the list meanwhile
	}
	m.set.GetOrCreateCounter(series("gpu_accounting_target_pulls_total", "target", target)).Inc()
	failures := m.set.GetOrCreateCounter(series("gpu_accounting_target_pull_failures_total", "target", target))
	up := m.set.GetOrCreateGauge(series("gpu_accounting_target_up", "target", target), nil)
	up.Set(1)
	if err != nil {
		failures.Inc()
		up.Set(0)
	}
}

// Watching takes series of targets away that are no longer pulled from.
func (m *Metrics) Watching(targets []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := make(map[string]bool, len(targets))
	for _, target := range targets {
		now[target] = true
	}
	for target := range m.watching {
		if !now[target] {
			for _, name := range []string{"gpu_accounting_target_pulls_total", "gpu_accounting_target_pull_failures_total", "gpu_accounting_target_up"} {
				m.set.UnregisterMetric(series(name, "target", target))
			}
		}
	}
	m.watching = now
}

// DiscoveryFailed counts.
func (m *Metrics) DiscoveryFailed(error) {
	m.set.GetOrCreateCounter("gpu_accounting_target_discovery_failures_total").Inc()
}

func (m *Metrics) request(code int) {
	m.set.GetOrCreateCounter(series("gpu_accounting_http_requests_total", "code", fmt.Sprint(code))).Inc()
}

// Write writes all metrics in Prometheus's text format. What the ledger can't
// say is absent.
func (m *Metrics) Write(ctx context.Context, w io.Writer) error {
	var plain bytes.Buffer
	m.set.WritePrometheus(&plain)
	metrics.WriteProcessMetrics(&plain)
	m.mu.Lock()
	fmt.Fprintf(&plain, "gpu_accounting_targets %d\n", len(m.watching))
	watching := m.watching
	m.mu.Unlock()
	if targets, err := m.source.Targets(ctx); err == nil {
		for _, t := range targets {
			if !watching[t.URL] {
				continue
			}
			if !t.LastSuccess.IsZero() {
				fmt.Fprintf(&plain, "%s %d\n", series("gpu_accounting_target_last_success_timestamp_seconds", "target", t.URL), t.LastSuccess.Unix())
			}
			if !t.CompleteThrough.IsZero() {
				fmt.Fprintf(&plain, "%s %d\n", series("gpu_accounting_target_complete_through_timestamp_seconds", "target", t.URL, "node", t.Node), t.CompleteThrough.Unix())
			}
		}
	}
	if _, count, err := m.source.Quarantined(ctx, ledger.Span{}, 0); err == nil {
		fmt.Fprintf(&plain, "gpu_accounting_quarantined_rows %d\n", count)
	}
	if size, err := m.source.Size(); err == nil {
		fmt.Fprintf(&plain, "gpu_accounting_ledger_size_bytes %d\n", size)
	}
	_, err := w.Write(describe(plain.Bytes()))
	return err
}

// describe puts HELP and TYPE before each family and its lines together, and
// drops families that are not described.
func describe(plain []byte) []byte {
	var order []string
	lines := map[string][]string{}
	for line := range strings.Lines(string(plain)) {
		name := line[:strings.IndexAny(line+" ", "{ ")]
		family := name
		if _, ok := families[family]; !ok {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				if base, cut := strings.CutSuffix(name, suffix); cut && families[base].kind == "histogram" {
					family = base
				}
			}
		}
		if _, ok := families[family]; !ok {
			continue
		}
		if lines[family] == nil {
			order = append(order, family)
		}
		lines[family] = append(lines[family], line)
	}
	var out bytes.Buffer
	for _, family := range order {
		fmt.Fprintf(&out, "# HELP %s %s\n# TYPE %s %s\n", family, families[family].help, family, families[family].kind)
		for _, line := range lines[family] {
			out.WriteString(line)
		}
	}
	return out.Bytes()
}
