package holders

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

// crowd is an engine whose containers come and go, with events as Docker sends
// them, and a procfs made of files with one process for each. So many real
// containers no test machine starts in a minute.
type crowd struct {
	t    testing.TB
	root string // of the procfs
	stat []string
	rest map[string]string

	mutex  sync.Mutex
	alive  map[string]uint32
	events []chan string
}

func newCrowd(t testing.TB, socket string) *crowd {
	t.Helper()
	c := &crowd{t: t, root: t.TempDir(), alive: map[string]uint32{}, rest: map[string]string{}}
	for _, name := range []string{"sys/kernel/random/boot_id", "stat"} {
		text, err := os.ReadFile("/proc/" + name)
		if err != nil {
			t.Fatal(err)
		}
		c.write(name, string(text))
	}
	if err := os.MkdirAll(filepath.Join(c.root, "1/ns"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("pid:[4026531836]", filepath.Join(c.root, "1/ns/pid")); err != nil {
		t.Fatal(err)
	}
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		t.Fatal(err)
	}
	c.stat = strings.SplitN(string(stat), " ", 2)
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	c.rest["status"], c.rest["cmdline"] = string(status), "sleep\x003600\x00"

	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, value any) { _ = json.NewEncoder(w).Encode(value) }
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]string{"ApiVersion": "1.44", "MinAPIVersion": "1.24"})
	})
	mux.HandleFunc("GET /v1.44/events", c.stream)
	mux.HandleFunc("GET /v1.44/containers/json", func(w http.ResponseWriter, _ *http.Request) {
		all := []map[string]string{}
		c.mutex.Lock()
		for id := range c.alive {
			all = append(all, map[string]string{"Id": id})
		}
		c.mutex.Unlock()
		answer(w, all)
	})
	mux.HandleFunc("GET /v1.44/containers/{id}/json", func(w http.ResponseWriter, r *http.Request) {
		id := r.PathValue("id")
		c.mutex.Lock()
		pid, ok := c.alive[id]
		c.mutex.Unlock()
		if !ok {
			http.NotFound(w, r)
			return
		}
		answer(w, map[string]any{
			"Id": id, "Name": "/job-" + id[:12], "Image": "sha256:1", "State": map[string]any{"Running": true, "Pid": pid, "StartedAt": time.Now()},
			"Config": map[string]any{"Image": "train", "Labels": map[string]string{"owner": "alice", "long": strings.Repeat("x", 1000)}},
			// One of eight was given a card that it does not use.
			"HostConfig": map[string]any{"DeviceRequests": []map[string]any{{"Driver": "nvidia", "DeviceIDs": []string{"7"}}}[:pid%8/7]},
		})
	})
	mux.HandleFunc("GET /v1.44/images/{id}/json", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, map[string]any{"Config": map[string]any{}})
	})
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux}
	done := make(chan struct{})
	go func() { defer close(done); _ = server.Serve(listener) }()
	t.Cleanup(func() { server.Close(); <-done })
	return c
}

func (c *crowd) write(name, text string) {
	path := filepath.Join(c.root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		c.t.Fatal(err)
	}
}

func (c *crowd) stream(w http.ResponseWriter, r *http.Request) {
	events := make(chan string, 1<<16)
	c.mutex.Lock()
	c.events = append(c.events, events)
	c.mutex.Unlock()
	w.(http.Flusher).Flush()
	for {
		select {
		case <-r.Context().Done():
			return
		case event := <-events:
			_, _ = w.Write([]byte(event))
			w.(http.Flusher).Flush()
		}
	}
}

func (c *crowd) say(action, id string) {
	for _, events := range c.events {
		events <- fmt.Sprintf(`{"Type":"container","Action":%q,"Actor":{"ID":%q}}`+"\n", action, id)
	}
}

func crowdID(pid uint32) string { return fmt.Sprintf("%012x%052d", pid, 0) }

