package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter"
	"gpuledger/exporter/procfs/text"
)

// engine is a kind of container engine.
type engine struct {
	kind     string // its key in the configuration
	programs []string
	unit     string
	// sockets of people's own engines, as patterns.
	personal []string
	http     bool // speaks Docker's API
}

// engines by their keys of the configuration. One that is not here is asked
// for a connection only.
var engines = []engine{
	{kind: "docker", programs: []string{"dockerd"}, unit: "docker", personal: []string{"/run/user/*/docker.sock"}, http: true},
	{kind: "podman", programs: []string{"podman"}, unit: "podman.socket", personal: []string{"/run/user/*/podman/podman.sock"}, http: true},
	// Docker brings containerd along: that it is installed says nothing.
	{kind: "cri", unit: "containerd (or crio, k3s)"},
	{kind: "kubelet", programs: []string{"kubelet"}, unit: "kubelet"},
}

// configured is one socket that the configuration names.
type configured struct {
	engine
	socket    string
	byDefault bool
}

// directories are keys of the configuration whose lists are of no sockets.
var directories = []string{"docker_data"}

// socketsOf reads every list of sockets in the configuration, whatever engines
// it knows.
func socketsOf(config exporter.RuntimesConfig) map[string][]string {
	sockets := map[string][]string{}
	value := reflect.ValueOf(config)
	for i := range value.NumField() {
		key, _, _ := strings.Cut(value.Type().Field(i).Tag.Get("yaml"), ",")
		if list, is := value.Field(i).Interface().([]string); is && !slices.Contains(directories, key) {
			sockets[key] = list
		}
	}
	return sockets
}

// runtimes asks the engines that the configuration lists, beside each other.
func runtimes(ctx context.Context, h *host) []Finding {
	defaults := socketsOf(exporter.DefaultConfig().Runtimes)
	listed := socketsOf(h.config.Runtimes)
	var all []configured
	for _, kind := range slices.Sorted(maps.Keys(listed)) {
		about := engine{kind: kind, programs: []string{kind}, unit: kind}
		if i := slices.IndexFunc(engines, func(e engine) bool { return e.kind == kind }); i >= 0 {
			about = engines[i]
		}
		for _, socket := range listed[kind] {
			socket = strings.TrimPrefix(socket, "unix://")
			all = append(all, configured{about, socket, slices.Contains(defaults[kind], socket)})
		}
	}
	found := make([][]Finding, len(all))
	var group sync.WaitGroup
	for i, one := range all {
		group.Go(func() { found[i] = one.examine(ctx, h) })
	}
	group.Wait()
	if h.config.Runtimes.Personal {
		return slices.Concat(found...) // people's own are found without being listed
	}
	return append(slices.Concat(found...), personalEngines(listed)...)
}

// engineAnswer is how long an engine may take: it is asked for its version.
const engineAnswer = 3 * time.Second

func (c configured) examine(ctx context.Context, h *host) []Finding {
	name := "runtimes." + c.kind
	nameless := "its containers appear under their ids, and labels name no owners; readings go on"
	if c.kind == "podman" {
		nameless = "names of its containers come from disk, and labels name no owners; readings go on"
	}
	info, err := os.Stat(c.socket)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		program := c.installed()
		if program == "" && c.byDefault {
			return nil // there is none on this host, and nobody said so
		}
		one := Finding{Check: name, Level: Warning, Found: "there is no " + c.socket, Consequence: nameless,
			Remedy: "start it: systemctl start " + c.unit + "; or take it out of runtimes." + c.kind}
		if program != "" {
			one.Found += ", although " + program + " is installed"
			one.Remedy = "start it: systemctl start " + c.unit + "; or name its socket in runtimes." + c.kind + "; [] if nobody uses it"
		}
		return []Finding{one}
	case err != nil:
		return []Finding{{Check: name, Level: h.unlessRoot(Problem), Found: err.Error(), Consequence: nameless, Remedy: "run as root"}}
	case info.Mode().Type() != fs.ModeSocket:
		return []Finding{{Check: name, Level: Problem, Found: c.socket + " is no socket", Consequence: nameless,
			Remedy: "name the engine's socket in runtimes." + c.kind}}
	}
	ctx, cancel := context.WithTimeout(ctx, engineAnswer)
	defer cancel()
	said, err := c.ask(ctx)
	switch {
	case errors.Is(err, unix.EACCES) || errors.Is(err, unix.EPERM):
		return []Finding{{Check: name, Level: h.unlessRoot(Problem), Found: c.socket + ": permission denied", Consequence: nameless,
			Remedy: "run as root, or as a member of the socket's group"}}
	case errors.Is(err, unix.ECONNREFUSED):
		return []Finding{{Check: name, Level: Problem, Found: c.socket + " is there, and nobody listens on it", Consequence: nameless,
			Remedy: "systemctl restart " + c.unit}}
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded):
		return []Finding{{Check: name, Level: Problem, Found: fmt.Sprintf("%s does not answer within %v", c.socket, engineAnswer), Consequence: nameless,
			Remedy: "systemctl restart " + c.unit}}
	case err != nil:
		return []Finding{{Check: name, Level: Problem, Found: c.socket + ": " + text.Clean(err.Error(), 300), Consequence: nameless,
			Remedy: "see whether it is the right socket, and the log: journalctl -u " + c.unit}}
	}
	return []Finding{ok(name, c.socket+" answers"+said)}
}

func (c configured) installed() string {
	for _, program := range c.programs {
		if path, err := exec.LookPath(program); err == nil {
			return path
		}
	}
	return ""
}

// maxVersionBytes bounds an engine's answer.
const maxVersionBytes = 1 << 20

// ask returns what the engine says of itself, as the end of a sentence.
func (c configured) ask(ctx context.Context) (string, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", c.socket)
	}
	if !c.http {
		connection, err := dial(ctx, "", "")
		if err != nil {
			return "", err
		}
		return "", connection.Close()
	}
	transport := &http.Transport{DialContext: dial, DisableKeepAlives: true}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://engine/version", nil)
	if err != nil {
		return "", err
	}
	response, err := (&http.Client{Transport: transport}).Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxVersionBytes))
	if err != nil {
		return "", err
	}
	var version struct{ Version, ApiVersion string }
	if response.StatusCode != http.StatusOK || json.Unmarshal(body, &version) != nil || version.Version == "" {
		return "", fmt.Errorf("GET /version: %s, and not what an engine answers", response.Status)
	}
	return ": version " + text.Clean(version.Version, 64) + ", API " + text.Clean(version.ApiVersion, 64), nil
}

// personalEngines are people's own that run and are not listed.
func personalEngines(listed map[string][]string) []Finding {
	var found []Finding
	for _, one := range engines {
		sockets, supported := listed[one.kind]
		if !supported {
			continue
		}
		for _, pattern := range one.personal {
			paths, err := filepath.Glob(pattern)
			if err != nil {
				continue // the patterns are ours
			}
			for _, path := range paths {
				if !slices.Contains(sockets, path) && !slices.Contains(sockets, pattern) {
					found = append(found, Finding{
						Check: "runtimes." + one.kind, Level: Warning, Found: text.Clean(path, 200) + " is somebody's own engine, and not in the configuration",
						Consequence: "its containers are put down to that user, under their ids",
						Remedy:      "set runtimes.personal: true, or add it to runtimes." + one.kind,
					})
				}
			}
		}
	}
	return found
}
