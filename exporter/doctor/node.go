package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/web"
)

// Room that the journal should have.
const (
	littleBytes = 1 << 30
	leastBytes  = 64 << 20
)

// state looks at the directory of the journal, without making it.
func state(_ context.Context, h *host) []Finding {
	var found []Finding
	switch {
	case h.running != 0:
		found = append(found, ok("state.lock", fmt.Sprintf("gpu-exporter runs on this node, PID %d", h.running)))
	case h.lockErr != nil:
		found = append(found, Finding{
			Check: "state.lock", Level: h.unlessRoot(Problem), Found: h.lockErr.Error(),
			Consequence: "whether gpu-exporter runs here can't be told", Remedy: "sudo gpu-exporter doctor",
		})
	default:
		found = append(found, ok("state.lock", "no gpu-exporter holds this node now"))
	}
	place := h.StateDir
	if _, err := os.Stat(place); errors.Is(err, fs.ErrNotExist) {
		place = existing(place)
	}
	var volume unix.Statfs_t
	if err := unix.Access(place, unix.W_OK|unix.X_OK); err != nil {
		return append(found, Finding{
			Check: "state.dir", Level: h.unlessRoot(Problem), Found: fmt.Sprintf("%s can't be written by uid %d: %v", place, h.uid, err),
			Consequence: "the exporter does not start there: it can't keep what it meters",
			Remedy:      "run as root, or choose another place with --state.dir; in a systemd unit: StateDirectory=gpu-exporter",
		})
	}
	if err := unix.Statfs(place, &volume); err != nil {
		return append(found, Finding{
			Check: "state.dir", Level: Problem, Found: fmt.Sprintf("%s: %v", place, err),
			Consequence: "the journal can't be kept there", Remedy: "choose another place with --state.dir",
		})
	}
	if volume.Type == unix.NFS_SUPER_MAGIC {
		return append(found, Finding{
			Check: "state.dir", Level: Problem, Found: place + " is on NFS",
			Consequence: "its locks are not safe for the journal's database, and a server that hangs holds it up",
			Remedy:      "choose a local directory with --state.dir",
		})
	}
	free := volume.Bavail * uint64(volume.Bsize)
	where := fmt.Sprintf("%s can be written, %d MiB are free", h.StateDir, free>>20)
	if place != h.StateDir {
		where = fmt.Sprintf("%s will be made in %s, where %d MiB are free", h.StateDir, place, free>>20)
	}
	switch {
	case free < leastBytes:
		return append(found, Finding{
			Check: "state.dir", Level: Problem, Found: where,
			Consequence: "rows wait in memory for up to 24 h, and are lost with the process",
			Remedy:      "make room, or choose another place with --state.dir",
		})
	case free < littleBytes:
		return append(found, Finding{
			Check: "state.dir", Level: Warning, Found: where,
			Consequence: "the journal may take up to --journal.max-size, 1 GiB by default",
			Remedy:      "make room, or lower --journal.max-size",
		})
	}
	return append(found, ok("state.dir", where))
}

// existing is the nearest directory above path that is there.
func existing(path string) string {
	for {
		path = filepath.Dir(path)
		if _, err := os.Stat(path); err == nil || path == "/" || path == "." {
			return path
		}
	}
}

// listen looks at the TCP addresses: ours if we run, else free.
func listen(ctx context.Context, h *host) []Finding {
	var found []Finding
	for _, address := range h.ListenAddresses {
		found = append(found, h.listenAt(ctx, address))
	}
	if len(found) == 0 {
		return []Finding{ok("listen", "no TCP address to listen on")}
	}
	return found
}

