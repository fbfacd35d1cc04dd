// Package kubelettest serves a kubelet's pod-resources for a test: the real
// protocol on a unix socket, with answers that the test sets. A kubelet itself is
// in no distribution's packages.
package kubelettest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/grpc"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// Kubelet is one server.
type Kubelet struct {
	podresources.UnimplementedPodResourcesListerServer

	// Socket is the path of its unix socket.
	Socket string

	server *grpc.Server
	mutex  sync.Mutex
	pods   []*podresources.PodResources
}

// Start serves until the test ends or Kill.
func Start(t testing.TB) *Kubelet {
	t.Helper()
	folder, err := os.MkdirTemp("", "kubelettest") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	k := &Kubelet{Socket: filepath.Join(folder, "kubelet.sock")}
	t.Cleanup(func() { k.Kill(); os.RemoveAll(folder) })
	k.Up(t)
	return k
}

// Up serves again after Kill.
func (k *Kubelet) Up(t testing.TB) {
	t.Helper()
	listener, err := net.Listen("unix", k.Socket)
	if err != nil {
		t.Fatal(err)
	}
	k.server = grpc.NewServer()
	podresources.RegisterPodResourcesListerServer(k.server, k)
	go k.server.Serve(listener) // ends with Kill
}

// Kill ends the server, as a kubelet's death does.
func (k *Kubelet) Kill() { k.server.Stop() }

// Give sets what containers have: one entry a container, with its device ids.
func (k *Kubelet) Give(pods ...*podresources.PodResources) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.pods = pods
}

// Pod is a pod with one container that was given devices of one resource.
func Pod(namespace, name, container, resource string, deviceIDs ...string) *podresources.PodResources {
	return &podresources.PodResources{Namespace: namespace, Name: name, Containers: []*podresources.ContainerResources{{
		Name: container, Devices: []*podresources.ContainerDevices{{ResourceName: resource, DeviceIds: deviceIDs}},
	}}}
}

// List answers as a kubelet does.
func (k *Kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}
