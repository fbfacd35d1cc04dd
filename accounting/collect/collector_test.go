package collect_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/common/config"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/accounting/ledger/sqlite"
	"gpuledger/exporter/usage"
)

var (
	start = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	now   = time.Date(2026, 11, 2, 0, 0, 0, 0, time.UTC)
)

// exporter speaks the wire: rows after a cursor, and the next one in a trailer.
type exporter struct {
	mu       sync.Mutex
	life     string // another one is another journal
	rows     []usage.Row
	pageRows int
	asked    []string // cursors
	trouble  func(w http.ResponseWriter, r *http.Request) bool
}

func (e *exporter) change(do func(*exporter)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	do(e)
}

func (e *exporter) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	e.mu.Lock()
	defer e.mu.Unlock()
	after := r.URL.Query().Get("after")
	e.asked = append(e.asked, after)
	if r.URL.Path != "/api/v1/usage" {
		http.NotFound(w, r)
		return
	}
	if e.trouble != nil && e.trouble(w, r) {
		return
	}
	at := 0
	if after != "" {
		life, number, _ := strings.Cut(after, "-")
		at, _ = strconv.Atoi(number)
		if life != e.life || at > len(e.rows) {
			http.Error(w, "gone", http.StatusGone)
			return
		}
	}
	page := e.rows[at:min(len(e.rows), at+e.pageRows)]
	w.Header().Set("Trailer", "Next-Cursor, Complete-Through")
	w.WriteHeader(http.StatusOK)
	encoder := usage.NewEncoder(w)
	for i := range page {
		if err := encoder.Encode(&page[i]); err != nil {
			return
		}
	}
	next := after
	if len(page) > 0 {
		next = fmt.Sprintf("%s-%d", e.life, at+len(page))
	}
	w.Header().Set("Next-Cursor", next)
	w.Header().Set("Complete-Through", start.Add(time.Duration(at+len(page))*time.Minute).Format(time.RFC3339))
}

func journalOf(rows []usage.Row) []usage.Row {
	rows = slices.Clone(rows)
	for i := range rows {
		rows[i].Seq = int64(i + 1)
	}
	return rows
}

func newExporter(t *testing.T, rows []usage.Row) (*exporter, string) {
	t.Helper()
	e := &exporter{life: "a", rows: journalOf(rows), pageRows: 7}
	server := httptest.NewServer(e)
	t.Cleanup(server.Close)
	return e, server.URL
}

type observer struct {
	mu     sync.Mutex
	pulls  map[string][]error
	result ledger.Result
}

func (o *observer) Pulled(target string, result ledger.Result, _ time.Duration, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.pulls[target] = append(o.pulls[target], err)
	o.result = o.result.Plus(result)
}
func (o *observer) Watching([]string)     {}
func (o *observer) DiscoveryFailed(error) {}

// newest is the newest pull's error, and how many pulls there were.
func (o *observer) newest(target string) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	list := o.pulls[target]
	if len(list) == 0 {
		return 0, errors.New("no pull yet")
	}
	return len(list), list[len(list)-1]
}

type fixture struct {
	store *sqlite.Store
	seen  *observer
}

func collecting(t *testing.T, options collect.Options) fixture {
	t.Helper()
	store, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	return collectingInto(t, store, options)
}

func collectingInto(t *testing.T, store *sqlite.Store, options collect.Options) fixture {
	t.Helper()
	f := fixture{store, &observer{pulls: map[string][]error{}}}
	options.Interval, options.Ledger, options.Observer = 5*time.Millisecond, store, f.seen
	options.HTTP, options.Log, options.Now = config.DefaultHTTPClientConfig, slog.New(slog.DiscardHandler), func() time.Time { return now }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		collect.New(options).Run(ctx)
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := store.Close(); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f fixture) audit(t *testing.T) ledger.Audit {
	t.Helper()
	audit, err := f.store.Audit(context.Background(), ledger.Span{}, now)
	if err != nil {
		t.Fatal(err)
	}
	return audit
}

