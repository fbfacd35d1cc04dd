package web

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/snapshot"
	"gpuledger/exporter/who"
)

func TestMain(m *testing.M) {
	if socket := os.Getenv("WEB_TEST_SOCKET"); socket != "" {
		os.Exit(clientMain(socket, os.Getenv("WEB_TEST_PATH")))
	}
	os.Exit(m.Run())
}

// clientMain asks as whoever this process is.
func clientMain(socket, path string) int {
	status, body, err := get(unixClient(socket), "http://exporter"+path, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Println(status)
	fmt.Print(body)
	return 0
}

// running is a server under test.
type running struct {
	socket    string
	addresses []string
	log       *safeBuffer
	stop      context.CancelFunc
	done      chan error
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}
func (s *safeBuffer) String() string { s.mu.Lock(); defer s.mu.Unlock(); return s.b.String() }

func start(t *testing.T, change func(*Options)) *running {
	t.Helper()
	dir, err := os.MkdirTemp("", "web") // t.TempDir's names are too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	r := &running{socket: filepath.Join(dir, "run", "exporter.sock"), log: &safeBuffer{}, done: make(chan error, 1)}
	listening := make(chan []net.Addr, 1)
	o := Options{
		ListenAddresses: []string{"127.0.0.1:0"}, Socket: r.socket, Store: published(),
		Metrics: text("metrics"), Usage: text("usage"), Node: "gpu<01>", Version: "1.2.3",
		Logger: slog.New(slog.NewTextHandler(r.log, nil)), OnListen: func(a []net.Addr) { listening <- a },
	}
	if change != nil {
		change(&o)
	}
	server, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.stop = cancel
	go func() { r.done <- server.Run(ctx); close(r.done) }()
	t.Cleanup(func() { cancel(); <-r.done })
	select {
	case addresses := <-listening:
		for _, a := range addresses {
			if a.Network() == "tcp" {
				r.addresses = append(r.addresses, a.String())
			}
		}
	case err := <-r.done:
		t.Fatal("server ended: ", err)
	}
	return r
}

func text(s string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, s) })
}

// published has a process each of root, of the uid 65534 and of uid 4711.
func published() *snapshot.Store {
	card := snapshot.Card{Up: true, Identity: gpu.Card{UUID: "GPU-0", Name: "NVIDIA H200"}}
	for i, uid := range []int64{0, 65534, 4711} {
		card.Holders = append(card.Holders, snapshot.Holder{Device: "GPU-0", PID: uint32(100 + i), Command: "python3", Holds: true,
			StartedAt: time.Unix(1, 0), CommandLine: fmt.Sprintf("python3 line-of-%d.py", uid), Workload: meter.Workload{User: fmt.Sprint("u", uid), UID: uid}})
	}
	store := &snapshot.Store{}
	store.Publish(&snapshot.Snapshot{Node: "gpu01", At: time.Now(), NVMLUp: true, Expected: 1, Cards: []snapshot.Card{card}})
	return store
}

func unixClient(socket string) *http.Client {
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}}
}

func tcpClient() *http.Client {
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
}

func get(c *http.Client, url string, header http.Header) (int, string, error) {
	request, err := http.NewRequest("GET", url, nil)
	if err != nil {
		return 0, "", err
	}
	for name, values := range header {
		request.Header[name] = values
	}
	response, err := c.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return response.StatusCode, string(body), err
}

func expect(t *testing.T, c *http.Client, url string, header http.Header, status int, contains string) {
	t.Helper()
	got, body, err := get(c, url, header)
	if err != nil {
		t.Errorf("%s: %v", url, err)
		return
	}
	if got != status || !strings.Contains(body, contains) {
		t.Errorf("%s %v: %d %s; want %d with %q", url, header, got, body, status, contains)
	}
}

