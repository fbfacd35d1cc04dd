package runtimes

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/procfs"
	"gpuledger/exporter/procfs/text"
)

// Where root's Podman keeps its containers unless told otherwise.
const (
	DefaultPodmanRunRoot   = "/run/containers/storage"
	DefaultPodmanGraphRoot = "/var/lib/containers/storage"
)

const (
	maxStorageDrivers = 32
	maxStorageBytes   = 32 << 20
	nvidiaMajor       = 195 // of /dev/nvidiaN, since ever
)

// PodmanFiles reads what Podman keeps of its containers on disk. It has no
// daemon: this is there whether or not its service runs. Labels of containers
// are in its database, which is not read.
type PodmanFiles struct {
	runRoot, graphRoot string
	proc               *procfs.FS
}

// NewPodmanFiles reads below Podman's two storage directories. graphRoot is
// empty for a person's own Podman: it is in their home, which may be on a
// server that hangs. Then only the names are known.
func NewPodmanFiles(runRoot, graphRoot string, proc *procfs.FS) *PodmanFiles {
	return &PodmanFiles{runRoot: runRoot, graphRoot: graphRoot, proc: proc}
}

// Engine is podman.
func (p *PodmanFiles) Engine() string { return "podman" }

// Socket is where the files are.
func (p *PodmanFiles) Socket() string { return p.runRoot }

// Follow has nothing to follow.
func (p *PodmanFiles) Follow(context.Context, func(), func(string)) error { return ErrNoEngine }

// List finds the containers that run, Podman's and those of other users of the
// same storage.
func (p *PodmanFiles) List(context.Context) ([]string, error) {
	drivers, err := p.drivers()
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, driver := range drivers {
		names, err := namesIn(filepath.Join(p.runRoot, driver), maxContainers)
		if err != nil {
			return nil, fmt.Errorf("podman's containers: %w", err)
		}
		for _, name := range names {
			if !FullID(name) || len(ids) >= maxContainers {
				continue
			}
			if _, err := readWithin(p.userdata(p.runRoot, driver, name), "pidfile", 64); err == nil {
				ids = append(ids, name)
			}
		}
	}
	return ids, nil
}

// drivers are the directories of containers, one for each storage driver that
// was ever used: overlay-containers, vfs-containers.
func (p *PodmanFiles) drivers() ([]string, error) {
	names, err := namesIn(p.runRoot, maxStorageDrivers)
	if err != nil {
		return nil, fmt.Errorf("podman's containers: %w", err)
	}
	var drivers []string
	for _, name := range names {
		if strings.HasSuffix(name, "-containers") {
			drivers = append(drivers, name)
		}
	}
	if len(drivers) == 0 {
		return nil, fmt.Errorf("%w below %s", ErrNoEngine, p.runRoot)
	}
	return drivers, nil
}

func (p *PodmanFiles) userdata(root, driver, id string) string {
	return filepath.Join(root, driver, id, "userdata")
}

// Container reads what there is of a container. It is ErrNoSuchContainer for
// one that is another program's, such as CRI-O's.
func (p *PodmanFiles) Container(_ context.Context, id string) (Container, error) {
	if !FullID(id) {
		return Container{}, fmt.Errorf("container id %q: %w", text.Clean(id, 80), ErrNoSuchContainer)
	}
	drivers, err := p.drivers()
	if err != nil {
		return Container{}, err
	}
	for _, driver := range drivers {
		container, err := p.read(driver, id)
		if !errors.Is(err, fs.ErrNotExist) {
			return container, err
		}
	}
	return Container{}, fmt.Errorf("container %s on disk: %w", id, ErrNoSuchContainer)
}

