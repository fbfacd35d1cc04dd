package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
)

// DefaultDockerSocket is where dockerd listens unless told otherwise.
const DefaultDockerSocket = "/var/run/docker.sock"

// DefaultPodmanSocket is where systemd listens for root's Podman.
const DefaultPodmanSocket = "/run/podman/podman.sock"

const (
	requestTimeout = 5 * time.Second
	maxAnswerBytes = 4 << 20
	maxNameBytes   = 256
	maxPathBytes   = 4096
	maxBinds       = 64
	maxLabelBytes  = 1024
	// newestVersion is the newest API version whose answers have been read.
	newestVersion = "1.51"
)

// DockerClient speaks to one Docker-compatible engine over its unix socket. It
// only ever sends GET.
type DockerClient struct {
	engine string
	socket string
	http   *http.Client

	mutex   sync.Mutex
	version string // negotiated; empty before and after trouble
}

// NewDockerClient returns a client for the Docker engine on socket. It does
// nothing until asked.
func NewDockerClient(socket string) *DockerClient {
	if socket == "" {
		socket = DefaultDockerSocket
	}
	return newDockerClient("docker", socket, -1)
}

// NewPodmanClient returns a client for Podman's service on socket, which
// answers as Docker does. It does nothing until asked: asking starts a service
// that systemd keeps a socket for.
func NewPodmanClient(socket string) *DockerClient {
	return newDockerClient("podman", socket, -1)
}

// newDockerClient believes only an engine that runs as uid; -1 is any.
func newDockerClient(engine, socket string, uid int64) *DockerClient {
	dialer := net.Dialer{Timeout: requestTimeout}
	return &DockerClient{engine: engine, socket: socket, http: &http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				connection, err := dialer.DialContext(ctx, "unix", socket)
				if err == nil && uid >= 0 {
					if err = servedBy(connection, uid); err != nil {
						connection.Close()
					}
				}
				return connection, err
			},
			MaxIdleConns: 4, MaxConnsPerHost: 8, IdleConnTimeout: time.Minute, ResponseHeaderTimeout: requestTimeout,
			DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// servedBy is an error unless the kernel says that uid listens at the other end.
func servedBy(connection net.Conn, uid int64) error {
	raw, err := connection.(*net.UnixConn).SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	var peerErr error
	if err := raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return err
	}
	if peerErr != nil {
		return fmt.Errorf("who listens: %w", peerErr)
	}
	if int64(peer.Uid) != uid {
		return fmt.Errorf("uid %d listens there, and not uid %d whose directory it is", peer.Uid, uid)
	}
	return nil
}

// Engine is docker or podman.
func (c *DockerClient) Engine() string { return c.engine }

// Socket is the path of the engine's socket.
func (c *DockerClient) Socket() string { return c.socket }

