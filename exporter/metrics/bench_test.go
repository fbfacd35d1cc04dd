package metrics

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"gpuledger/exporter/snapshot"
)

var loads = []struct {
	name           string
	cards, perCard int
}{
	{"usual-8x5", 8, 5},
	{"heavy-8x40", 8, 40},
	{"limit-8x125", 8, 125},
}

var benchFormats = map[string]expfmt.Format{
	"text":        expfmt.NewFormat(expfmt.TypeTextPlain),
	"openmetrics": expfmt.FmtOpenMetrics_1_0_0,
}

// BenchmarkRender is the first demand after a new snapshot.
func BenchmarkRender(b *testing.B) {
	for _, load := range loads {
		for _, format := range []string{"text", "openmetrics"} {
			for _, zipped := range []bool{false, true} {
				b.Run(fmt.Sprintf("%s/%s/gzip=%t", load.name, format, zipped), func(b *testing.B) {
					base := crowded(load.cards, load.perCard)
					var store snapshot.Store
					h := NewHandler(&store, Options{MaxWorkloads: DefaultMaxWorkloads, Runtime: NewRuntimeRegistry()})
					b.ReportAllocs()
					for b.Loop() {
						next := *base
						store.Publish(&next)
						content, err := h.Render(benchFormats[format], zipped)
						if err != nil {
							b.Fatal(err)
						}
						b.SetBytes(int64(len(content)))
					}
				})
			}
		}
	}
}

// BenchmarkGather is what the series of BenchmarkRender would cost through a
// registry, before any encoding.
func BenchmarkGather(b *testing.B) {
	for _, load := range loads {
		b.Run(load.name, func(b *testing.B) {
			var store snapshot.Store
			store.Publish(crowded(load.cards, load.perCard))
			registry := prometheus.NewRegistry()
			registry.MustRegister(NewCollector(&store, DefaultMaxWorkloads))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := registry.Gather(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkSharedScrape is every other scrape of a snapshot.
func BenchmarkSharedScrape(b *testing.B) {
	for _, zipped := range []bool{false, true} {
		b.Run(fmt.Sprintf("heavy-8x40/gzip=%t", zipped), func(b *testing.B) {
			var store snapshot.Store
			store.Publish(crowded(8, 40))
			h := NewHandler(&store, Options{MaxWorkloads: DefaultMaxWorkloads, Runtime: NewRuntimeRegistry()})
			request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
			if zipped {
				request.Header.Set("Accept-Encoding", "gzip")
			}
			h.ServeHTTP(&discard{}, request)
			b.ReportAllocs()
			for b.Loop() {
				h.ServeHTTP(&discard{}, request)
			}
		})
	}
}

// discard is a ResponseWriter that keeps nothing.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header {
	if d.header == nil {
		d.header = http.Header{}
	}
	return d.header
}
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}
