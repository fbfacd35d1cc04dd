package cri

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/runtimes"
)

// crio answers as CRI-O does with its events switched on, which no package of
// Debian's has: by the real protocol, and with no sandbox in the verbose answer.
type crio struct {
	criapi.UnimplementedRuntimeServiceServer
	criapi.UnimplementedImageServiceServer
	events chan string
	id     string // whose status is told, whatever was asked for
	label  string
}

func (c *crio) Version(context.Context, *criapi.VersionRequest) (*criapi.VersionResponse, error) {
	return &criapi.VersionResponse{RuntimeName: "cri-o"}, nil
}

func (c *crio) ContainerStatus(context.Context, *criapi.ContainerStatusRequest) (*criapi.ContainerStatusResponse, error) {
	return &criapi.ContainerStatusResponse{Status: &criapi.ContainerStatus{
		Id: c.id, Metadata: &criapi.ContainerMetadata{Name: "main\n"}, State: criapi.ContainerState_CONTAINER_RUNNING,
		Image: &criapi.ImageSpec{Image: "abc", UserSpecifiedImage: "quay.io/torch:2"}, ImageRef: "quay.io/torch@sha256:1",
		Labels: map[string]string{"x": c.label},
	}, Info: map[string]string{"info": `{"pid":77}`}}, nil
}

func (c *crio) ImageStatus(context.Context, *criapi.ImageStatusRequest) (*criapi.ImageStatusResponse, error) {
	return &criapi.ImageStatusResponse{}, nil // deleted meanwhile
}

func (c *crio) ListContainers(context.Context, *criapi.ListContainersRequest) (*criapi.ListContainersResponse, error) {
	return &criapi.ListContainersResponse{Containers: []*criapi.Container{{Id: c.id, PodSandboxId: "sandbox"}}}, nil
}

func (c *crio) PodSandboxStatus(_ context.Context, request *criapi.PodSandboxStatusRequest) (*criapi.PodSandboxStatusResponse, error) {
	if request.PodSandboxId != "sandbox" {
		return nil, errors.New("no such sandbox")
	}
	return &criapi.PodSandboxStatusResponse{Status: &criapi.PodSandboxStatus{
		Metadata: &criapi.PodSandboxMetadata{Namespace: "web", Name: "infer-0", Uid: "u-1"},
	}}, nil
}

func (c *crio) GetContainerEvents(_ *criapi.GetEventsRequest, stream grpc.ServerStreamingServer[criapi.ContainerEventResponse]) error {
	for {
		select {
		case id := <-c.events:
			if err := stream.Send(&criapi.ContainerEventResponse{ContainerId: id}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func serve(t *testing.T, engine *crio) *Client {
	t.Helper()
	socket := filepath.Join(shortDir(t), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	criapi.RegisterRuntimeServiceServer(server, engine)
	criapi.RegisterImageServiceServer(server, engine)
	go server.Serve(listener) // ends with Stop
	t.Cleanup(server.Stop)
	return NewClient([]string{filepath.Join(filepath.Dir(socket), "none"), socket}, nil)
}

func TestCRIO(t *testing.T) {
	engine := &crio{id: someID, events: make(chan string)}
	client := serve(t, engine)
	c, err := client.Container(t.Context(), someID)
	if err != nil {
		t.Fatal(err)
	}
	if c.Runtime != "crio" || c.Name != "main\uFFFD" || c.Image != "quay.io/torch:2" || c.PID != 77 || c.ImageKnown ||
		c.Pod == nil || c.Pod.Namespace != "web" || c.Pod.Name != "infer-0" {
		t.Errorf("%+v, pod %+v", c, c.Pod)
	}
	opened, changed := make(chan struct{}, 1), make(chan string, 1)
	ctx, cancel := context.WithCancel(t.Context())
	following := make(chan error, 1)
	go func() {
		following <- client.Follow(ctx, func() { opened <- struct{}{} }, func(id string) { changed <- id })
	}()
	select {
	case <-opened:
	case <-time.After(20 * time.Second):
		t.Fatal("the stream is not open within 20 s")
	}
	engine.events <- someID
	if id := <-changed; id != someID {
		t.Errorf("an event of %s", id)
	}
	cancel()
	if err := <-following; err == nil {
		t.Error("a stream that ended has no error")
	}
}

func TestAnswerForAnotherContainerIsRefused(t *testing.T) {
	client := serve(t, &crio{id: strings.Repeat("0", 64)})
	if c, err := client.Container(t.Context(), someID); err == nil || !strings.Contains(err.Error(), "was told of") {
		t.Errorf("took %+v, %v", c, err)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	client := serve(t, &crio{id: someID, label: strings.Repeat("a", maxMessageBytes)})
	if _, err := client.Container(t.Context(), someID); err == nil || !strings.Contains(err.Error(), "larger than max") {
		t.Errorf("error %v", err)
	}
}

// TestEngineWithoutCRI is Docker's containerd: it answers, and knows no CRI.
func TestEngineWithoutCRI(t *testing.T) {
	socket := filepath.Join(shortDir(t), "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	go server.Serve(listener) // ends with Stop
	t.Cleanup(server.Stop)
	client := NewClient([]string{socket}, nil)
	if _, err := client.Container(t.Context(), someID); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("Container: %v", err)
	}
	if _, err := client.Pods(t.Context()); !errors.Is(err, runtimes.ErrNoEngine) {
		t.Errorf("Pods: %v", err)
	}
}
