package runtimes

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"

	"gpuledger/exporter/procfs/text"
)

// DefaultDockerData is where dockerd keeps its containers unless told otherwise.
const DefaultDockerData = "/var/lib/docker"

const (
	maxFileBytes = 4 << 20
	maxRemapped  = 64
)

// DockerFiles reads what dockerd keeps of its containers on disk, where the
// files of a running container are always whole. They are root's.
type DockerFiles struct {
	roots []string
}

// NewDockerFiles reads below the data roots of Docker engines.
func NewDockerFiles(roots ...string) *DockerFiles { return &DockerFiles{roots: roots} }

// Container reads one container's files.
func (d *DockerFiles) Container(_ context.Context, id string) (Container, error) {
	if !FullID(id) {
		return Container{}, fmt.Errorf("container id %q: %w", text.Clean(id, 80), ErrNoSuchContainer)
	}
	for _, configured := range d.roots {
		for _, root := range remapped(configured) {
			container, err := readDocker(root, id)
			if !errors.Is(err, fs.ErrNotExist) {
				return container, err
			}
		}
	}
	return Container{}, fmt.Errorf("container %s on disk: %w", id, ErrNoSuchContainer)
}

// List are the ids of all containers, those that have ended too.
func (d *DockerFiles) List() []string {
	var ids []string
	for _, configured := range d.roots {
		for _, root := range remapped(configured) {
			names, err := namesIn(filepath.Join(root, "containers"), maxContainers)
			if err != nil {
				continue // what can't be listed can't be read either
			}
			for _, name := range names {
				if FullID(name) && len(ids) < maxContainers {
					ids = append(ids, name)
				}
			}
		}
	}
	return ids
}

// dockerLister lists by the engine, and by its files while it can't be asked.
// It asks the engine for nothing then: that would start one that sleeps.
type dockerLister struct {
	*DockerClient
	files *DockerFiles
	down  atomic.Bool
}

// NewDockerLister lists the containers of the engine on client.
func NewDockerLister(client *DockerClient, files *DockerFiles) Lister {
	return &dockerLister{DockerClient: client, files: files}
}

func (l *dockerLister) List(ctx context.Context) ([]string, error) {
	ids, err := l.DockerClient.List(ctx)
	l.down.Store(err != nil)
	if err != nil {
		ids = l.files.List()
	}
	return ids, err
}

func (l *dockerLister) Container(ctx context.Context, id string) (Container, error) {
	if l.down.Load() {
		return l.files.Container(ctx, id)
	}
	return l.DockerClient.Container(ctx, id)
}

// remapped is a data root and those below it of engines that remap users,
// which are called after the first uid and gid: 165536.165536.
func remapped(root string) []string {
	roots := []string{root}
	names, err := namesIn(root, maxRemapped)
	if err != nil {
		return roots
	}
	for _, name := range names {
		if strings.Trim(name, "0123456789.") == "" && strings.Count(name, ".") == 1 {
			roots = append(roots, filepath.Join(root, name))
		}
	}
	return roots
}

func readDocker(root, id string) (Container, error) {
	dir := filepath.Join(root, "containers", id)
	data, err := readWithin(dir, "config.v2.json", maxFileBytes)
	if err != nil {
		return Container{}, err
	}
	var file struct {
		inspected
		ID          string
		Driver      string // of the storage
		MountPoints map[string]struct{ Type, Source string }
	}
	if err := json.Unmarshal(data, &file); err != nil {
		return Container{}, fmt.Errorf("read %s/config.v2.json: %w", dir, err)
	}
	if file.ID != id {
		return Container{}, fmt.Errorf("read %s/config.v2.json: it is of container %q", dir, text.Clean(file.ID, 80))
	}
	file.inspected.ID = id
	for _, mount := range file.MountPoints {
		file.Mounts = append(file.Mounts, struct{ Type, Source string }{mount.Type, mount.Source})
	}
	if data, err = readWithin(dir, "hostconfig.json", maxFileBytes); err == nil {
		err = json.Unmarshal(data, &file.HostConfig)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Container{}, fmt.Errorf("read %s/hostconfig.json: %w", dir, err)
	}
	return file.container("docker", dockerImage(root, file.Driver, file.Image)), nil
}

// dockerImage reads an image's configuration; nil if it is not there, as with
// images that containerd keeps.
func dockerImage(root, driver, id string) *imageConfig {
	digest, ok := strings.CutPrefix(id, "sha256:")
	if !ok || !FullID(digest) || driver == "" || driver != filepath.Base(driver) || driver[0] == '.' {
		return nil
	}
	data, err := readWithin(filepath.Join(root, "image", driver, "imagedb", "content", "sha256"), digest, maxFileBytes)
	if err != nil {
		return nil
	}
	image := new(imageConfig)
	if json.Unmarshal(data, image) != nil {
		return nil
	}
	return image
}

// dockerDaemonRuns says whether dockerd runs that systemd would start for
// whoever connects to its socket.
func dockerDaemonRuns(socket string) bool {
	switch filepath.Clean(socket) {
	case "/run/docker.sock", "/var/run/docker.sock":
		_, err := os.Stat("/run/docker.pid")
		return err == nil
	}
	return true
}
