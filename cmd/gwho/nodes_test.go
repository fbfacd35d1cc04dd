package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/testscript"

	"gpuledger/accounting"
	"gpuledger/exporter/who"
)

func accountingCommand(ts *testscript.TestScript, _ bool, targets []string) {
	quoted := make([]string, len(targets))
	for i, target := range targets {
		quoted[i] = fmt.Sprintf("%q", target)
	}
	name := ts.MkAbs("accounting.yml")
	ts.Check(os.WriteFile(name, fmt.Appendf(nil, "ledger: {url: \"sqlite:ledger.db\"}\ncollect: {interval: 1h, targets: [%s]}\n", strings.Join(quoted, ", ")), 0o600))
	config, err := accounting.LoadConfig(name)
	ts.Check(err)
	ts.Setenv("LEDGER", ts.Getenv("SOCKET")+"l")
	ctx, cancel := context.WithCancel(context.Background())
	listening := make(chan []net.Addr, 1)
	done := make(chan error, 1)
	go func() {
		done <- accounting.Serve(ctx, config, accounting.ServeOptions{
			Listen: []string{"127.0.0.1:0", "unix://" + ts.Getenv("LEDGER")}, Log: slog.New(slog.DiscardHandler), Now: time.Now, OnListen: func(a []net.Addr) { listening <- a },
		})
	}()
	ts.Defer(func() { cancel(); <-done })
	select {
	case addresses := <-listening:
		ts.Setenv("ACCOUNTING", "http://"+addresses[0].String())
	case err := <-done:
		done <- err
		ts.Fatalf("gpu-accounting: %v", err)
	}
}

func TestNodesTableGolden(t *testing.T) {
	var list who.Nodes
	for _, name := range []string{"server", "names", "no-driver"} {
		a := answers(t)[name]
		a.Node = name
		list.Nodes = append(list.Nodes, a)
	}
	list.At = time.Date(2026, 11, 3, 8, 15, 0, 0, time.UTC)
	list.Missing = []who.MissingNode{{Node: "gpu07", Target: "http://gpu07:10094", Message: "no answer within 2s"}, {Target: "unix:///run/\x1b.sock", Message: "connection refused"}}
	zone := time.FixedZone("CST", 8*60*60)
	for variant, text := range map[string]string{
		"piped":  nodesTable(list, false, tableOptions{Zone: zone}),
		"narrow": nodesTable(list, false, tableOptions{Zone: zone, Width: 72, Colour: true}),
		"free":   nodesTable(keepFree(list), true, tableOptions{Zone: zone}),
	} {
		path := filepath.Join("testdata", "tables", "nodes."+variant)
		if *update {
			if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err, "; make it with -update")
		}
		if diff := cmp.Diff(string(want), text); diff != "" {
			t.Errorf("%s: %s", variant, diff)
		}
	}
}
