package containerdtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"
	"time"

	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Pod is one running pod.
type Pod struct {
	Namespace, Name, UID string
	SandboxID            string

	engine *Engine
	config *criapi.PodSandboxConfig
}

// Container is one running container of a pod.
type Container struct {
	ID  string // 64 hex digits
	PID uint32 // of its first process, on the host
}

// RunPod makes a pod's sandbox as a kubelet does, with the host's network and a
// cgroup of the kubelet's shape.
func (e *Engine) RunPod(t testing.TB, namespace, name string, labels map[string]string) *Pod {
	t.Helper()
	var random [16]byte
	_, _ = rand.Read(random[:]) // it never fails
	hexed := hex.EncodeToString(random[:])
	uid := fmt.Sprintf("%s-%s-%s-%s-%s", hexed[:8], hexed[8:12], hexed[12:16], hexed[16:20], hexed[20:])
	logs, err := os.MkdirTemp(e.folder, "logs")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{"io.kubernetes.pod.namespace": namespace, "io.kubernetes.pod.name": name, "io.kubernetes.pod.uid": uid}
	for key, value := range labels {
		all[key] = value
	}
	pod := &Pod{Namespace: namespace, Name: name, UID: uid, engine: e, config: &criapi.PodSandboxConfig{
		Metadata:     &criapi.PodSandboxMetadata{Namespace: namespace, Name: name, Uid: uid},
		LogDirectory: logs, Labels: all, Annotations: map[string]string{"example.com/note": "kept"},
		Linux: &criapi.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/burstable/pod" + uid,
			SecurityContext: &criapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &criapi.NamespaceOption{Network: criapi.NamespaceMode_NODE, Pid: criapi.NamespaceMode_CONTAINER},
			},
		},
	}}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	answer, err := e.runtime.RunPodSandbox(ctx, &criapi.RunPodSandboxRequest{Config: pod.config})
	if err != nil {
		t.Fatalf("RunPodSandbox %s/%s: %v\n%s", namespace, name, err, e.output.String())
	}
	pod.SandboxID = answer.GetPodSandboxId()
	return pod
}

// Run starts a container that sleeps in the pod, under a uid, or under the
// image's if that is negative.
func (p *Pod) Run(t testing.TB, name string, uid int64) Container {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	security := &criapi.LinuxContainerSecurityContext{
		NamespaceOptions: &criapi.NamespaceOption{Network: criapi.NamespaceMode_NODE, Pid: criapi.NamespaceMode_CONTAINER},
	}
	if uid >= 0 {
		security.RunAsUser = &criapi.Int64Value{Value: uid}
	}
	created, err := p.engine.runtime.CreateContainer(ctx, &criapi.CreateContainerRequest{
		PodSandboxId: p.SandboxID, SandboxConfig: p.config,
		Config: &criapi.ContainerConfig{
			Metadata: &criapi.ContainerMetadata{Name: name}, Image: &criapi.ImageSpec{Image: Image},
			Command: []string{"/bin/sleep", "1000000"}, LogPath: name + ".log",
			Labels: map[string]string{
				"io.kubernetes.container.name": name, "io.kubernetes.pod.name": p.Name,
				"io.kubernetes.pod.namespace": p.Namespace, "io.kubernetes.pod.uid": p.UID,
			},
			Linux: &criapi.LinuxContainerConfig{SecurityContext: security},
		},
	})
	if err != nil {
		t.Fatalf("CreateContainer %s: %v", name, err)
	}
	id := created.GetContainerId()
	if _, err := p.engine.runtime.StartContainer(ctx, &criapi.StartContainerRequest{ContainerId: id}); err != nil {
		t.Fatalf("StartContainer %s: %v", name, err)
	}
	answer, err := p.engine.runtime.ContainerStatus(ctx, &criapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		t.Fatalf("ContainerStatus %s: %v", name, err)
	}
	var info struct{ PID uint32 }
	if err := json.Unmarshal([]byte(answer.GetInfo()["info"]), &info); err != nil || info.PID == 0 {
		t.Fatalf("container %s has no PID: %v, %s", name, err, answer.GetInfo()["info"])
	}
	return Container{ID: id, PID: info.PID}
}

// Stop ends the pod's processes, as the end of a job does: the pod stays known.
func (p *Pod) Stop(t testing.TB) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := p.engine.runtime.StopPodSandbox(ctx, &criapi.StopPodSandboxRequest{PodSandboxId: p.SandboxID}); err != nil {
		t.Fatalf("StopPodSandbox: %v", err)
	}
}

// StopContainer ends one container of the pod.
func (p *Pod) StopContainer(t testing.TB, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := p.engine.runtime.StopContainer(ctx, &criapi.StopContainerRequest{ContainerId: id}); err != nil {
		t.Fatalf("StopContainer: %v", err)
	}
}
