package cri

import (
	"context"
	"errors"
	"fmt"
	"time"

	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
)

// Pods lists what the engines have of pods, by namespace/name: two bounded calls
// an engine. The error is ErrNoEngine if there is none; with any other what the
// other engines told is returned beside it.
func (c *Client) Pods(ctx context.Context) (map[string]runtimes.PodState, error) {
	pods := map[string]runtimes.PodState{}
	failure := error(nil)
	answered := false
	for _, e := range c.endpoints {
		err := e.pods(ctx, pods)
		answered = answered || err == nil
		failure = worse(failure, err)
	}
	if failure == nil && !answered {
		failure = fmt.Errorf("cri: no socket is configured: %w", runtimes.ErrNoEngine)
	}
	if answered && errors.Is(failure, runtimes.ErrNoEngine) {
		failure = nil
	}
	return pods, failure
}

func (e *endpoint) pods(ctx context.Context, pods map[string]runtimes.PodState) error {
	if err := e.there(); err != nil {
		return err
	}
	sandboxes, err := call(ctx, e, "ListPodSandbox", e.runtime.ListPodSandbox, &criapi.ListPodSandboxRequest{})
	if err != nil {
		return err
	}
	containers, err := call(ctx, e, "ListContainers", e.runtime.ListContainers, &criapi.ListContainersRequest{})
	if err != nil {
		return err
	}
	// A pod whose sandbox was made anew has two for a while: the newest counts,
	// one that is ready before any that is not.
	current := map[string]*criapi.PodSandbox{} // by namespace/name
	for _, sandbox := range sandboxes.GetItems() {
		pod := podOf(sandbox.GetMetadata(), nil, nil)
		key := pod.Namespace + "/" + pod.Name
		if before := current[key]; before == nil || newer(sandbox, before) {
			current[key] = sandbox
			pods[key] = runtimes.PodState{
				Pod: *pod, Ended: sandbox.GetState() != criapi.PodSandboxState_SANDBOX_READY,
				Since: time.Unix(0, sandbox.GetCreatedAt()), Containers: map[string]string{},
			}
		}
	}
	byID := make(map[string]string, len(current))
	for key, sandbox := range current {
		byID[sandbox.GetId()] = key
	}
	newest := map[string]int64{}
	for _, container := range containers.GetContainers() {
		key, known := byID[container.GetPodSandboxId()]
		if !known || !runtimes.FullID(container.GetId()) {
			continue
		}
		pod := pods[key]
		if container.GetState() == criapi.ContainerState_CONTAINER_RUNNING {
			pod.Ended = false
			pods[key] = pod
		}
		name := text.Clean(container.GetMetadata().GetName(), maxNameBytes)
		if at := container.GetCreatedAt(); at >= newest[key+"/"+name] {
			newest[key+"/"+name] = at
			pod.Containers[name] = container.GetId()
		}
	}
	return nil
}

func newer(a, b *criapi.PodSandbox) bool {
	ready := criapi.PodSandboxState_SANDBOX_READY
	if (a.GetState() == ready) != (b.GetState() == ready) {
		return a.GetState() == ready
	}
	return a.GetCreatedAt() > b.GetCreatedAt()
}