// wantRows waits until the ledger holds as many rows.
func (f fixture) wantRows(t *testing.T, want int) {
	t.Helper()
	await(t, fmt.Sprintf("%d rows", want), func() bool { return f.audit(t).Rows == int64(want) })
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func rowsOf(node int) []usage.Row {
	site := ledgertest.Site{Start: start, Buckets: 6, Nodes: node + 1, CardsPerNode: 2, HoldersPerCard: 2}
	var rows []usage.Row
	for row := range site.Rows() {
		if row.Node == fmt.Sprintf("gpu%02d", node+1) {
			rows = append(rows, row)
		}
	}
	return rows
}

func hashOf(t *testing.T, rows ...usage.Row) string {
	t.Helper()
	store, err := sqlite.Open(context.Background(), filepath.Join(t.TempDir(), "ledger.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	if _, err := store.Insert(context.Background(), ledger.Batch{Source: "x", Rows: rows}, now); err != nil {
		t.Fatal(err)
	}
	return fixture{store: store}.audit(t).ContentHash
}

func TestPullsToTheEndAndGoesOn(t *testing.T) {
	rows := rowsOf(0)
	e, url := newExporter(t, rows[:20])
	f := collecting(t, collect.Options{Targets: []string{url}})
	f.wantRows(t, 20)
	e.change(func(e *exporter) { e.rows = journalOf(rows) })
	f.wantRows(t, len(rows))
	if got, want := f.audit(t).ContentHash, hashOf(t, rows...); got != want {
		t.Errorf("hash %s, want %s", got, want)
	}
	await(t, "complete-through", func() bool {
		target, err := f.store.Target(context.Background(), url)
		return err == nil && target.Node == "gpu01" && target.CompleteThrough.Equal(start.Add(time.Duration(len(rows))*time.Minute)) &&
			target.Cursor == fmt.Sprintf("a-%d", len(rows))
	})
}

func TestJournalBegunAnew(t *testing.T) {
	rows := rowsOf(0)
	for name, anew := range map[string][]usage.Row{
		"renumbered, and longer": append(slices.Clone(rows[10:]), rows[:10]...),
		"older copy restored":    rows[:5],
		"empty":                  nil,
	} {
		t.Run(name, func(t *testing.T) {
			e, url := newExporter(t, rows[:20])
			f := collecting(t, collect.Options{Targets: []string{url}})
			f.wantRows(t, 20)
			e.change(func(e *exporter) { e.life, e.rows = "b", journalOf(anew) })
			await(t, "a pull from the start", func() bool {
				e.mu.Lock()
				defer e.mu.Unlock()
				return len(e.asked) > 1 && slices.Contains(e.asked[1:], "")
			})
			e.change(func(e *exporter) { e.rows = journalOf(append(slices.Clone(anew), rows...)) })
			f.wantRows(t, len(rows))
			if audit := f.audit(t); audit.ContentHash != hashOf(t, rows...) {
				t.Error("the ledger's content is another one")
			}
			if _, count, err := f.store.Quarantined(context.Background(), ledger.Span{}, 0); err != nil || count != 0 {
				t.Errorf("%d rows in quarantine, %v", count, err)
			}
		})
	}
}

func TestTroubleIsNamedAndLosesNothing(t *testing.T) {
	rows := rowsOf(0)
	line := string(usage.AppendJSON(nil, &journalOf(rows)[0])) + "\n"
	trailers := func(w http.ResponseWriter, body, cursor string) {
		w.Header().Set("Trailer", "Next-Cursor")
		fmt.Fprint(w, body)
		w.Header().Set("Next-Cursor", cursor)
	}
	for name, test := range map[string]struct {
		trouble func(w http.ResponseWriter, r *http.Request) bool
		want    string
	}{
		"cut off":     {func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, line); panic(http.ErrAbortHandler) }, "EOF"},
		"no trailers": {func(w http.ResponseWriter, _ *http.Request) bool { fmt.Fprint(w, line); return true }, "no trailer Next-Cursor"},
		"busy": {func(w http.ResponseWriter, _ *http.Request) bool {
			http.Error(w, "later", http.StatusServiceUnavailable)
			return true
		}, `503 Service Unavailable: "later"`},
		"gone for ever": {func(w http.ResponseWriter, _ *http.Request) bool { http.Error(w, "", http.StatusGone); return true }, "does not have the row"},
		"not rows":      {func(w http.ResponseWriter, _ *http.Request) bool { trailers(w, "<html>\n", "x"); return true }, "line 1: not a JSON object"},
		"stuck": {func(w http.ResponseWriter, r *http.Request) bool {
			trailers(w, line, "same")
			return true
		}, "does not move its cursor"},
		"huge cursor": {func(w http.ResponseWriter, _ *http.Request) bool {
			trailers(w, line, strings.Repeat("x", 2000))
			return true
		}, "a cursor of 2000 bytes"},
		"endless line": {func(w http.ResponseWriter, _ *http.Request) bool {
			chunk := strings.Repeat("x", 1<<20)
			for range 80 {
				if _, err := fmt.Fprint(w, chunk); err != nil {
					break
				}
			}
			return true
		}, "more than 67108864 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			sick, sickURL := newExporter(t, rows)
			sick.change(func(e *exporter) { e.trouble = test.trouble })
			well, wellURL := newExporter(t, rowsOf(1))
			f := collecting(t, collect.Options{Targets: []string{sickURL, wellURL}})
			await(t, test.want, func() bool {
				_, err := f.seen.newest(sickURL)
				return err != nil && strings.Contains(err.Error(), test.want)
			})
			await(t, "the error in the ledger", func() bool {
				target, err := f.store.Target(context.Background(), sickURL)
				return err == nil && strings.Contains(target.LastError, test.want)
			})
			await(t, "the healthy target", func() bool {
				target, err := f.store.Target(context.Background(), wellURL)
				return err == nil && target.Cursor == fmt.Sprintf("a-%d", len(well.rows))
			})
			sick.change(func(e *exporter) { e.trouble = nil; e.life = "b" })
			f.wantRows(t, len(rows)+len(well.rows))
			await(t, "recovery", func() bool {
				target, err := f.store.Target(context.Background(), sickURL)
				return err == nil && target.LastError == "" && !target.LastSuccess.IsZero()
			})
		})
	}
}

