package metrics

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpuledger/exporter/snapshot"
)

const (
	acceptOpenMetrics = "application/openmetrics-text;version=1.0.0;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.2"
	acceptProtobuf    = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
)

func scrape(h http.Handler, header ...string) *httptest.ResponseRecorder {
	request := httptest.NewRequest(http.MethodGet, "/metrics", nil)
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	recorder := httptest.NewRecorder()
	h.ServeHTTP(recorder, request)
	return recorder
}

// countingGatherer counts how often the exporter's own metrics are gathered.
type countingGatherer struct {
	prometheus.Gatherer
	count int
}

func (g *countingGatherer) Gather() ([]*dto.MetricFamily, error) {
	g.count++
	return g.Gatherer.Gather()
}

func TestFiftyScrapersRenderOnce(t *testing.T) {
	var store snapshot.Store
	own := &countingGatherer{Gatherer: NewRuntimeRegistry()}
	h := NewHandler(&store, Options{MaxWorkloads: DefaultMaxWorkloads, Runtime: own})
	for round := uint64(1); round <= 3; round++ {
		store.Publish(crowded(8, 5))
		start := make(chan struct{})
		bodies := make([]string, 50)
		var scrapers sync.WaitGroup
		for i := range bodies {
			scrapers.Go(func() {
				<-start
				bodies[i] = scrape(h).Body.String()
			})
		}
		close(start)
		scrapers.Wait()
		if h.Renders() != round || uint64(own.count) != round {
			t.Fatalf("after %d snapshots: %d renders, %d gatherings", round, h.Renders(), own.count)
		}
		for _, body := range bodies {
			if body != bodies[0] || !strings.Contains(body, "gpu_up{") {
				t.Fatal("scrapers got different or empty answers")
			}
		}
	}
	// Compressing is not rendering; another format is.
	scrape(h, "Accept-Encoding", "gzip")
	if h.Renders() != 3 {
		t.Errorf("gzip rendered again")
	}
	scrape(h, "Accept", acceptOpenMetrics)
	scrape(h, "Accept", acceptOpenMetrics)
	if h.Renders() != 4 {
		t.Errorf("%d renders after OpenMetrics, want 4", h.Renders())
	}
}

// TestScrapesWhilePublishing is for the race detector, and checks that the
// answers go forward only.
func TestScrapesWhilePublishing(t *testing.T) {
	var store snapshot.Store
	publish := func(run int) {
		s := crowded(1, 3)
		s.Seq, s.Cards[0].MeteredUS = uint64(run), int64(run)*1_000_000
		store.Publish(s)
	}
	publish(0)
	h := NewHandler(&store, Options{MaxWorkloads: 2})
	var group sync.WaitGroup
	group.Go(func() {
		for run := range 200 {
			publish(run)
		}
	})
	for range 4 {
		group.Go(func() {
			last := -1.0
			for range 100 {
				parser := expfmt.NewTextParser(model.LegacyValidation)
				families, err := parser.TextToMetricFamilies(scrape(h).Body)
				if err != nil {
					t.Error(err)
					return
				}
				metered := families["gpu_metered_seconds_total"].GetMetric()[0].GetCounter().GetValue()
				if metered < last {
					t.Errorf("metered seconds fell from %v to %v", last, metered)
				}
				last = metered
			}
		})
	}
	group.Wait()
}