func TestRoutes(t *testing.T) {
	r := start(t, nil)
	base := "http://" + r.addresses[0]
	expect(t, tcpClient(), base+"/", nil, 200, "gpu&lt;01&gt;")
	expect(t, tcpClient(), base+"/nothing", nil, 404, "")
	expect(t, tcpClient(), base+"/metrics", nil, 200, "metrics")
	expect(t, tcpClient(), base+"/-/healthy", nil, 200, "running")
	expect(t, tcpClient(), base+"/-/ready", nil, 200, "ready")
	expect(t, tcpClient(), base+who.Path, nil, 200, `"command_line":null`)
	expect(t, tcpClient(), base+UsagePath, nil, 401, "needs a token")
	if _, body, _ := get(tcpClient(), base+who.Path, nil); strings.Contains(body, "line-of") {
		t.Errorf("an unknown viewer sees command lines: %s", body)
	}
	response, err := tcpClient().Post(base+"/metrics", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", response.StatusCode)
	}
}

func TestReadyWithTheFirstSnapshot(t *testing.T) {
	store := &snapshot.Store{}
	r := start(t, func(o *Options) { o.Store = store })
	base := "http://" + r.addresses[0]
	expect(t, tcpClient(), base+"/-/ready", nil, 503, "not read")
	expect(t, tcpClient(), base+"/-/healthy", nil, 200, "")
	expect(t, tcpClient(), base+who.Path, nil, 503, "not been read")
	store.Publish(published().Load())
	expect(t, tcpClient(), base+"/-/ready", nil, 200, "ready")
}

// The kernel says who is at the other end of the socket: root sees all and may
// read usage, others see their own command lines and may not.
func TestPeersOfTheSocket(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	r := start(t, func(o *Options) { o.Access.AllowedUIDs = []uint32{995, 65534} })
	as := asUser(t, r)
	for _, c := range []struct {
		uid   uint32
		lines string
		usage string
	}{
		{0, "0 65534 4711", "200"},
		{4711, "4711", "403"},
		{995, "", "200"},
		// The uid that stands for everybody without one is nobody, even where
		// it is allowed by name.
		{65534, "", "403"},
	} {
		status, body := as(c.uid, who.Path)
		if status != "200" {
			t.Errorf("uid %d: who %s %s", c.uid, status, body)
		}
		for _, owner := range []string{"0", "65534", "4711"} {
			want := strings.Contains(" "+c.lines+" ", " "+owner+" ")
			if got := strings.Contains(body, "line-of-"+owner+".py"); got != want {
				t.Errorf("uid %d sees the command line of %s: %t", c.uid, owner, got)
			}
		}
		if status, body := as(c.uid, UsagePath); status != c.usage {
			t.Errorf("uid %d: usage %s %s, want %s", c.uid, status, body, c.usage)
		}
		if status, _ := as(c.uid, MetricsPath); status != "200" {
			t.Errorf("uid %d: metrics %s", c.uid, status)
		}
	}
}

