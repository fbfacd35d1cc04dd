package nodes_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/common/config"

	"gpuledger/accounting/collect"
	"gpuledger/accounting/ledger"
	"gpuledger/accounting/nodes"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/web"
	"gpuledger/exporter/who"
)

// quiet drops what is logged.
var quiet = slog.New(slog.DiscardHandler)

// exporter is a real exporter's web server, with a process of this test's uid on
// its card. It returns its addresses.
func exporter(t *testing.T, name string, access web.AccessConfig) (url, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "nodes") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	store := &snapshot.Store{}
	store.Publish(&snapshot.Snapshot{Node: name, At: time.Now(), NVMLUp: true, Expected: 1, Cards: []snapshot.Card{{
		Up: true, Identity: gpu.Card{UUID: "GPU-" + name, Name: "NVIDIA H200"}, Reading: &gpu.Reading{}, Holders: []snapshot.Holder{{
			Device: "GPU-" + name, PID: 4711, Process: gpu.Process{PID: 4711, Compute: true}, Command: "python3", CommandLine: "python3 --password=secret-of-" + name,
			StartedAt: time.Now(), Holds: true, Workload: meter.Workload{User: "alice", UID: int64(os.Geteuid()), Kind: meter.KindHost},
		}},
	}}})
	listening := make(chan []net.Addr, 1)
	server, err := web.New(web.Options{
		ListenAddresses: []string{"127.0.0.1:0"}, Socket: filepath.Join(dir, "s"), Store: store, Access: access,
		Logger: quiet, OnListen: func(a []net.Addr) { listening <- a },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- server.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	select {
	case addresses := <-listening:
		return "http://" + addresses[0].String(), "unix://" + filepath.Join(dir, "s")
	case err := <-done:
		t.Fatal(err)
		return "", ""
	}
}

// hung accepts connections and says nothing on them.
func hung(t *testing.T, address string) net.Addr {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { connection.Close() })
		}
	}()
	return listener.Addr()
}

