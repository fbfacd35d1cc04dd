package cri

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	criapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"gpuledger/exporter/runtimes"
)

// Follow reports the containers of all engines that start, end or change. It
// ends when any of the streams does.
func (c *Client) Follow(ctx context.Context, opened func(), changed func(id string)) error {
	group, ctx := errgroup.WithContext(ctx)
	there := 0
	for _, e := range c.endpoints {
		if e.there() == nil {
			there++
			group.Go(func() error { return e.follow(ctx, c.relistEvery, opened, changed) })
		}
	}
	if there == 0 {
		return fmt.Errorf("cri: %w", runtimes.ErrNoEngine)
	}
	return group.Wait()
}

// follow reads an engine's events. Where it has none (containerd before 1.7,
// CRI-O unless told to) its containers are listed every now and then.
func (e *endpoint) follow(ctx context.Context, every time.Duration, opened func(), changed func(id string)) error {
	err := e.events(ctx, opened, changed)
	if status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("cri on %s: events: %w", e.socket, err)
	}
	return e.relist(ctx, every, opened, changed)
}

// eventsSilence is how long a stream may take to say that it will never be one:
// gRPC tells of that only when something is read.
const eventsSilence = time.Second

func (e *endpoint) events(ctx context.Context, opened func(), changed func(id string)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := e.runtime.GetContainerEvents(ctx, &criapi.GetEventsRequest{})
	if err != nil {
		return err
	}
	ended := atomic.Bool{}
	// An engine sends nothing, not even a header, before the first event.
	timer := time.AfterFunc(eventsSilence, func() {
		if !ended.Load() {
			opened()
		}
	})
	defer timer.Stop()
	for {
		event, err := stream.Recv()
		if err != nil {
			ended.Store(true)
			return err
		}
		changed(event.GetContainerId())
	}
}

// relist compares the engine's list with the one before.
func (e *endpoint) relist(ctx context.Context, every time.Duration, opened func(), changed func(id string)) error {
	var before map[string]criapi.ContainerState
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		answer, err := call(ctx, e, "ListContainers", e.runtime.ListContainers, &criapi.ListContainersRequest{})
		if err != nil {
			return err
		}
		now := make(map[string]criapi.ContainerState, len(answer.GetContainers()))
		for _, container := range answer.GetContainers() {
			now[container.GetId()] = container.GetState()
		}
		if before == nil {
			opened()
		} else {
			for id, state := range now {
				if old, known := before[id]; !known || old != state {
					changed(id)
				}
			}
			for id := range before {
				if _, there := now[id]; !there {
					changed(id)
				}
			}
		}
		before = now
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}
