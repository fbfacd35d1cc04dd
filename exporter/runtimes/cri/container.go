package cri

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
)

// container asks one engine for one container.
func (e *endpoint) container(ctx context.Context, id string) (runtimes.Container, error) {
	if !runtimes.FullID(id) {
		return runtimes.Container{}, fmt.Errorf("container id %q: %w", text.Clean(id, 80), runtimes.ErrNoSuchContainer)
	}
	if err := e.there(); err != nil {
		return runtimes.Container{}, err
	}
	kind, err := e.workloadKind(ctx)
	if err != nil {
		return runtimes.Container{}, err
	}
	answer, err := call(ctx, e, "ContainerStatus", e.runtime.ContainerStatus, &criapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return runtimes.Container{}, err
	}
	status := answer.GetStatus()
	if status.GetId() != id {
		return runtimes.Container{}, fmt.Errorf("cri on %s: asked for container %s and was told of %q", e.socket, id, text.Clean(status.GetId(), 80))
	}
	more := readInfo(answer.GetInfo()["info"])
	container := runtimes.Container{
		ID: id, Runtime: kind,
		Name:   text.Clean(status.GetMetadata().GetName(), maxNameBytes),
		Image:  text.Clean(firstOf(status.GetImage().GetUserSpecifiedImage(), status.GetImage().GetImage(), status.GetImageRef()), maxNameBytes),
		Labels: runtimes.CleanLabels(status.GetLabels()),
	}
	if status.GetState() == criapi.ContainerState_CONTAINER_RUNNING {
		container.PID = more.PID
	}
	if started := status.GetStartedAt(); started > 0 {
		container.StartedAt = time.Unix(0, started)
	}
	for _, mount := range status.GetMounts() {
		if len(container.Binds) < maxBinds {
			container.Binds = append(container.Binds, text.Clean(mount.GetHostPath(), maxPathBytes))
		}
	}
	if err := e.image(ctx, status, &container); err != nil {
		return runtimes.Container{}, err
	}
	container.User = container.ImageUser
	if given := more.user(); given != "" {
		container.User = given
	}
	container.Pod, err = e.pod(ctx, id, more.SandboxID)
	return container, err
}

const (
	maxBinds     = 64
	maxPathBytes = 4096
)

// image tells what user comes with the image. A container's labels in CRI are
// those it was given: none come with the image.
func (e *endpoint) image(ctx context.Context, status *criapi.ContainerStatus, container *runtimes.Container) error {
	ref := firstOf(status.GetImageId(), status.GetImageRef(), status.GetImage().GetImage())
	answer, err := call(ctx, e, "ImageStatus", e.images.ImageStatus, &criapi.ImageStatusRequest{Image: &criapi.ImageSpec{Image: ref}})
	if errors.Is(err, runtimes.ErrNoSuchContainer) || err == nil && answer.GetImage() == nil {
		return nil // deleted while its container runs
	}
	if err != nil {
		return err
	}
	container.ImageKnown = true
	container.ImageUser = text.Clean(answer.GetImage().GetUsername(), maxNameBytes)
	if uid := answer.GetImage().GetUid(); uid != nil {
		container.ImageUser = strconv.FormatInt(uid.GetValue(), 10)
	}
	return nil
}

// pod tells of the pod that a container is in.
func (e *endpoint) pod(ctx context.Context, id, sandbox string) (*runtimes.Pod, error) {
	if sandbox == "" { // not every engine's verbose answer has it
		list, err := call(ctx, e, "ListContainers", e.runtime.ListContainers, &criapi.ListContainersRequest{Filter: &criapi.ContainerFilter{Id: id}})
		if err != nil {
			return nil, err
		}
		for _, container := range list.GetContainers() {
			if container.GetId() == id {
				sandbox = container.GetPodSandboxId()
			}
		}
	}
	answer, err := call(ctx, e, "PodSandboxStatus", e.runtime.PodSandboxStatus, &criapi.PodSandboxStatusRequest{PodSandboxId: sandbox})
	if err != nil {
		return nil, err
	}
	return podOf(answer.GetStatus().GetMetadata(), answer.GetStatus().GetLabels(), answer.GetStatus().GetAnnotations()), nil
}

func podOf(metadata *criapi.PodSandboxMetadata, labels, annotations map[string]string) *runtimes.Pod {
	return &runtimes.Pod{
		Namespace: text.Clean(metadata.GetNamespace(), maxNameBytes), Name: text.Clean(metadata.GetName(), maxNameBytes),
		UID: text.Clean(metadata.GetUid(), maxNameBytes), Labels: runtimes.CleanLabels(labels), Annotations: runtimes.CleanLabels(annotations),
	}
}

// info is what engines tell beyond CRI's own fields, which is theirs to choose:
// what cannot be read of it is as if it were not there.
type info struct {
	SandboxID string `json:"sandboxID"`
	PID       uint32 `json:"pid"`
	Config    struct {
		Linux struct {
			SecurityContext struct {
				RunAsUser     *struct{ Value int64 } `json:"run_as_user"`
				RunAsUsername string                 `json:"run_as_username"`
			} `json:"security_context"`
		} `json:"linux"`
	} `json:"config"`
}

func readInfo(document string) info {
	var read info
	if json.Unmarshal([]byte(document), &read) != nil {
		return info{}
	}
	if !runtimes.FullID(read.SandboxID) {
		read.SandboxID = ""
	}
	return read
}

// user is the user that the container was given; empty if none was, or the
// engine does not tell.
func (i info) user() string {
	context := i.Config.Linux.SecurityContext
	if context.RunAsUser != nil {
		return strconv.FormatInt(context.RunAsUser.Value, 10)
	}
	return text.Clean(context.RunAsUsername, maxNameBytes)
}

func firstOf(candidates ...string) string {
	for _, candidate := range candidates {
		if candidate != "" {
			return candidate
		}
	}
	return ""
}