func (h *host) listenAt(ctx context.Context, address string) Finding {
	if h.running != 0 {
		dialer := &net.Dialer{}
		err := h.healthy(ctx, "http://"+reachable(address), func(ctx context.Context, network, address string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, address)
		})
		var strange strangeAnswer
		switch {
		case err == nil:
			return ok("listen", "gpu-exporter answers on "+address)
		case errors.As(err, &strange) && h.WebConfigFile != "":
			return ok("listen", address+" is listened on; with --web.config.file it does not say by whom")
		}
		return Finding{
			Check: "listen", Level: Problem, Found: fmt.Sprintf("gpu-exporter runs (PID %d), and on %s: %v", h.running, address, err),
			Consequence: "Prometheus and others can't reach it there",
			Remedy:      "give this check the flags of the service: systemctl cat gpu-exporter; ss -ltnp",
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		one := Finding{
			Check: "listen", Level: Problem, Found: err.Error(),
			Consequence: "the exporter does not start", Remedy: "choose another with --web.listen-address",
		}
		if errors.Is(err, unix.EADDRINUSE) {
			one.Remedy = "ss -ltnp shows who has it; stop that, or choose another with --web.listen-address"
		}
		return one
	}
	listener.Close()
	return ok("listen", address+" is free")
}

// reachable is where a listener on every address can be asked.
func reachable(address string) string {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return address
	}
	switch host {
	case "", "0.0.0.0":
		host = "127.0.0.1"
	case "::":
		host = "::1"
	}
	return net.JoinHostPort(host, port)
}

// strangeAnswer is an answer, and not gpu-exporter's.
type strangeAnswer struct{ text string }

func (s strangeAnswer) Error() string { return s.text }

// healthy asks whether gpu-exporter is on the other side.
func (h *host) healthy(ctx context.Context, url string, dial func(ctx context.Context, network, address string) (net.Conn, error)) error {
	ctx, cancel := context.WithTimeout(ctx, engineAnswer)
	defer cancel()
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url+web.HealthyPath, nil)
	if err != nil {
		return err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	var refused *net.OpError
	switch {
	case errors.As(err, &refused) && refused.Op == "dial":
		return refused
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("no answer within %v", engineAnswer)
	case err != nil:
		return strangeAnswer{"an answer that is none of gpu-exporter: " + text.Clean(err.Error(), 200)}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 4096))
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK || !strings.Contains(string(body), "gpu-exporter") {
		return strangeAnswer{"something else answers: " + response.Status}
	}
	return nil
}

// socket looks at the unix socket: ours if we run, else a place to make it.
func socket(ctx context.Context, h *host) []Finding {
	if h.Socket == "" {
		return []Finding{ok("socket", "none (--socket=''): gwho reads the cards itself")}
	}
	const shut = "gwho reads the cards itself, and knows neither names nor how long"
	info, err := os.Lstat(h.Socket)
	if h.running != 0 {
		err := h.healthy(ctx, "http://exporter", func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", h.Socket)
		})
		if err != nil {
			return []Finding{{
				Check: "socket", Level: Problem, Found: fmt.Sprintf("gpu-exporter runs (PID %d), and on %s: %v", h.running, h.Socket, err),
				Consequence: shut, Remedy: "give this check the flags of the service: systemctl cat gpu-exporter; or restart it: systemctl restart gpu-exporter",
			}}
		}
		return []Finding{ok("socket", "gpu-exporter answers on "+h.Socket)}
	}
	switch {
	case err == nil && info.Mode().Type() != fs.ModeSocket:
		return []Finding{{
			Check: "socket", Level: Problem, Found: h.Socket + " is there, and no socket",
			Consequence: "the exporter does not start", Remedy: "remove it, or choose another path with --socket",
		}}
	case err == nil:
		err := h.healthy(ctx, "http://exporter", func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", h.Socket)
		})
		if errors.Is(err, unix.ECONNREFUSED) {
			return []Finding{ok("socket", h.Socket+" is left from before; it is made anew at the next start")}
		}
		said := "somebody answers on it"
		if err != nil {
			said = err.Error()
		}
		return []Finding{{
			Check: "socket", Level: Problem, Found: fmt.Sprintf("no gpu-exporter holds this node, and on %s: %s", h.Socket, said),
			Consequence: "the exporter does not start while another process listens there",
			Remedy:      "ss -lxp | grep " + filepath.Base(h.Socket) + " shows who does",
		}}
	}
	place := existing(h.Socket)
	if err := unix.Access(place, unix.W_OK|unix.X_OK); err != nil {
		return []Finding{{
			Check: "socket", Level: h.unlessRoot(Problem), Found: fmt.Sprintf("%s can't be written by uid %d: %v", place, h.uid, err),
			Consequence: "the exporter does not start", Remedy: "run as root, or choose another path with --socket; in a systemd unit: RuntimeDirectory=gpu-exporter",
		}}
	}
	return []Finding{ok("socket", h.Socket+" can be made")}
}