// TestNameOfAnotherHost asks a loopback address as a browser does that was told
// by a page's own name server to go there.
func TestNameOfAnotherHost(t *testing.T) {
	r := start(t, nil)
	status := func(path, host string) int {
		request, err := http.NewRequest("GET", "http://"+r.addresses[0]+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Host = host
		response, err := tcpClient().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		return response.StatusCode
	}
	for host, want := range map[string]int{"evil.example": 401, "evil.example:10094": 401, "gpu01:10094": 200, "": 200, "localhost:1": 200} {
		if got := status(who.Path, host); got != want {
			t.Errorf("as %q: %d, want %d", host, got, want)
		}
	}
}

func TestClosedLive(t *testing.T) {
	tokens := tokensFile(t, "prometheus", "secret")
	r := start(t, func(o *Options) { o.Access = AccessConfig{OpenLive: new(false), TokensFile: tokens} })
	base := "http://" + r.addresses[0]
	bearer := http.Header{"Authorization": {"Bearer secret"}}
	for _, path := range []string{MetricsPath, who.Path} {
		expect(t, tcpClient(), base+path, nil, 401, "access.open_live")
		expect(t, tcpClient(), base+path, bearer, 200, "")
	}
	expect(t, tcpClient(), base+"/-/healthy", nil, 200, "")

	// Who passes the answer on is told.
	for base, want := range map[string]string{base: who.ClosedValue, "http://" + start(t, nil).addresses[0]: ""} {
		request, err := http.NewRequest("GET", base+who.Path, nil)
		if err != nil {
			t.Fatal(err)
		}
		request.Header = bearer
		response, err := tcpClient().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if got := response.Header.Get(who.ClosedHeader); response.StatusCode != 200 || got != want {
			t.Errorf("%s %s: %q, want %q", response.Status, who.ClosedHeader, got, want)
		}
	}
}

// nonLoopback is an address of this machine that others could reach.
func nonLoopback(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() && ip.IP.To4() != nil {
			return ip.IP.String()
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("needs a network interface beside loopback")
	}
	t.Skip("needs a network interface beside loopback")
	return ""
}

func TestFromElsewhereWhoNeedsProof(t *testing.T) {
	ip := nonLoopback(t)
	tokens := tokensFile(t, "gwho", "secret")
	r := start(t, func(o *Options) { o.ListenAddresses = []string{"0.0.0.0:0"}; o.Access.TokensFile = tokens })
	_, port, err := net.SplitHostPort(r.addresses[0])
	if err != nil {
		t.Fatal(err)
	}
	outside, inside := "http://"+net.JoinHostPort(ip, port), "http://"+net.JoinHostPort("127.0.0.1", port)
	expect(t, tcpClient(), outside+who.Path, nil, 401, "on the node itself")
	expect(t, tcpClient(), outside+who.Path, http.Header{TokenHeader: {"secret"}}, 200, "python3")
	expect(t, tcpClient(), outside+MetricsPath, nil, 200, "metrics")
	expect(t, tcpClient(), outside+UsagePath, nil, 401, "token")
	expect(t, tcpClient(), inside+who.Path, nil, 200, "python3")
	// A name without a configuration file that checks it proves nothing.
	expect(t, tcpClient(), outside+who.Path, http.Header{"Authorization": {"Basic YWRtaW46YWRtaW4="}}, 401, "on the node itself")
}

func tokensFile(t *testing.T, name, token string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "tokens")
	writeTokens(t, path, tokenLine(name, token))
	return path
}

func tokenLine(name, token string) string {
	hash := sha256.Sum256([]byte(token))
	return name + ":" + hex.EncodeToString(hash[:]) + "\n"
}

