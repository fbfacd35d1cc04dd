package metrics

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/collectors/version"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"gpuledger/exporter/snapshot"
)

// Options are what a Handler needs besides the store.
type Options struct {
	// MaxWorkloads is the number of workloads shown under their own names;
	// 0 folds every workload into its user and kind. See DefaultMaxWorkloads.
	MaxWorkloads int
	// Runtime gives the metrics of the exporter's own process, gathered once
	// per snapshot; nil for none. See NewRuntimeRegistry.
	Runtime prometheus.Gatherer
	// OmitCreatedLines leaves the _created lines out of OpenMetrics text, for
	// servers that would store each of them as a series of its own. Protobuf
	// has created timestamps in any case, text format never.
	OmitCreatedLines bool
	// Logger takes errors of Runtime; nil for slog's default.
	Logger *slog.Logger
}

// NewRuntimeRegistry returns a registry with the Go runtime's, the process's
// and the build's metrics.
func NewRuntimeRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		version.NewCollector("gpu_exporter"),
	)
	return registry
}

// Handler serves the newest snapshot of a store. The first demand after a new
// snapshot renders it in the format asked for; everyone else until the next
// one, waiting at that moment included, gets the same bytes.
type Handler struct {
	store   *snapshot.Store
	options Options

	mu       sync.Mutex
	folder   *folder
	rendered *snapshot.Snapshot // what families and bodies are of
	families []*dto.MetricFamily
	bodies   map[expfmt.Format]*body
	sizes    map[expfmt.Format]int // of the last body, to size the next
	renders  uint64
	zipper   *gzip.Writer
}

type body struct{ plain, zipped []byte }

// NewHandler returns a handler that serves what is published in store.
func NewHandler(store *snapshot.Store, options Options) *Handler {
	if options.Logger == nil {
		options.Logger = slog.Default()
	}
	return &Handler{
		store: store, options: options, folder: newFolder(options.MaxWorkloads),
		sizes: map[expfmt.Format]int{},
	}
}

// Renders is how often a snapshot was rendered, in whichever format.
func (h *Handler) Renders() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.renders
}

// acceptedFormats are the formats served; without a wish it is text.
var acceptedFormats = expfmt.DefaultOpenMetricsAcceptedFormats()

// ServeHTTP implements http.Handler: GET and HEAD, with content negotiation
// and gzip. It answers 503 before the first snapshot.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "metrics are read with GET", http.StatusMethodNotAllowed)
		return
	}
	format := expfmt.NegotiateAccept(r.Header, acceptedFormats...)
	zipped := acceptsGzip(r.Header)
	content, err := h.Render(format, zipped)
	if err != nil {
		h.options.Logger.Error("cannot render metrics", "format", string(format), "error", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	if content == nil {
		w.Header().Set("Retry-After", "1")
		http.Error(w, "no sample has been taken yet, try again in a second", http.StatusServiceUnavailable)
		return
	}
	header := w.Header()
	header.Set("Content-Type", string(format))
	header.Set("Content-Length", strconv.Itoa(len(content)))
	header.Add("Vary", "Accept, Accept-Encoding")
	if zipped {
		header.Set("Content-Encoding", "gzip")
	}
	// A client that has gone away is all that can fail here.
	_, _ = w.Write(content)
}

// Render returns the newest snapshot in a format, gzipped if wanted, or nil
// before the first snapshot. The bytes are shared: they must not be changed.
func (h *Handler) Render(format expfmt.Format, zipped bool) ([]byte, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	newest := h.store.Load()
	if newest == nil {
		return nil, nil
	}
	if h.rendered != newest {
		h.families = gather(newView(newest, h.folder))
		if h.options.Runtime != nil {
			own, err := h.options.Runtime.Gather()
			if err != nil {
				h.options.Logger.Warn("some metrics of the exporter's own process are missing", "error", err)
			}
			h.families = merge(h.families, own)
		}
		h.rendered, h.bodies = newest, map[expfmt.Format]*body{}
	}
	b := h.bodies[format]
	if b == nil {
		plain, err := h.encode(format)
		if err != nil {
			return nil, err
		}
		b = &body{plain: plain}
		h.bodies[format] = b
	}
	if !zipped {
		return b.plain, nil
	}
	if b.zipped == nil {
		packed, err := h.zip(b.plain)
		if err != nil {
			return nil, err
		}
		b.zipped = packed
	}
	return b.zipped, nil
}

func (h *Handler) encode(format expfmt.Format) ([]byte, error) {
	h.renders++
	var out bytes.Buffer
	out.Grow(h.sizes[format] + h.sizes[format]/8)
	var options []expfmt.EncoderOption
	if !h.options.OmitCreatedLines {
		options = append(options, expfmt.WithCreatedLines())
	}
	encoder := expfmt.NewEncoder(&out, format, options...)
	for _, family := range h.families {
		if err := encoder.Encode(family); err != nil {
			return nil, fmt.Errorf("encode metric family %s: %w", family.GetName(), err)
		}
	}
	if closer, ok := encoder.(expfmt.Closer); ok {
		if err := closer.Close(); err != nil {
			return nil, fmt.Errorf("end the metrics: %w", err)
		}
	}
	h.sizes[format] = out.Len()
	return out.Bytes(), nil
}

func (h *Handler) zip(plain []byte) ([]byte, error) {
	var out bytes.Buffer
	if h.zipper == nil {
		zipper, err := gzip.NewWriterLevel(&out, gzip.BestSpeed)
		if err != nil {
			return nil, fmt.Errorf("compress the metrics: %w", err)
		}
		h.zipper = zipper
	} else {
		h.zipper.Reset(&out)
	}
	if _, err := h.zipper.Write(plain); err != nil {
		return nil, fmt.Errorf("compress the metrics: %w", err)
	}
	if err := h.zipper.Close(); err != nil {
		return nil, fmt.Errorf("compress the metrics: %w", err)
	}
	return out.Bytes(), nil
}

// acceptsGzip reports whether the client takes gzip.
func acceptsGzip(header http.Header) bool {
	for _, line := range header.Values("Accept-Encoding") {
		for part := range strings.SplitSeq(line, ",") {
			coding, parameters, _ := strings.Cut(part, ";")
			if !strings.EqualFold(strings.TrimSpace(coding), "gzip") {
				continue
			}
			quality, given := strings.CutPrefix(strings.TrimSpace(parameters), "q=")
			if !given {
				return true
			}
			q, err := strconv.ParseFloat(quality, 64)
			return err == nil && q > 0
		}
	}
	return false
}