func TestHangingTargetKeepsNoOtherWaiting(t *testing.T) {
	release := make(chan struct{})
	hanging := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-release }))
	t.Cleanup(func() { close(release); hanging.Close() })
	_, url := newExporter(t, rowsOf(0))
	f := collecting(t, collect.Options{Targets: []string{hanging.URL, url}})
	f.wantRows(t, len(rowsOf(0)))
	await(t, "more pulls", func() bool { n, err := f.seen.newest(url); return n > 3 && err == nil })
}

func TestRowsOfAnotherNodeAreQuarantined(t *testing.T) {
	rows := rowsOf(0)
	e, url := newExporter(t, rows)
	f := collecting(t, collect.Options{Targets: []string{url}})
	f.wantRows(t, len(rows))
	e.change(func(e *exporter) { e.rows = journalOf(append(slices.Clone(rows), rowsOf(1)[:3]...)) })
	await(t, "quarantine", func() bool {
		list, count, err := f.store.Quarantined(context.Background(), ledger.Span{}, 10)
		return err == nil && count == 3 && list[0].Reason == ledger.ReasonNode && list[0].Node == "gpu02" && list[0].Source == url
	})
	f.wantRows(t, len(rows))
}

func TestBadRowsAreQuarantinedAndTheRestGoesOn(t *testing.T) {
	rows := rowsOf(0)
	good := string(usage.AppendJSON(nil, &journalOf(rows)[0])) + "\n"
	bad := strings.Replace(good, `T00:00:00Z"`, `T00:01:00Z"`, 1)
	e, url := newExporter(t, nil)
	e.change(func(e *exporter) {
		e.trouble = func(w http.ResponseWriter, r *http.Request) bool {
			w.Header().Set("Trailer", "Next-Cursor")
			if r.URL.Query().Get("after") == "" {
				fmt.Fprint(w, bad+good)
			}
			w.Header().Set("Next-Cursor", "one")
			return true
		}
	})
	f := collecting(t, collect.Options{Targets: []string{url}})
	f.wantRows(t, 1)
	list, count, err := f.store.Quarantined(context.Background(), ledger.Span{}, 10)
	if err != nil || count != 1 || list[0].Line+"\n" != bad || list[0].Node != "gpu01" || list[0].Bucket == nil {
		t.Errorf("%d %+v %v", count, list, err)
	}
}

func TestTwoReplicasPullAtOnce(t *testing.T) {
	rows := rowsOf(0)
	_, url := newExporter(t, rows)
	path := filepath.Join(t.TempDir(), "ledger.db")
	var last fixture
	for range 2 {
		store, err := sqlite.Open(context.Background(), path)
		if err != nil {
			t.Fatal(err)
		}
		last = collectingInto(t, store, collect.Options{Targets: []string{url}})
	}
	last.wantRows(t, len(rows))
	if last.audit(t).ContentHash != hashOf(t, rows...) {
		t.Error("the ledger's content is another one")
	}
}

func TestUnixSocketAndFileSD(t *testing.T) {
	dir := t.TempDir()
	socket := filepath.Join(dir, "e.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: &exporter{life: "a", rows: journalOf(rowsOf(0)), pageRows: 100}}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	_, url := newExporter(t, rowsOf(1))
	f := collecting(t, collect.Options{Targets: []string{"unix://" + socket}, FileSD: []string{filepath.Join(dir, "*.yml"), filepath.Join(dir, "*.json")}})
	f.wantRows(t, len(rowsOf(0)))
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name+".new"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, name+".new"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	write("broken.yml", "- targets: [")
	write("one.json", `[{"targets": ["`+strings.TrimPrefix(url, "http://")+`"], "labels": {"site": "x"}}]`)
	f.wantRows(t, len(rowsOf(0))+len(rowsOf(1)))
	// Taken off the list, it is no longer pulled from.
	write("broken.yml", "[]")
	write("one.json", `[]`)
	await(t, "no more pulls", func() bool {
		before, _ := f.seen.newest(url)
		other, _ := f.seen.newest("unix://" + socket)
		await(t, "pulls of the other target", func() bool { n, _ := f.seen.newest("unix://" + socket); return n > other+3 })
		after, _ := f.seen.newest(url)
		return before == after
	})
}

func TestParseTarget(t *testing.T) {
	for text, want := range map[string]string{
		"http://gpu01:10094": "http://gpu01:10094", "https://gpu01:10094/": "https://gpu01:10094", "unix:///run/e.sock": "unix:///run/e.sock",
		"gpu01:10094": "", "http://": "", "http://gpu01/metrics": "", "unix://run/e.sock": "", "ftp://x": "", "http://gpu01?x=1": "", "": "", "http://a:b@c": "",
	} {
		got, err := collect.ParseTarget(text)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("%q: %q, %v", text, got, err)
		}
	}
}