func impostor(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func board(t *testing.T, http config.HTTPClientConfig, known []ledger.Target, targets ...string) *nodes.Board {
	t.Helper()
	return nodes.NewBoard(nodes.Options{
		Collector: collect.New(collect.Options{Targets: targets, HTTP: http, Log: quiet}),
		Known:     func(context.Context) ([]ledger.Target, error) { return known, nil }, Log: quiet, Now: time.Now,
	})
}

func ask(t *testing.T, b *nodes.Board, all bool) (who.Nodes, string) {
	t.Helper()
	began := time.Now()
	body, err := b.Who(t.Context(), all)
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > nodes.Within+time.Second {
		t.Errorf("an answer took %v", took)
	}
	var answer who.Nodes
	if err := json.Unmarshal(body, &answer); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return answer, string(body)
}

func names(answer who.Nodes) []string {
	list := []string{}
	for _, node := range answer.Nodes {
		list = append(list, node.Node)
	}
	return list
}

// One round over nodes that answer and nodes that don't, each in its way: all of
// the first are there, each of the others is named with why, in two seconds.
func TestARound(t *testing.T) {
	good, _ := exporter(t, "gpu02", web.AccessConfig{})
	_, local := exporter(t, "gpu01", web.AccessConfig{})
	refusing, _ := exporter(t, "gpu03", web.AccessConfig{OpenLive: new(false)})
	silent := "http://" + hung(t, "127.0.0.1:0").String()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead := "http://" + listener.Addr().String()
	listener.Close()
	html := impostor(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "<html>") })
	newer := impostor(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"version":2,"node":"gpu09"}`) })
	endless := impostor(t, func(w http.ResponseWriter, _ *http.Request) {
		for {
			if _, err := w.Write(make([]byte, 1<<16)); err != nil {
				return
			}
		}
	})
	nasty := impostor(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
		io.WriteString(w, `{"error":"\u001b[31m`+strings.Repeat("x", 10_000)+`"}`)
	})
	b := board(t, config.DefaultHTTPClientConfig, []ledger.Target{{URL: silent, Node: "gpu07"}, {URL: good, Node: "gpu02"}},
		good, local, refusing, silent, dead, html, newer, endless, nasty)
	answer, body := ask(t, b, true)
	if got := names(answer); !slices.Equal(got, []string{"gpu01", "gpu02"}) {
		t.Errorf("nodes %v", got)
	}
	if answer.Version != 1 || time.Since(answer.At) > time.Minute || answer.Nodes[0].Cards[0].Devices[0].Holders[0].User != "alice" {
		t.Errorf("%s", body)
	}
	missing := map[string]who.MissingNode{}
	for _, each := range answer.Missing {
		missing[each.Target] = each
	}
	for target, want := range map[string]string{
		refusing: "it answers 401: who holds what is open on the node itself only", silent: "no answer within 2s", dead: "connection refused",
		html: "the answer is not one of gpu-exporter", newer: "it speaks version 2 of the answer", endless: "its answer is larger than 4 MiB", nasty: "it answers 418",
	} {
		if got := missing[target].Message; !strings.Contains(got, want) || len(got) > 300 || strings.Contains(got, "\x1b") {
			t.Errorf("%s is missing because %q, want %q", target, got, want)
		}
	}
	if len(missing) != 7 || missing[silent].Node != "gpu07" || missing[dead].Node != "" {
		t.Errorf("missing %+v", answer.Missing)
	}

	// The socket told us its command line; nobody is told it by us.
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", strings.TrimPrefix(local, "unix://"))
	}}}
	response, err := client.Get("http://x" + who.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if direct, _ := io.ReadAll(response.Body); !strings.Contains(string(direct), "secret-of-gpu01") {
		t.Errorf("the socket tells no command line, so this proves nothing: %s", direct)
	}
	if strings.Contains(body, "secret-of") || strings.Contains(body, `"viewer_uid":0`) {
		t.Errorf("a command line crossed: %s", body)
	}
}

// A node whose live view is closed is asked with the collector's token; what it
// says is for those only who may ask it themselves.
func TestClosedNodesStayClosed(t *testing.T) {
	sum := sha256.Sum256([]byte("secret"))
	tokens := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(tokens, []byte("collector:"+hex.EncodeToString(sum[:])+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	closed, _ := exporter(t, "gpu01", web.AccessConfig{OpenLive: new(false), TokensFile: tokens})
	open, _ := exporter(t, "gpu02", web.AccessConfig{TokensFile: tokens})
	http := config.DefaultHTTPClientConfig
	http.Authorization = &config.Authorization{Type: "Bearer", Credentials: "secret"}
	b := board(t, http, nil, closed, open)
	answer, _ := ask(t, b, true)
	if got := names(answer); !slices.Equal(got, []string{"gpu01", "gpu02"}) || len(answer.Missing) != 0 {
		t.Errorf("who sees all gets %v, missing %v", got, answer.Missing)
	}
	answer, body := ask(t, b, false)
	if got := names(answer); !slices.Equal(got, []string{"gpu02"}) || len(answer.Missing) != 1 || answer.Missing[0].Node != "gpu01" ||
		!strings.Contains(answer.Missing[0].Message, "closed") || strings.Contains(body, "GPU-gpu01") {
		t.Errorf("everybody gets %v, missing %v", got, answer.Missing)
	}
}

// Many who ask at once cost each node one question, and one of them going away
// costs the others nothing.
func TestManyAskersCostOneRound(t *testing.T) {
	var asked atomic.Int64
	release := make(chan struct{})
	url := impostor(t, func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		<-release
		io.WriteString(w, `{"version":1,"node":"gpu01"}`)
	})
	var now atomic.Int64
	b := nodes.NewBoard(nodes.Options{
		Collector: collect.New(collect.Options{Targets: []string{url}, HTTP: config.DefaultHTTPClientConfig, Log: quiet}),
		Known:     func(context.Context) ([]ledger.Target, error) { return nil, nil }, Log: quiet,
		Now: func() time.Time { return time.Unix(now.Load(), 0) },
	})
	first, leave := context.WithCancel(t.Context())
	left := make(chan error, 1)
	go func() {
		_, err := b.Who(first, true)
		left <- err
	}()
	for asked.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	leave()
	if err := <-left; err == nil {
		t.Error("who went away got an answer")
	}
	var askers sync.WaitGroup
	for range 50 {
		askers.Go(func() {
			if answer, _ := ask(t, b, true); len(answer.Nodes) != 1 {
				t.Errorf("%+v", answer)
			}
		})
	}
	close(release)
	askers.Wait()
	now.Add(1)
	ask(t, b, true)
	if got := asked.Load(); got != 1 {
		t.Errorf("the node was asked %d times within two seconds", got)
	}
	now.Add(2)
	ask(t, b, true)
	if got := asked.Load(); got != 2 {
		t.Errorf("the node was asked %d times, want 2", got)
	}
}

// More nodes that hang than can be asked at once keep none of the others away,
// once it is known which they are: from the ledger, or from the round before.
func TestHungNodesTakeNobodysTurn(t *testing.T) {
	port := hung(t, "0.0.0.0:0").(*net.TCPAddr).Port
	var targets []string
	var known []ledger.Target
	for i := range 600 { // all of 127.x.y.z is this machine
		target := fmt.Sprintf("http://127.1.%d.%d:%d", i/200, i%200+1, port)
		targets = append(targets, target)
		known = append(known, ledger.Target{URL: target, LastError: "no answer"})
	}
	listener, err := net.Listen("tcp", "127.9.9.9:0") // the last to be asked
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"version":1,"node":"gpu01"}`) })}
	go server.Serve(listener)
	t.Cleanup(func() { server.Close() })
	targets = append(targets, "http://"+listener.Addr().String())

	for name, known := range map[string]func(context.Context) ([]ledger.Target, error){
		"with the ledger's help": func(context.Context) ([]ledger.Target, error) { return known, nil },
		"without it":             func(context.Context) ([]ledger.Target, error) { return nil, errors.New("locked") },
	} {
		var now atomic.Int64
		b := nodes.NewBoard(nodes.Options{
			Collector: collect.New(collect.Options{Targets: targets, HTTP: config.DefaultHTTPClientConfig, Log: quiet}),
			Known:     known, Log: quiet, Now: func() time.Time { return time.Unix(now.Load(), 0) },
		})
		rounds := 0
		for there := false; !there; rounds++ {
			answer, _ := ask(t, b, true)
			now.Add(10)
			if there = len(answer.Nodes) == 1 && len(answer.Missing) == 600; !there && rounds == 5 { // a busy machine may need a round more
				t.Fatalf("%s: %d nodes, %d missing", name, len(answer.Nodes), len(answer.Missing))
			}
		}
	}
}
