// Package cri asks container engines that speak Kubernetes' Container Runtime
// Interface (containerd, CRI-O) about the containers of pods.
//
// It stands apart from package runtimes for gRPC's sake: programs that do
// without it start sooner and are smaller.
package cri

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
)

// DefaultSockets are where containerd, CRI-O and k3s listen unless told
// otherwise.
func DefaultSockets() []string {
	return []string{"/run/containerd/containerd.sock", "/run/crio/crio.sock", "/run/k3s/containerd/containerd.sock"}
}

const (
	// callTimeout is for one call: while it waits, names are missing and nothing
	// else.
	callTimeout = 2 * time.Second
	// maxMessageBytes bounds an answer; a node's 500 containers take some 1 MB.
	maxMessageBytes = 16 << 20
	maxNameBytes    = 256
)

// Client is a runtimes.Source over the CRI sockets of a node. A socket that is
// not there is passed over.
type Client struct {
	endpoints []*endpoint
	disk      *runtimes.Bundles
	// relistEvery is how often containers are listed where an engine sends no
	// events.
	relistEvery time.Duration
}

// endpoint is one engine.
type endpoint struct {
	socket  string
	runtime criapi.RuntimeServiceClient
	images  criapi.ImageServiceClient
	// failure is why there is no client: only a socket name that is no address.
	failure error

	mutex sync.Mutex
	kind  string // of workload; empty before the engine has said what it is
}

// NewClient returns a client for the engines on sockets. What no engine tells
// is read from disk, which may be nil. It does nothing until asked.
func NewClient(sockets []string, disk *runtimes.Bundles) *Client {
	c := &Client{disk: disk, relistEvery: 10 * time.Second}
	for _, socket := range sockets {
		e := &endpoint{socket: socket}
		connection, err := Dial(socket)
		if e.failure = err; err == nil {
			e.runtime, e.images = criapi.NewRuntimeServiceClient(connection), criapi.NewImageServiceClient(connection)
		}
		c.endpoints = append(c.endpoints, e)
	}
	return c
}

// Dial returns a connection to a gRPC service of this node. It connects at the
// first call, and again whenever the connection was lost.
func Dial(socket string) (*grpc.ClientConn, error) {
	connection, err := grpc.NewClient("passthrough:///localhost",
		grpc.WithTransportCredentials(insecure.NewCredentials()), // the socket's permissions guard it
		grpc.WithNoProxy(), grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}),
		grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: 5 * callTimeout, // a call that waits says so first
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 3 * time.Second},
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes)),
	)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return connection, nil
}

// Engine is cri.
func (c *Client) Engine() string { return "cri" }

// Socket is the path of the first engine's socket.
func (c *Client) Socket() string {
	if len(c.endpoints) == 0 {
		return ""
	}
	return c.endpoints[0].socket
}

// Container asks the engines in turn, and the disk if none of them can tell.
func (c *Client) Container(ctx context.Context, id string) (runtimes.Container, error) {
	failure := error(nil)
	for _, e := range c.endpoints {
		container, err := e.container(ctx, id)
		if err == nil {
			return container, nil
		}
		failure = worse(failure, err)
	}
	if failure == nil {
		failure = fmt.Errorf("cri: no socket is configured: %w", runtimes.ErrNoEngine)
	}
	if c.disk == nil {
		return runtimes.Container{}, failure
	}
	container, err := c.disk.Container(ctx, id)
	if err != nil {
		return runtimes.Container{}, failure
	}
	return container, failure
}

// worse is the error that matters more: trouble before an engine that does not
// know, and that before no engine.
func worse(a, b error) error {
	rank := func(err error) int {
		switch {
		case err == nil:
			return 0
		case errors.Is(err, runtimes.ErrNoEngine):
			return 1
		case errors.Is(err, runtimes.ErrNoSuchContainer):
			return 2
		}
		return 3
	}
	if rank(b) > rank(a) {
		return b
	}
	return a
}

// there reports whether the engine's socket exists: gRPC would go on trying.
func (e *endpoint) there() error {
	if e.failure != nil {
		return e.failure
	}
	if _, err := os.Stat(e.socket); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("cri on %s: %w", e.socket, runtimes.ErrNoEngine)
	} else if err != nil {
		return fmt.Errorf("cri on %s: %w", e.socket, err)
	}
	return nil
}

// call makes one bounded call.
func call[Request, Answer any](ctx context.Context, e *endpoint, what string, method func(context.Context, Request, ...grpc.CallOption) (Answer, error), request Request) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := method(ctx, request)
	if err != nil {
		return answer, e.trouble(what, err)
	}
	return answer, nil
}

// trouble says what an engine's error means here.
func (e *endpoint) trouble(what string, err error) error {
	message := text.Clean(status.Convert(err).Message(), 256)
	switch status.Code(err) {
	case codes.NotFound:
		return fmt.Errorf("cri on %s: %s: %w", e.socket, what, runtimes.ErrNoSuchContainer)
	case codes.Unimplemented:
		// Docker's containerd has its CRI switched off.
		return fmt.Errorf("cri on %s: %s: the engine does not speak CRI: %w", e.socket, what, runtimes.ErrNoEngine)
	case codes.DeadlineExceeded:
		return fmt.Errorf("cri on %s: %s: no answer within %v", e.socket, what, callTimeout)
	}
	e.mutex.Lock()
	e.kind = "" // another engine may come back
	e.mutex.Unlock()
	return fmt.Errorf("cri on %s: %s: %s; check that the engine runs and that root asks", e.socket, what, message)
}

// workloadKind is what the engine's containers are, by the name it has for
// itself.
func (e *endpoint) workloadKind(ctx context.Context) (string, error) {
	e.mutex.Lock()
	kind := e.kind
	e.mutex.Unlock()
	if kind != "" {
		return kind, nil
	}
	version, err := call(ctx, e, "Version", e.runtime.Version, &criapi.VersionRequest{})
	if err != nil {
		return "", err
	}
	switch name := version.GetRuntimeName(); name {
	case "cri-o":
		kind = "crio"
	case "containerd", "docker":
		kind = name
	default:
		kind = "container"
	}
	e.mutex.Lock()
	e.kind = kind
	e.mutex.Unlock()
	return kind, nil
}
