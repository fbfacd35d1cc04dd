package web

import (
	"fmt"
	"html"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"

	toolkit "github.com/prometheus/exporter-toolkit/web"

	"gpuledger/exporter/history"
	"gpuledger/exporter/who"
)

// Paths beside who.Path and history.Path.
const (
	MetricsPath = "/metrics"
	UsagePath   = "/api/v1/usage"
	HealthyPath = "/-/healthy"
	ReadyPath   = "/-/ready"
)

func routes(o Options, a *access) (http.Handler, error) {
	landing, err := landingPage(o)
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("GET /{$}", landing)
	mux.Handle("GET "+who.Path, a.forWho(who.Handler(o.Store, o.Now)))
	if o.Metrics != nil {
		mux.Handle("GET "+MetricsPath, a.forMetrics(o.Metrics))
	}
	if o.Usage != nil {
		mux.Handle("GET "+UsagePath, a.forUsage(o.Usage))
	}
	if o.History != nil {
		mux.Handle("GET "+history.Path, a.forHistory(o.History))
	}
	mux.HandleFunc("GET "+HealthyPath, func(w http.ResponseWriter, _ *http.Request) {
		plain(w, http.StatusOK, "gpu-exporter is running.\n")
	})
	mux.HandleFunc("GET "+ReadyPath, func(w http.ResponseWriter, _ *http.Request) {
		if o.Store.Load() == nil {
			plain(w, http.StatusServiceUnavailable, "gpu-exporter has not read the cards yet.\n")
			return
		}
		plain(w, http.StatusOK, "gpu-exporter is ready.\n")
	})
	return recovering(mux, o.Logger), nil
}

func plain(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	// A client that went away is nobody's error.
	_, _ = io.WriteString(w, text)
}

func landingPage(o Options) (http.Handler, error) {
	links := []toolkit.LandingLinks{
		{Address: who.Path, Text: "Who holds what", Description: "live, as JSON (gwho shows it as a table)"},
		{Address: HealthyPath, Text: "Health"},
		{Address: ReadyPath, Text: "Readiness"},
	}
	if o.Metrics != nil {
		links = append([]toolkit.LandingLinks{{Address: MetricsPath, Text: "Metrics", Description: "for Prometheus"}}, links...)
	}
	if o.History != nil {
		links = append(links, toolkit.LandingLinks{Address: history.Path, Text: "Who held what", Description: "the last day, as JSON (gwho --history shows it as a table); over the unix socket, or with what usage needs"})
	}
	if o.Usage != nil {
		links = append(links, toolkit.LandingLinks{Address: UsagePath, Text: "Usage", Description: "the journal; needs a token, a client certificate or an allowed uid"})
	}
	page, err := toolkit.NewLandingPage(toolkit.LandingConfig{
		Name:        "gpu-exporter",
		Description: "Who holds which GPU",
		// The toolkit's template does not escape.
		Version:   html.EscapeString(o.Version),
		ExtraHTML: "<p>Node: " + html.EscapeString(o.Node) + "</p>",
		Links:     links,
		Profiling: "false",
	})
	if err != nil {
		return nil, fmt.Errorf("landing page: %w", err)
	}
	return page, nil
}

// recovering turns a panic in a handler into a logged error: a fault in what
// shows things must not stop what meters them.
func recovering(next http.Handler, logger *slog.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		response := &startedWriter{ResponseWriter: w}
		defer func() {
			reason := recover()
			if reason == nil {
				return
			}
			if reason == http.ErrAbortHandler {
				panic(reason)
			}
			logger.Error("Panic while answering a request; this is a fault of gpu-exporter",
				"path", r.URL.Path, "panic", fmt.Sprint(reason), "stack", string(debug.Stack()))
			if response.started {
				// What was sent must not pass for whole.
				panic(http.ErrAbortHandler)
			}
			http.Error(w, "internal error; see the log of gpu-exporter", http.StatusInternalServerError)
		}()
		next.ServeHTTP(response, r)
	})
}

// startedWriter knows whether an answer has begun.
type startedWriter struct {
	http.ResponseWriter
	started bool
}

func (w *startedWriter) WriteHeader(status int) {
	w.started = true
	w.ResponseWriter.WriteHeader(status)
}

func (w *startedWriter) Write(p []byte) (int, error) {
	w.started = true
	return w.ResponseWriter.Write(p)
}

// Flush is for handlers that ask for an http.Flusher.
func (w *startedWriter) Flush() { _ = http.NewResponseController(w.ResponseWriter).Flush() }

// Unwrap is for http.ResponseController.
func (w *startedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
