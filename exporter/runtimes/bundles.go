package runtimes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/procfs/text"
)

// Bundles tells of containers from what engines keep on disk while they run:
// the OCI bundles of containerd and CRI-O, and the names of pods' log files.
// Everything there is root's. The roots may be set before the first use.
type Bundles struct {
	// ContainerdStates are containerd's state directories.
	ContainerdStates []string
	// CRIOContainers is where CRI-O keeps its containers' files.
	CRIOContainers string
	// PodLogs holds one directory a pod, ContainerLogs one link a container.
	PodLogs, ContainerLogs string
}

// Where engines keep files unless told otherwise.
const (
	defaultCRIOContainers = "/run/containers/storage/overlay-containers"
	defaultPodLogs        = "/var/log/pods"
	defaultContainerLogs  = "/var/log/containers"
)

const (
	maxBundleBytes = 4 << 20
	maxNamespaces  = 64
	maxLogNames    = 16384
	// dockerNamespace is containerd's for Docker: its bundles have no names.
	dockerNamespace = "moby"
)

// NewBundles reads below the directories that engines use whose sockets are
// these: containerd keeps its state beside its socket.
func NewBundles(sockets []string) *Bundles {
	b := &Bundles{CRIOContainers: defaultCRIOContainers, PodLogs: defaultPodLogs, ContainerLogs: defaultContainerLogs}
	for _, socket := range sockets {
		b.ContainerdStates = append(b.ContainerdStates, filepath.Dir(socket))
	}
	return b
}

// Engine is cri: the containers are those that a CRI engine would tell of.
func (b *Bundles) Engine() string { return "cri" }

// Socket is where the bundles are: there is no socket.
func (b *Bundles) Socket() string {
	if len(b.ContainerdStates) == 0 {
		return b.CRIOContainers
	}
	return b.ContainerdStates[0]
}

// Follow has nothing to follow.
func (b *Bundles) Follow(context.Context, func(), func(string)) error { return ErrNoEngine }

// Container reads what the disk has of a container. What it cannot tell, the
// pod's labels among it, is empty. The error is ErrNoSuchContainer, or says what
// could not be read.
func (b *Bundles) Container(_ context.Context, id string) (Container, error) {
	if !FullID(id) {
		return Container{}, fmt.Errorf("container id %q: %w", text.Clean(id, 80), ErrNoSuchContainer)
	}
	failure := error(nil)
	for _, read := range []func(string) (Container, error){b.containerd, b.crio, b.logged} {
		container, err := read(id)
		if err == nil {
			return container, nil
		}
		// What is not ours to read will not be in a moment either.
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
			failure = cmp.Or(failure, err)
		}
	}
	if failure != nil {
		return Container{}, fmt.Errorf("look for container %s on disk: %w", id, failure)
	}
	return Container{}, fmt.Errorf("container %s on disk: %w", id, ErrNoSuchContainer)
}

// containerd reads containerd's bundles, of all its namespaces but Docker's.
func (b *Bundles) containerd(id string) (Container, error) {
	for _, state := range b.ContainerdStates {
		tasks := filepath.Join(state, "io.containerd.runtime.v2.task")
		names, err := names(tasks, maxNamespaces)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return Container{}, err
		}
		for _, namespace := range names {
			if namespace == dockerNamespace {
				continue
			}
			annotations, err := bundle(filepath.Join(tasks, namespace, id, "config.json"))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return Container{}, err
			}
			return containerdContainer(id, annotations)
		}
	}
	return Container{}, fs.ErrNotExist
}

func containerdContainer(id string, annotations map[string]string) (Container, error) {
	const cri = "io.kubernetes.cri."
	container := Container{ID: id, Runtime: "containerd"}
	switch annotations[cri+"container-type"] {
	case "sandbox":
		return Container{}, fs.ErrNotExist
	case "container":
		container.Name, container.Image = annotations[cri+"container-name"], annotations[cri+"image-name"]
		container.Pod = &Pod{
			Namespace: annotations[cri+"sandbox-namespace"], Name: annotations[cri+"sandbox-name"], UID: annotations[cri+"sandbox-uid"],
		}
		if container.Pod.Name == "" || container.Pod.Namespace == "" { // containerd before 1.5
			return Container{}, fs.ErrNotExist
		}
	default:
		// nerdctl gives its containers' labels to the bundle; ctr gives nothing.
		container.Name = annotations["nerdctl/name"]
	}
	return container, nil
}

