package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/web"
)

// BenchmarkSocket is gwho as it is typed: process start, socket, table. The
// loads are 8 cards with 25 and with 200 processes each.
func BenchmarkSocket(b *testing.B) {
	program := filepath.Join(b.TempDir(), "gwho")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		b.Fatalf("build gwho: %v: %s", err, out)
	}
	for _, each := range []int{25, 200} {
		b.Run(fmt.Sprintf("processes=%d", 8*each), func(b *testing.B) {
			dir, err := os.MkdirTemp("", "gwho")
			if err != nil {
				b.Fatal(err)
			}
			defer os.RemoveAll(dir)
			socket := filepath.Join(dir, "s")
			store := &snapshot.Store{}
			store.Publish(busy(8, each))
			ctx, cancel := context.WithCancel(context.Background())
			listening, done := make(chan []net.Addr, 1), make(chan error, 1)
			server, err := web.New(web.Options{Socket: socket, Store: store, Logger: slog.New(slog.DiscardHandler), OnListen: func(a []net.Addr) { listening <- a }})
			if err != nil {
				b.Fatal(err)
			}
			go func() { done <- server.Run(ctx) }()
			defer func() { cancel(); <-done }()
			<-listening
			for b.Loop() {
				if out, err := exec.Command(program, "--socket", socket).CombinedOutput(); err != nil {
					b.Fatalf("gwho: %v: %s", err, out)
				}
			}
		})
	}
}

func busy(cards, each int) *snapshot.Snapshot {
	now := time.Now()
	s := &snapshot.Snapshot{Node: "gpu01", At: now.Add(time.Hour), NVMLUp: true, Expected: cards}
	for i := range cards {
		c := snapshot.Card{Up: true, Identity: gpu.Card{Index: i, UUID: fmt.Sprintf("GPU-%08d", i), Name: "NVIDIA H200"}, Reading: &gpu.Reading{}}
		for p := range each {
			c.Holders = append(c.Holders, snapshot.Holder{
				Device: c.Identity.UUID, PID: uint32(1000 + i*each + p), Command: "python3", CommandLine: "python3 train.py --epochs 100", Holds: true, StartedAt: now,
				Workload: meter.Workload{User: fmt.Sprint("user", p%5), UID: int64(1000 + p%5), Kind: meter.KindDocker, Name: fmt.Sprint("train", i)},
			})
		}
		s.Cards = append(s.Cards, c)
	}
	return s
}
