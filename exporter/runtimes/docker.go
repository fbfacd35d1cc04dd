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

	"gpuledger/exporter/procfs/text"
)

// DefaultDockerSocket is where dockerd listens unless told otherwise.
const DefaultDockerSocket = "/var/run/docker.sock"

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
	socket string
	http   *http.Client

	mutex   sync.Mutex
	version string // negotiated; empty before and after trouble
}

// NewDockerClient returns a client for the engine on socket. It does nothing
// until asked.
func NewDockerClient(socket string) *DockerClient {
	if socket == "" {
		socket = DefaultDockerSocket
	}
	dialer := net.Dialer{Timeout: requestTimeout}
	return &DockerClient{socket: socket, http: &http.Client{
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return dialer.DialContext(ctx, "unix", socket)
			},
			MaxIdleConns: 4, MaxConnsPerHost: 8, IdleConnTimeout: time.Minute, ResponseHeaderTimeout: requestTimeout,
			DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Engine is docker.
func (c *DockerClient) Engine() string { return "docker" }

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
			return fmt.Errorf("docker on %s: events: %w", c.socket, err)
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
	var answer struct {
		ID     string `json:"Id"`
		Name   string
		Image  string // id of the image
		Config struct {
			User   string
			Image  string
			Labels map[string]string
		}
		HostConfig struct {
			DeviceRequests []struct {
				Driver    string
				Count     int
				DeviceIDs []string
			}
			Devices []struct{ PathOnHost string }
		}
		Mounts []struct{ Type, Source string }
		State  struct{ StartedAt time.Time }
	}
	if err := c.get(ctx, "/containers/"+id+"/json", &answer); err != nil {
		return Container{}, err
	}
	if answer.ID != id {
		return Container{}, fmt.Errorf("docker on %s: asked for container %s and was told of %q", c.socket, id, text.Clean(answer.ID, 80))
	}
	container := Container{
		ID: id, Runtime: c.Engine(),
		Name:   text.Clean(strings.TrimPrefix(answer.Name, "/"), maxNameBytes),
		Image:  text.Clean(answer.Config.Image, maxNameBytes),
		Labels: CleanLabels(answer.Config.Labels), User: text.Clean(answer.Config.User, maxNameBytes),
		StartedAt: answer.State.StartedAt,
	}
	for _, mount := range answer.Mounts {
		if mount.Type == "bind" && len(mount.Source) <= maxPathBytes && len(container.Binds) < maxBinds {
			container.Binds = append(container.Binds, mount.Source)
		}
	}
	for _, request := range answer.HostConfig.DeviceRequests {
		if request.Count == -1 {
			container.Devices = append(container.Devices, AllDevices())
		}
		for _, id := range request.DeviceIDs {
			if device, ok := ParseDevice(id); ok {
				container.Devices = append(container.Devices, device)
			}
		}
	}
	for _, device := range answer.HostConfig.Devices {
		if strings.HasPrefix(device.PathOnHost, "/dev/nvidia") {
			if card, ok := ParseDevice(device.PathOnHost); ok {
				container.Devices = append(container.Devices, card)
			}
		}
	}
	var image struct {
		Config struct {
			User   string
			Labels map[string]string
		}
	}
	switch err := c.get(ctx, "/images/"+url.PathEscape(answer.Image)+"/json", &image); {
	case err == nil:
		container.ImageKnown, container.ImageUser = true, text.Clean(image.Config.User, maxNameBytes)
		container.ImageLabels = CleanLabels(image.Config.Labels)
	case !errors.Is(err, ErrNoSuchContainer):
		return Container{}, err
	}
	return container, nil
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
		return fmt.Errorf("docker on %s: GET %s: %w", c.socket, path, err)
	}
	if len(data) > maxAnswerBytes {
		return fmt.Errorf("docker on %s: GET %s: the answer is longer than %d bytes", c.socket, path, maxAnswerBytes)
	}
	if err := json.Unmarshal(data, into); err != nil {
		return fmt.Errorf("docker on %s: GET %s: %w", c.socket, path, err)
	}
	return nil
}

// open sends a GET and returns the response if it is 200. The caller closes
// its body.
func (c *DockerClient) open(ctx context.Context, path string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker"+path, nil)
	if err != nil {
		return nil, fmt.Errorf("docker on %s: %w", c.socket, err)
	}
	response, err := c.http.Do(request)
	if err != nil {
		c.forgetVersion() // the engine may come back as another version
		if errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("docker on %s: %w (%v)", c.socket, ErrNoEngine, err)
		}
		if errors.Is(err, os.ErrPermission) {
			return nil, fmt.Errorf("docker on %s: %w; run as root or in the socket's group", c.socket, err)
		}
		return nil, fmt.Errorf("docker on %s: %w", c.socket, err)
	}
	if response.StatusCode == http.StatusOK {
		return response, nil
	}
	message, _ := io.ReadAll(io.LimitReader(response.Body, 512))
	response.Body.Close()
	if response.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("docker on %s: GET %s: %w", c.socket, path, ErrNoSuchContainer)
	}
	if response.StatusCode == http.StatusBadRequest {
		c.forgetVersion()
	}
	return nil, fmt.Errorf("docker on %s: GET %s: %s: %s", c.socket, path, response.Status, text.Clean(string(message), 256))
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
		return "", fmt.Errorf("docker on %s: GET /version: %w", c.socket, err)
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