// crio reads CRI-O's bundles. Podman keeps its own in the same place.
func (b *Bundles) crio(id string) (Container, error) {
	annotations, err := bundle(filepath.Join(b.CRIOContainers, id, "userdata", "config.json"))
	if err != nil {
		return Container{}, err
	}
	const crio = "io.kubernetes.cri-o."
	if annotations[crio+"ContainerType"] != "container" {
		return Container{}, fs.ErrNotExist
	}
	var labels map[string]string
	if json.Unmarshal([]byte(annotations[crio+"Labels"]), &labels) != nil {
		labels = nil // as if there were none
	}
	labels = CleanLabels(labels)
	pod := Pod{Namespace: labels["io.kubernetes.pod.namespace"], Name: labels["io.kubernetes.pod.name"], UID: labels["io.kubernetes.pod.uid"]}
	if pod.Name == "" || pod.Namespace == "" {
		return Container{}, fs.ErrNotExist
	}
	return Container{
		ID: id, Runtime: "crio", Name: labels["io.kubernetes.container.name"], Pod: &pod, Labels: labels,
		Image: cmp.Or(annotations[crio+"UserRequestedImage"], annotations[crio+"ImageName"]),
	}, nil
}

// logged finds a container's log, whose name is the pod's and its own.
func (b *Bundles) logged(id string) (Container, error) {
	all, err := names(b.ContainerLogs, maxLogNames)
	if err != nil {
		return Container{}, err
	}
	for _, file := range all {
		name, ours := strings.CutSuffix(file, "-"+id+".log")
		parts := strings.Split(name, "_") // no name in Kubernetes has one of its own
		if !ours || len(parts) != 3 {
			continue
		}
		pod := Pod{Name: parts[0], Namespace: parts[1]}
		if target, err := os.Readlink(filepath.Join(b.ContainerLogs, file)); err == nil {
			if logged, ok := podOfLogs(filepath.Base(filepath.Dir(filepath.Dir(target)))); ok && logged.Name == pod.Name && logged.Namespace == pod.Namespace {
				pod.UID = logged.UID
			}
		}
		// Which engine it is no log tells; in a pod it does not matter.
		return Container{ID: id, Runtime: "containerd", Name: parts[2], Pod: &pod}, nil
	}
	return Container{}, fs.ErrNotExist
}

// Pod finds the pod with a uid by the directory of its logs. The error is
// fs.ErrNotExist if it has none.
func (b *Bundles) Pod(uid string) (Pod, error) {
	all, err := names(b.PodLogs, maxLogNames)
	if err != nil {
		return Pod{}, err
	}
	for _, directory := range all {
		if pod, ok := podOfLogs(directory); ok && pod.UID == uid {
			return pod, nil
		}
	}
	return Pod{}, fmt.Errorf("logs of pod %s: %w", text.Clean(uid, 64), fs.ErrNotExist)
}

// podOfLogs reads NAMESPACE_NAME_UID.
func podOfLogs(directory string) (Pod, bool) {
	parts := strings.Split(text.Clean(directory, 3*maxNameBytes), "_")
	if len(parts) != 3 || parts[0] == "" || parts[1] == "" || parts[2] == "" {
		return Pod{}, false
	}
	return Pod{Namespace: parts[0], Name: parts[1], UID: parts[2]}, true
}

// names lists a directory, up to a bound.
func names(directory string, most int) ([]string, error) {
	open, err := os.Open(directory)
	if err != nil {
		return nil, err
	}
	defer open.Close()
	all, err := open.Readdirnames(most)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return all, err
}

// bundle reads the annotations of an OCI bundle's config.json.
func bundle(path string) (map[string]string, error) {
	// Neither a link nor a pipe is ever there.
	file, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxBundleBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if len(data) > maxBundleBytes {
		return nil, fmt.Errorf("%s is longer than %d bytes", path, maxBundleBytes)
	}
	var config struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	for key, value := range config.Annotations {
		if !strings.HasSuffix(key, "cri-o.Labels") { // whose parts are cleaned
			config.Annotations[key] = text.Clean(value, maxNameBytes)
		}
	}
	return config.Annotations, nil
}