func writeTokens(t *testing.T, path, text string) {
	t.Helper()
	// By rename, as editors do: another inode each time.
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func TestTokens(t *testing.T) {
	path := tokensFile(t, "collector", "first")
	r := start(t, func(o *Options) { o.Access.TokensFile = path })
	usage := "http://" + r.addresses[0] + UsagePath
	bearer := func(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }
	expect(t, tcpClient(), usage, bearer("first"), 200, "usage")
	expect(t, tcpClient(), usage, http.Header{TokenHeader: {"first"}}, 200, "usage")
	expect(t, tcpClient(), usage, bearer("second"), 401, "not known")
	expect(t, tcpClient(), usage, bearer(""), 401, "needs a token")
	expect(t, tcpClient(), usage, http.Header{"Authorization": {"Basic Zmlyc3Q6Zmlyc3Q="}}, 401, "needs a token")

	writeTokens(t, path, "# rotated\n\n"+tokenLine("collector", "second")+tokenLine("other", "third"))
	expect(t, tcpClient(), usage, bearer("first"), 401, "not known")
	expect(t, tcpClient(), usage, bearer("second"), 200, "usage")
	expect(t, tcpClient(), usage, bearer("third"), 200, "usage")

	writeTokens(t, path, tokenLine("collector", "second")+"nonsense:third\n")
	expect(t, tcpClient(), usage, bearer("second"), 401, "not known")
	if log := r.log.String(); !strings.Contains(log, "line 2") || strings.Contains(log, "third") || strings.Contains(log, "second") {
		t.Errorf("the log must name the line and no secret: %s", log)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	expect(t, tcpClient(), usage, bearer("second"), 401, "not known")
	writeTokens(t, path, tokenLine("collector", "second"))
	expect(t, tcpClient(), usage, bearer("second"), 200, "usage")
}

func TestNewRefusesBadFiles(t *testing.T) {
	good := func(change func(*Options)) error {
		o := Options{ListenAddresses: []string{"127.0.0.1:0"}, Store: &snapshot.Store{}, Logger: slog.New(slog.DiscardHandler)}
		change(&o)
		_, err := New(o)
		return err
	}
	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		return path
	}
	if err := good(func(*Options) {}); err != nil {
		t.Errorf("good options: %v", err)
	}
	for name, c := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"nothing to listen on": {func(o *Options) { o.ListenAddresses = nil }, "--socket"},
		"no web config":        {func(o *Options) { o.ConfigFile = filepath.Join(dir, "none") }, "web configuration file"},
		"bad web config":       {func(o *Options) { o.ConfigFile = write("web.yml", "tls: yes\n", 0o600) }, "web.yml"},
		"no tokens file":       {func(o *Options) { o.Access.TokensFile = filepath.Join(dir, "none") }, "access.tokens_file"},
		"plain token":          {func(o *Options) { o.Access.TokensFile = write("plain", "a:secret\n", 0o600) }, "line 1"},
		"open tokens file":     {func(o *Options) { o.Access.TokensFile = write("open", tokenLine("a", "b"), 0o666) }, "chmod o-w"},
		"same name twice":      {func(o *Options) { o.Access.TokensFile = write("twice", tokenLine("a", "b")+tokenLine("a", "c"), 0o600) }, "line 2"},
	} {
		if err := good(c.change); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: error %v, want one with %q", name, err, c.want)
		}
	}
}

func TestPanicsAreLoggedAndServingGoesOn(t *testing.T) {
	r := start(t, func(o *Options) {
		o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.RawQuery == "late" {
				io.WriteString(w, "half")
				w.(http.Flusher).Flush()
			}
			panic("broken")
		})
	})
	base := "http://" + r.addresses[0]
	expect(t, tcpClient(), base+"/metrics", nil, 500, "internal error")
	if _, body, err := get(tcpClient(), base+"/metrics?late", nil); err == nil {
		t.Errorf("half an answer passed for a whole one: %q", body)
	}
	expect(t, tcpClient(), base+"/-/healthy", nil, 200, "")
	if !strings.Contains(r.log.String(), "broken") {
		t.Error("the panic is not in the log")
	}
}

func TestPortInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	server, err := New(Options{ListenAddresses: []string{"127.0.0.1:0", taken.Addr().String()}, Store: &snapshot.Store{}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	err = server.Run(context.Background())
	if err == nil || !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), taken.Addr().String()) || !strings.Contains(err.Error(), "--web.listen-address") {
		t.Errorf("error %v does not name address and remedy", err)
	}
}

func TestSocketPath(t *testing.T) {
	r := start(t, nil)
	if info, err := os.Stat(r.socket); err != nil || info.Mode().Perm() != 0o666 {
		t.Errorf("socket: %v %v", info, err)
	}
	if _, err := listenUnix(r.socket, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "another gpu-exporter") {
		t.Errorf("a live socket was taken: %v", err)
	}
	expect(t, unixClient(r.socket), "http://exporter/-/ready", nil, 200, "ready")
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(r.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}

	// A process that was killed leaves its socket.
	dead, err := net.ListenUnix("unix", &net.UnixAddr{Name: r.socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	dead.SetUnlinkOnClose(false)
	dead.Close()
	l, err := listenUnix(r.socket, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatalf("a dead socket was not taken over: %v", err)
	}
	// What another put in its place stays.
	if err := os.Rename(r.socket, r.socket+".old"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.socket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := os.Stat(r.socket); err != nil {
		t.Errorf("closing removed a file that is another's: %v", err)
	}
	if _, err := listenUnix(r.socket, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("a file that is no socket was taken: %v", err)
	}
}