// Follow reads the engine's event stream.
func (c *DockerClient) Follow(ctx context.Context, opened func(), changed func(id string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	version, err := func() (string, error) {
		ctx, cancel := context.WithTimeout(ctx, requestTimeout)
		defer cancel()
		return c.negotiate(ctx)
	}()
	if err != nil {
		return err
	}
	filters := url.QueryEscape(`{"type":["container"],"event":["die","destroy","rename","start","update"]}`)
	response, err := c.open(ctx, "/v"+version+"/events?filters="+filters)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	opened()
	decoder := json.NewDecoder(&bounded{reader: response.Body})
	for {
		var event struct {
			Action string
			Actor  struct{ ID string }
		}
		if err := decoder.Decode(&event); err != nil {
			return fmt.Errorf("%s on %s: events: %w", c.engine, c.socket, err)
		}
		changed(event.Actor.ID)
	}
}

// Container asks for one container by its full id. The error is
// ErrNoSuchContainer, ErrNoEngine, or says what is wrong with the engine.
func (c *DockerClient) Container(ctx context.Context, id string) (Container, error) {
	if !FullID(id) {
		return Container{}, fmt.Errorf("container id %q: %w", text.Clean(id, 80), ErrNoSuchContainer)
	}
	var answer inspected
	if err := c.get(ctx, "/containers/"+id+"/json", &answer); err != nil {
		return Container{}, err
	}
	if answer.ID != id {
		return Container{}, fmt.Errorf("%s on %s: asked for container %s and was told of %q", c.engine, c.socket, id, text.Clean(answer.ID, 80))
	}
	var image imageConfig
	switch err := c.get(ctx, "/images/"+url.PathEscape(answer.Image)+"/json", &image); {
	case err == nil:
		return answer.container(c.engine, &image), nil
	case errors.Is(err, ErrNoSuchContainer): // an image can be deleted while its container runs
		return answer.container(c.engine, nil), nil
	default:
		return Container{}, err
	}
}

// maxListBytes bounds a list of containers, of which only the ids are kept.
const maxListBytes = 64 << 20

// List are the ids of the newest containers that run. It does not start a
// dockerd that systemd keeps a socket for.
func (c *DockerClient) List(ctx context.Context) ([]string, error) {
	if c.engine == "docker" && !dockerDaemonRuns(c.socket) {
		return nil, fmt.Errorf("docker on %s: %w runs", c.socket, ErrNoEngine)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*requestTimeout)
	defer cancel()
	version, err := c.negotiate(ctx)
	if err != nil {
		return nil, err
	}
	filters := url.QueryEscape(`{"status":["running"]}`)
	response, err := c.open(ctx, "/v"+version+"/containers/json?limit="+strconv.Itoa(maxContainers)+"&filters="+filters)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	decoder := json.NewDecoder(io.LimitReader(response.Body, maxListBytes))
	failed := func(err error) ([]string, error) {
		return nil, fmt.Errorf("%s on %s: list of containers: %w", c.engine, c.socket, err)
	}
	if _, err := decoder.Token(); err != nil {
		return failed(err)
	}
	var ids []string
	for decoder.More() && len(ids) < maxContainers {
		var each struct {
			ID string `json:"Id"`
		}
		if err := decoder.Decode(&each); err != nil {
			return failed(err)
		}
		if FullID(each.ID) {
			ids = append(ids, each.ID)
		}
	}
	return ids, nil
}

// get asks for one JSON document below the negotiated version.
func (c *DockerClient) get(ctx context.Context, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	version, err := c.negotiate(ctx)
	if err != nil {
		return err
	}
	return c.getRaw(ctx, "/v"+version+path, into)
}

func (c *DockerClient) getRaw(ctx context.Context, path string, into any) error {
	response, err := c.open(ctx, path)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	data, err := io.ReadAll(io.LimitReader(response.Body, maxAnswerBytes+1))
	if err != nil {
		return fmt.Errorf("%s on %s: GET %s: %w", c.engine, c.socket, path, err)
	}
	if len(data) > maxAnswerBytes {
		return fmt.Errorf("%s on %s: GET %s: the answer is longer than %d bytes", c.engine, c.socket, path, maxAnswerBytes)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("%s on %s: GET %s: %w", c.engine, c.socket, path, err)
	}
	return nil
}

// open sends a GET and returns the response if it is 200. The caller closes
// its body.
func (c *DockerClient) open(ctx context.Context, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker"+path, nil)
	if err != nil {
		return nil, fmt.Errorf("%s on %s: %w", c.engine, c.socket, err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		c.forgetVersion() // the engine may come back as another version
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s on %s: %w (%v)", c.engine, c.socket, ErrNoEngine, err)
		}
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("%s on %s: %w; run as root or in the socket's group", c.engine, c.socket, err)
		}
		return nil, fmt.Errorf("%s on %s: %w", c.engine, c.socket, err)
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	message, _ := io.ReadAll(io.LimitReader(response.Body, 512))
	response.Body.Close()
	if response.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("%s on %s: GET %s: %w", c.engine, c.socket, path, ErrNoSuchContainer)
	}
	if response.StatusCode == http.StatusBadRequest {
		c.forgetVersion()
	}
	return nil, fmt.Errorf("%s on %s: GET %s: %s: %s", c.engine, c.socket, path, response.Status, text.Clean(string(message), 256))
}

// negotiate agrees on an API version: the newest that both know. Engines
// refuse versions older than their MinAPIVersion and newer than their
// ApiVersion, so neither may be fixed here.
func (c *DockerClient) negotiate(ctx context.Context) (string, error) {
	c.mutex.Lock()
	version := c.version
	c.mutex.Unlock()
	if version != "" {
		return version, nil
	}
	var answer struct {
		APIVersion    string `json:"ApiVersion"`
		MinAPIVersion string
	}
	if err := c.getRaw(ctx, "/version", &answer); err != nil {
		return "", err
	}
	version, err := chooseVersion(answer.APIVersion, answer.MinAPIVersion)
	if err != nil {
		return "", fmt.Errorf("%s on %s: GET /version: %w", c.engine, c.socket, err)
	}
	c.mutex.Lock()
	c.version = version
	c.mutex.Unlock()
	return version, nil
}

func (c *DockerClient) forgetVersion() {
	c.mutex.Lock()
	c.version = ""
	c.mutex.Unlock()
}

func chooseVersion(newest, oldest string) (string, error) {
	ours, _ := versionNumber(newestVersion)
	theirs, err := versionNumber(newest)
	if err != nil {
		return "", err
	}
	if theirs <= ours {
		return newest, nil
	}
	if oldest == "" {
		return newestVersion, nil
	}
	minimum, err := versionNumber(oldest)
	if err != nil {
		return "", err
	}
	if minimum > ours {
		return oldest, nil // the few fields read here have not changed in ten years
	}
	return newestVersion, nil
}

func versionNumber(s string) (int, error) {
	major, minor, ok := strings.Cut(s, ".")
	a, errA := strconv.ParseUint(major, 10, 16)
	b, errB := strconv.ParseUint(minor, 10, 16)
	if !ok || errA != nil || errB != nil {
		return 0, fmt.Errorf("API version %q is not of the form 1.44", text.Clean(s, 32))
	}
	return int(a)<<16 | int(b), nil
}

// bounded ends the stream at an event that is too long, so that one without an
// end cannot fill memory.
type bounded struct {
	reader io.Reader
	since  int
}

func (b *bounded) Read(p []byte) (int, error) {
	n, err := b.reader.Read(p)
	for i := n - 1; i >= 0; i-- {
		if p[i] == '\n' {
			b.since = n - 1 - i
			return n, err
		}
	}
	if b.since += n; b.since > maxAnswerBytes {
		return n, errors.New("an event is longer than the bound")
	}
	return n, err
}
