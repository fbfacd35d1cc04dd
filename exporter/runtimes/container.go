// Package runtimes asks the container engines of a node for the names, labels
// and images behind container ids.
//
// An engine is never in the way of a sample: what is known is answered from
// memory, and what is not is looked up by the package's own goroutines. An
// engine that hangs costs names and nothing else.
package runtimes

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"gpuledger/exporter/procfs/text"
)

var (
	// ErrNoSuchContainer says that the engine does not know the id.
	ErrNoSuchContainer = errors.New("no such container")
	// ErrNoEngine says that no engine is installed: there is no socket.
	ErrNoEngine = errors.New("no container engine")
)

// Container is what an engine knows of one container.
type Container struct {
	ID string
	// Runtime is the kind of workload that the engine's containers are: docker,
	// podman, containerd or crio. What the cgroup says of it may be less exact.
	Runtime string
	Name    string // without Docker's leading slash; in a pod the container's name there
	Image   string // as the user named it
	Labels  map[string]string
	// ImageLabels are those that come with the image: a label that is the same
	// there says nothing of who started the container.
	ImageLabels map[string]string
	// User is the user that the container was started as: the one given, or the
	// image's.
	User string
	// ImageUser is the image's own user. Known only if ImageKnown: an image
	// can be deleted while its container runs.
	ImageUser  string
	ImageKnown bool
	// Binds are the host's paths that are mounted into the container.
	Binds []string
	// Devices are the GPUs that the container was given; nil if none.
	Devices []Device
	// PID is the container's first process, 0 if it does not run or the engine
	// does not say.
	PID       uint32
	StartedAt time.Time
	// Pod is the Kubernetes pod that the container is in; nil if none.
	Pod *Pod
}

// Pod is what is known of a Kubernetes pod.
type Pod struct {
	Namespace, Name, UID string
	Labels, Annotations  map[string]string
	// PriorityClass and ServiceAccount are empty where the source does not tell.
	PriorityClass, ServiceAccount string
}

// Source is one engine that can be asked for its containers. Directory calls
// it from goroutines of its own; every call has to end within seconds.
type Source interface {
	// Engine is what the engine is called in metrics and messages: docker,
	// podman, cri.
	Engine() string
	// Socket is the path that the engine is asked at.
	Socket() string
	// Container asks for one container by its full id. The error is
	// ErrNoSuchContainer, ErrNoEngine, or says what is wrong with the engine. A
	// container with an ID beside an error is what could be told without the
	// engine: it stands until the engine answers.
	Container(ctx context.Context, id string) (Container, error)
	// Follow reports the ids of containers that start, end or change, until ctx
	// or the stream ends. It calls opened once nothing can be missed any more.
	Follow(ctx context.Context, opened func(), changed func(id string)) error
}

// maxLabels is how many labels are kept of a container, a pod or an image.
const maxLabels = 256

// maxLabelsBytes is how long they may be together.
const maxLabelsBytes = 64 << 10

// FullID reports whether s is a whole container id: 64 hexadecimal digits.
func FullID(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return len(s) == 64
}

// CleanLabels bounds labels, which come from whoever made the container, in
// number and length, and takes control characters out of them.
func CleanLabels(labels map[string]string) map[string]string {
	cleaned := make(map[string]string, min(len(labels), maxLabels))
	left := maxLabelsBytes
	for _, key := range slices.Sorted(maps.Keys(labels))[:min(len(labels), maxLabels)] {
		cleanKey, value := text.Clean(key, maxNameBytes), text.Clean(labels[key], maxLabelBytes)
		if left -= len(cleanKey) + len(value); left < 0 {
			break
		}
		cleaned[cleanKey] = value
	}
	return cleaned
}