func (p *PodmanFiles) read(driver, id string) (Container, error) {
	run := p.userdata(p.runRoot, driver, id)
	pid, err := readPID(run, "pidfile")
	if err != nil {
		return Container{}, err
	}
	monitor := monitored{}
	if conmon, err := readPID(run, "conmon.pid"); err == nil {
		monitor = p.monitor(conmon, id)
	}
	container := Container{ID: id, Runtime: "podman", Name: monitor.name, PID: pid}
	if p.graphRoot == "" {
		if container.Name == "" {
			return Container{}, fmt.Errorf("container %s on disk: its conmon can't be seen: %w", id, fs.ErrNotExist)
		}
		return container, nil
	}
	dir := p.userdata(p.graphRoot, driver, id)
	data, err := readWithin(dir, "config.json", maxFileBytes)
	if err != nil {
		return Container{}, err
	}
	var bundle ociBundle
	if err := json.Unmarshal(data, &bundle); err != nil {
		return Container{}, fmt.Errorf("read %s/config.json: %w", dir, err)
	}
	if bundle.Annotations["io.container.manager"] != "libpod" {
		return Container{}, fmt.Errorf("container %s on disk is not podman's: %w", id, ErrNoSuchContainer)
	}
	stored := p.stored(driver, id)
	container.Name = cmp.Or(container.Name, text.Clean(stored.name, maxNameBytes))
	container.Image = text.Clean(stored.image, maxNameBytes)
	container.StartedAt, _ = time.Parse(time.RFC3339Nano, bundle.Annotations["io.kubernetes.cri-o.Created"])
	image := p.image(driver, stored.imageID)
	var inherited []string
	if image != nil {
		container.ImageKnown, container.ImageUser = true, text.Clean(image.Config.User, maxNameBytes)
		container.ImageLabels, inherited = CleanLabels(image.Config.Labels), image.Config.Env
	}
	for _, mount := range bundle.Mounts {
		if mount.Type == "bind" && !strings.HasPrefix(mount.Source, p.runRoot+"/") && !strings.HasPrefix(mount.Source, p.graphRoot+"/") &&
			len(mount.Source) <= maxPathBytes && len(container.Binds) < maxBinds {
			container.Binds = append(container.Binds, mount.Source)
		}
	}
	// A device can have any name in the container.
	for _, device := range bundle.Linux.Devices {
		if device.Type == "c" && device.Major == nvidiaMajor && device.Minor >= 0 && device.Minor < nvidiaControlMinors {
			container.addDevices([]Device{ByMinor(int(device.Minor))})
		}
	}
	if nvidiaRuntime(monitor.runtime) {
		container.addDevices(visibleDevices(bundle.Process.Env, inherited, image != nil))
	}
	return container, nil
}

// nvidiaControlMinors is from where on the driver's minors are no cards:
// nvidia-modeset and nvidiactl.
const nvidiaControlMinors = 254

// ociBundle is what an OCI runtime is told of a container.
type ociBundle struct {
	Process     struct{ Env []string }
	Mounts      []struct{ Type, Source string }
	Annotations map[string]string
	Linux       struct {
		Devices []struct {
			Type         string
			Major, Minor int64
		}
	}
}

func readPID(dir, name string) (uint32, error) {
	data, err := readWithin(dir, name, 64)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.ParseUint(strings.TrimSpace(string(data)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", filepath.Join(dir, name), err)
	}
	return uint32(pid), nil
}

// monitored is what the process that watches over a container was told of it.
type monitored struct{ name, runtime string }

// monitor reads conmon's arguments; empty if that is not the container's conmon.
func (p *PodmanFiles) monitor(pid uint32, id string) monitored {
	if p.proc == nil {
		return monitored{}
	}
	handle, err := p.proc.Process(pid)
	if err != nil {
		return monitored{}
	}
	defer handle.Close()
	arguments, err := handle.CommandLine()
	if err != nil || len(arguments) == 0 || filepath.Base(arguments[0]) != "conmon" {
		return monitored{}
	}
	found, itself := monitored{}, false
	for i := 1; i+1 < len(arguments); i++ {
		switch arguments[i] {
		case "-c":
			itself = arguments[i+1] == id
		case "-n":
			found.name = text.Clean(arguments[i+1], maxNameBytes)
		case "-r":
			found.runtime = arguments[i+1]
		case "--exit-command": // and its arguments
			i = len(arguments)
		}
	}
	if !itself {
		return monitored{}
	}
	return found
}

type storedContainer struct{ name, image, imageID string }

// stored is what the storage library has of a container.
func (p *PodmanFiles) stored(driver, id string) storedContainer {
	for _, place := range []struct{ dir, name string }{
		{filepath.Join(p.graphRoot, driver), "containers.json"},
		{filepath.Join(p.runRoot, driver), "volatile-containers.json"},
	} {
		data, err := readWithin(place.dir, place.name, maxStorageBytes)
		if err != nil {
			continue
		}
		var all []struct {
			ID       string   `json:"id"`
			Names    []string `json:"names"`
			Image    string   `json:"image"`
			Metadata string   `json:"metadata"`
		}
		if json.Unmarshal(data, &all) != nil {
			continue
		}
		for _, each := range all {
			if each.ID != id {
				continue
			}
			found := storedContainer{imageID: each.Image}
			if len(each.Names) > 0 {
				found.name = each.Names[0]
			}
			var metadata struct {
				ImageName string `json:"image-name"`
			}
			if json.Unmarshal([]byte(each.Metadata), &metadata) == nil {
				found.image = metadata.ImageName
			}
			return found
		}
	}
	return storedContainer{}
}

// image reads an image's configuration; nil if it is not there.
func (p *PodmanFiles) image(driver, id string) *imageConfig {
	if !FullID(id) {
		return nil
	}
	dir := filepath.Join(p.graphRoot, strings.TrimSuffix(driver, "-containers")+"-images", id)
	data, err := readWithin(dir, "="+base64.StdEncoding.EncodeToString([]byte("sha256:"+id)), maxFileBytes)
	if err != nil {
		return nil
	}
	image := new(imageConfig)
	if json.Unmarshal(data, image) != nil {
		return nil
	}
	return image
}