func (c *crowd) begin(pid uint32) {
	id, dir := crowdID(pid), fmt.Sprint(pid)
	c.write(dir+"/cgroup", "0::/system.slice/docker-"+id+".scope\n")
	c.write(dir+"/stat", dir+" "+c.stat[1])
	for name, text := range c.rest {
		c.write(dir+"/"+name, text)
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.alive[id] = pid
	c.say("start", id)
}

func (c *crowd) end(pid uint32) {
	if err := os.RemoveAll(filepath.Join(c.root, fmt.Sprint(pid))); err != nil {
		c.t.Fatal(err)
	}
	c.mutex.Lock()
	defer c.mutex.Unlock()
	delete(c.alive, crowdID(pid))
	c.say("die", crowdID(pid))
	c.say("destroy", crowdID(pid))
}

func heapBytes() uint64 {
	runtime.GC()
	runtime.GC() // what the first one finalised
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return stats.HeapAlloc
}

// TestThousandsOfContainersAMinute lets 8,000 containers come and go at 200 a
// second, twice and more what is asked for (5,000 a minute), each for a second.
// Every one is named while it lives, memory does not grow once a minute's worth
// of ended ones is remembered, and passes stay short.
func TestThousandsOfContainersAMinute(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: 8,000 containers")
	}
	const (
		total, atOnce, perTick = 8_000, 200, 10
		tick                   = 50 * time.Millisecond
		// A minute of the table's clock passes while 5,000 come and go.
		clockTick = time.Minute * perTick / 5_000
		firstPID  = 100_000
	)
	socket := filepath.Join(shortDir(t), "s")
	c := newCrowd(t, socket)
	proc, err := procfs.Open(c.root)
	if err != nil {
		t.Fatal(err)
	}
	clock := time.Now()
	directory := runtimes.NewDirectory(runtimes.NewDockerClient(socket), nil)
	assigned := runtimes.NewAssigned(runtimes.NewDockerClient(socket), func(pid uint32, _ string) bool { return pid != 0 }, nil)
	options := Options{
		FS: proc, Owner: owner.DefaultConfig(), Now: func() time.Time { return clock },
		Engines: []*runtimes.Directory{directory}, Granters: []runtimes.Granter{assigned},
	}
	options.Owner.Accounts = accounts()
	table := New(options)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); table.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done; table.Close() })

	var alive []uint32
	named := map[uint32]bool{}
	var passes []time.Duration
	unnamed, mostGiven := 0, 0
	var heap []uint64
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for next := uint32(firstPID); next < firstPID+total; {
		<-ticker.C
		clock = clock.Add(clockTick)
		for range perTick {
			c.begin(next)
			alive = append(alive, next)
			next++
		}
		r := reading(alive...)
		begun := time.Now()
		table.Refresh(ctx, gpu.Pass{Readings: []gpu.Reading{r}})
		keys := table.Keys(r)
		for _, pid := range alive {
			if workload := table.Attribute(keys[pid]).Workload; workload.Name == "job-"+crowdID(pid)[:12] && workload.User == "alice" {
				named[pid] = true
			}
		}
		passes = append(passes, time.Since(begun))
		card := r
		card.Card.Index = 7
		mostGiven = max(mostGiven, len(table.Given(&card)))
		for len(alive) > atOnce {
			if !named[alive[0]] {
				unnamed++
			}
			delete(named, alive[0])
			c.end(alive[0])
			alive = alive[1:]
		}
		if count := next - firstPID; count == 1_000 || count == 5_500 || count == total {
			heap = append(heap, heapBytes())
		}
	}
	slices.Sort(passes)
	median, longest := passes[len(passes)/2], passes[len(passes)-1]
	t.Logf("%d containers: heap %d KiB after 1,000, %d KiB after 5,500, %d KiB at the end; passes over %d processes took %v, at most %v; %d given at once",
		total, heap[0]>>10, heap[1]>>10, heap[2]>>10, atOnce, median, longest, mostGiven)
	if unnamed > 0 {
		t.Errorf("%d containers were never named", unnamed)
	}
	if heap[2] > heap[1]+(4<<20) || heap[1] > 64<<20 {
		t.Errorf("memory grows: %d, %d, %d bytes", heap[0], heap[1], heap[2])
	}
	if median > tick { // of a loaded machine, with the race detector on
		t.Errorf("a pass takes %v", median)
	}
	// They live on for a moment after the engine's word of their end.
	if mostGiven == 0 || mostGiven > atOnce/2 {
		t.Errorf("at most %d containers were given a card at once", mostGiven)
	}
	for _, pid := range alive {
		c.end(pid)
	}
	await(t, "nothing is given any more", func() bool { return len(assigned.Grants()) == 0 })
}
