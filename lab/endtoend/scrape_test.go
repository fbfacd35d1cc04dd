package endtoend

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"gpuledger/lab"
)

// TestScrapesDuringChurn has 50 clients scrape 10,000 times while processes
// come and go, on an exporter built with the race detector, and wants no
// growth of goroutines, descriptors or memory.
func TestScrapesDuringChurn(t *testing.T) {
	const scrapes, clients = 10_000, 50
	var holders []worker
	for range 12 {
		holders = append(holders, work(t, 4713+uint32(len(holders)%4)))
	}
	n := newNode(t, "busy", lab.Scenario{GPUs: []lab.GPU{{}, {}, {}, {}}})
	n.start()
	client := &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	scrape := func() error {
		response, err := client.Get("http://" + n.address + "/metrics")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(body), "gpu_up{") {
			return fmt.Errorf("%s, %d bytes, %w", response.Status, len(body), err)
		}
		return nil
	}
	round := func(count int) {
		var group sync.WaitGroup
		for range clients {
			group.Go(func() {
				for range count / clients {
					if err := scrape(); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		done := make(chan struct{})
		go func() { group.Wait(); close(done) }()
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
				var processes []lab.Process
				for gpu := range n.scenario.GPUs {
					for _, holder := range holders {
						if rand.IntN(2) == 0 {
							processes = append(processes, lab.Process{GPU: gpu, PID: holder.pid, SM: rand.IntN(20), MemoryBytes: 1 << 28})
						}
					}
				}
				n.scenario.Processes = processes
				n.write()
			}
		}
	}
	// The first round is warm-up: caches, pools and the race detector's own.
	settled := func() footprint {
		client.CloseIdleConnections()
		f := n.footprint()
		await(t, "idle connections closed", func() bool {
			last := f
			f = n.footprint()
			return f.descriptors == last.descriptors && f.goroutines == last.goroutines
		})
		return f
	}
	round(scrapes)
	before := settled()
	round(scrapes)
	for until := soakUntil(t); time.Now().Before(until); {
		round(scrapes)
	}
	after := settled()
	t.Logf("before %+v, after %+v", before, after)
	// What leaks by scrape or by process leaks thousands here.
	if after.goroutines > before.goroutines+50 {
		t.Errorf("goroutines grew from %d to %d", before.goroutines, after.goroutines)
	}
	if after.descriptors > before.descriptors+20 {
		t.Errorf("descriptors grew from %d to %d", before.descriptors, after.descriptors)
	}
	if after.residentKiB > before.residentKiB*3/2 {
		t.Errorf("memory grew from %d to %d KiB", before.residentKiB, after.residentKiB)
	}
	n.exporter.stop(t)
}

// soakUntil is when make soak wants the churn to end; now in an ordinary test.
func soakUntil(t *testing.T) time.Time {
	t.Helper()
	text := os.Getenv("SOAK")
	if text == "" {
		return time.Now()
	}
	length, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("SOAK: %v", err)
	}
	return time.Now().Add(length)
}

type footprint struct{ goroutines, descriptors, residentKiB int }

// footprint is the exporter's, once its connections are idle.
func (n *node) footprint() footprint {
	n.t.Helper()
	var f footprint
	pid := strconv.Itoa(n.exporter.Process.Pid)
	entries, err := os.ReadDir("/proc/" + pid + "/fd")
	if err != nil {
		n.t.Fatal(err)
	}
	f.descriptors = len(entries)
	status, err := os.ReadFile("/proc/" + pid + "/status")
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			f.residentKiB, _ = strconv.Atoi(strings.Fields(value)[0])
		}
	}
	f.goroutines, _ = strconv.Atoi(n.metric("go_goroutines"))
	return f
}