// service looks at how the running exporter is shut in: by its systemd unit, or
// by a container.
func service(_ context.Context, h *host) []Finding {
	if h.running == 0 || h.fs == nil {
		return nil
	}
	dir := filepath.Join(h.fs.Root(), strconv.Itoa(h.running))
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	mounts, errMounts := os.ReadFile(filepath.Join(dir, "mountinfo"))
	if err := errors.Join(err, errMounts); err != nil {
		return []Finding{{
			Check: "service", Level: Warning, Found: "how the running exporter is shut in can't be seen: " + err.Error(),
			Consequence: "whether something is kept from it is not known", Remedy: "sudo gpu-exporter doctor",
		}}
	}
	var found []Finding
	if !hasTrace(string(status)) {
		found = append(found, Finding{
			Check: "service.capabilities", Level: Problem, Found: fmt.Sprintf("the running exporter (PID %d) has no CAP_SYS_PTRACE", h.running),
			Consequence: "it can't see the programs, files, reads and writes of other people's processes",
			Remedy:      "User=root and CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH in its unit; containers: --cap-add SYS_PTRACE",
		})
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " - proc ") && (strings.Contains(line, "hidepid=invisible") || strings.Contains(line, "hidepid=2") || strings.Contains(line, "subset=pid")) {
			found = append(found, Finding{
				Check: "service.proc", Level: Warning, Found: "the running exporter has a /proc of its own that hides processes or files",
				Consequence: "people's processes, or the boot's identity, may be missing there",
				Remedy:      "no ProtectProc= and no ProcSubset= in its unit",
			})
			break
		}
	}
	for path, remedy := range h.needed() {
		if _, err := os.Stat(path); err != nil {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "root", path)); errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) && h.root() {
			found = append(found, Finding{
				Check: "service.files", Level: Problem, Found: "the running exporter can't see " + path,
				Consequence: "it does without, as if this were not there", Remedy: remedy,
			})
		}
	}
	if len(found) == 0 {
		found = append(found, ok("service", fmt.Sprintf("nothing that the running exporter (PID %d) needs is kept from it", h.running)))
	}
	return found
}

// needed are files that the exporter uses if they are there, and what keeps
// them from a service.
func (h *host) needed() map[string]string {
	needed := map[string]string{"/dev/nvidiactl": "no PrivateDevices= in its unit; containers: --gpus all"}
	for _, sockets := range socketsOf(h.config.Runtimes) {
		for _, path := range sockets {
			needed[strings.TrimPrefix(path, "unix://")] = "no ProtectHome=, or ProtectHome=read-only, in its unit (it hides /run/user too); containers: mount it"
		}
	}
	return needed
}

// hasTrace looks for CAP_SYS_PTRACE among a process's effective capabilities.
func hasTrace(status string) bool {
	_, rest, found := strings.Cut(status, "CapEff:")
	fields := strings.Fields(rest)
	if !found || len(fields) == 0 {
		return false
	}
	mask, err := strconv.ParseUint(fields[0], 16, 64)
	return err == nil && mask&(1<<unix.CAP_SYS_PTRACE) != 0
}