func TestNegotiation(t *testing.T) {
	var store snapshot.Store
	store.Publish(sharedA100())
	h := NewHandler(&store, Options{MaxWorkloads: DefaultMaxWorkloads})
	for name, c := range map[string]struct{ accept, contentType string }{
		"curl":        {"*/*", "text/plain; version=0.0.4; charset=utf-8"},
		"nothing":     {"", "text/plain; version=0.0.4; charset=utf-8"},
		"nonsense":    {"image/png;;;=", "text/plain; version=0.0.4; charset=utf-8"},
		"openmetrics": {acceptOpenMetrics, "application/openmetrics-text; version=1.0.0; charset=utf-8"},
		"protobuf":    {acceptProtobuf, "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"},
	} {
		answer := scrape(h, "Accept", c.accept)
		if got := answer.Header().Get("Content-Type"); answer.Code != http.StatusOK || !strings.HasPrefix(got, c.contentType) {
			t.Errorf("%s: %d %s", name, answer.Code, got)
		}
		if !strings.Contains(answer.Header().Get("Vary"), "Accept-Encoding") {
			t.Errorf("%s: no Vary", name)
		}
	}
	var created int
	decoder := expfmt.NewDecoder(scrape(h, "Accept", acceptProtobuf).Body, expfmt.FmtProtoDelim)
	for {
		var family dto.MetricFamily
		err := decoder.Decode(&family)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range family.Metric {
			if m.GetCounter().GetCreatedTimestamp() != nil {
				created++
			}
		}
	}
	if created == 0 {
		t.Error("protobuf has no created timestamps")
	}
}

func TestGzip(t *testing.T) {
	var store snapshot.Store
	store.Publish(sharedA100())
	h := NewHandler(&store, Options{MaxWorkloads: DefaultMaxWorkloads})
	plain := scrape(h).Body.Bytes()
	for range 2 { // the second is from the cache
		answer := scrape(h, "Accept-Encoding", "deflate, gzip;q=0.5")
		if answer.Header().Get("Content-Encoding") != "gzip" {
			t.Fatal("not compressed")
		}
		unzip, err := gzip.NewReader(answer.Body)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(unzip)
		if err != nil || !bytes.Equal(got, plain) {
			t.Fatalf("unzipped differs from plain, error %v", err)
		}
	}
	for _, refused := range []string{"gzip;q=0", "gzip; q=0.0", "br", "", "gzip;q=x"} {
		if got := scrape(h, "Accept-Encoding", refused).Header().Get("Content-Encoding"); got != "" {
			t.Errorf("Accept-Encoding %q got %q", refused, got)
		}
	}
}

func TestBeforeTheFirstSnapshot(t *testing.T) {
	var store snapshot.Store
	h := NewHandler(&store, Options{})
	if answer := scrape(h); answer.Code != http.StatusServiceUnavailable || answer.Header().Get("Retry-After") == "" {
		t.Errorf("got %d before the first snapshot", answer.Code)
	}
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(NewCollector(&store, 1))
	if families, err := registry.Gather(); err != nil || len(families) > 0 {
		t.Errorf("collector before the first snapshot: %d families, %v", len(families), err)
	}
}

func TestMethods(t *testing.T) {
	var store snapshot.Store
	store.Publish(laptop())
	server := httptest.NewServer(NewHandler(&store, Options{}))
	defer server.Close()
	answer, err := http.Post(server.URL, "text/plain", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST got %d", answer.StatusCode)
	}
	head, err := http.Head(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer head.Body.Close()
	if head.StatusCode != http.StatusOK || head.ContentLength <= 0 {
		t.Errorf("HEAD got %d, length %d", head.StatusCode, head.ContentLength)
	}
}

// TestFailingRuntimeMetrics: the cards are shown whatever happens to the
// exporter's own metrics.
func TestFailingRuntimeMetrics(t *testing.T) {
	var store snapshot.Store
	store.Publish(laptop())
	var log bytes.Buffer
	h := NewHandler(&store, Options{
		Runtime: prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) { return nil, errors.New("no /proc") }),
		Logger:  slog.New(slog.NewTextHandler(&log, nil)),
	})
	if answer := scrape(h); answer.Code != http.StatusOK || !strings.Contains(answer.Body.String(), "gpu_up{") {
		t.Errorf("got %d", answer.Code)
	}
	if !strings.Contains(log.String(), "no /proc") {
		t.Error("the failure is not logged")
	}
}
