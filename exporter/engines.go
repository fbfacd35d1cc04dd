package exporter

import (
	"strings"

	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

// engines are Docker and Podman to ask for names, and what they know of GPUs
// that containers were given.
func (o Options) engines(proc *procfs.FS) (directories []*runtimes.Directory, granters []runtimes.Granter) {
	settings := o.Config.Runtimes
	runs := func(pid uint32, id string) bool { return inContainer(proc, pid, id) }
	assign := func(lister runtimes.Lister) {
		granters = append(granters, runtimes.NewAssigned(lister, runs, o.Logger))
	}
	for _, socket := range settings.Docker {
		client := runtimes.NewDockerClient(socket)
		var source runtimes.Source = client
		if len(settings.DockerData) > 0 && !personalSocket(socket) {
			source = runtimes.WithFiles(client, runtimes.NewDockerFiles(settings.DockerData...))
		}
		directories = append(directories, runtimes.NewDirectory(source, o.Logger))
		if !personalSocket(socket) {
			assign(runtimes.NewDockerLister(client, runtimes.NewDockerFiles(settings.DockerData...)))
		}
	}
	files := settings.PodmanRunRoot != "" && settings.PodmanGraphRoot != ""
	podman := runtimes.NewPodmanFiles(settings.PodmanRunRoot, settings.PodmanGraphRoot, proc)
	for _, socket := range settings.Podman {
		var source runtimes.Source = runtimes.NewPodmanClient(socket)
		if files && !personalSocket(socket) {
			source = runtimes.WithFiles(source, podman)
		}
		directories = append(directories, runtimes.NewDirectory(source, o.Logger))
	}
	if len(settings.Podman) > 0 && files {
		assign(podman)
	}
	return directories, granters
}

// personalSocket says that a socket is of an engine that a person runs.
func personalSocket(socket string) bool {
	return strings.HasPrefix(socket, "/run/user/") || strings.HasPrefix(socket, "/var/run/user/")
}

// inContainer says that a process is in the container with that id.
func inContainer(proc *procfs.FS, pid uint32, id string) bool {
	if pid == 0 {
		return false
	}
	process, err := proc.Process(pid)
	if err != nil {
		return false
	}
	defer process.Close()
	text, err := process.Cgroup()
	return err == nil && strings.Contains(text, id)
}
