package runtimes

import (
	"slices"
	"strings"
	"time"

	"gpuledger/exporter/procfs/text"
)

// inspected is what Docker-compatible engines tell of a container, and what
// Docker writes to disk of it.
type inspected struct {
	ID     string `json:"Id"`
	Name   string
	Image  string // id of the image
	Config struct {
		User, Image string
		Labels      map[string]string
		Env         []string
	}
	HostConfig hostConfig
	Mounts     []struct{ Type, Source string }
	State      struct {
		Running   bool
		Pid       uint32
		StartedAt time.Time
	}
}

type hostConfig struct {
	Runtime        string
	DeviceRequests []deviceRequest
	Devices        []struct{ PathOnHost string }
}

// deviceRequest is what --gpus and CDI devices become.
type deviceRequest struct {
	Driver       string
	Count        int // -1 is all
	DeviceIDs    []string
	Capabilities [][]string
}

// imageConfig is what comes with an image.
type imageConfig struct {
	Config struct {
		User   string
		Labels map[string]string
		Env    []string
	}
}

// container puts together what is known; image is nil if that is not.
func (i *inspected) container(engine string, image *imageConfig) Container {
	container := Container{
		ID: i.ID, Runtime: engine,
		Name:   text.Clean(strings.TrimPrefix(i.Name, "/"), maxNameBytes),
		Image:  text.Clean(i.Config.Image, maxNameBytes),
		Labels: CleanLabels(i.Config.Labels), User: text.Clean(i.Config.User, maxNameBytes),
	}
	if i.State.Running {
		container.PID, container.StartedAt = i.State.Pid, i.State.StartedAt
	}
	for _, mount := range i.Mounts {
		if mount.Type == "bind" && len(mount.Source) <= maxPathBytes && len(container.Binds) < maxBinds {
			container.Binds = append(container.Binds, mount.Source)
		}
	}
	inherited := []string(nil)
	if image != nil {
		container.ImageKnown, container.ImageUser = true, text.Clean(image.Config.User, maxNameBytes)
		container.ImageLabels = CleanLabels(image.Config.Labels)
		inherited = image.Config.Env
	}
	for _, request := range i.HostConfig.DeviceRequests {
		container.addDevices(request.devices())
	}
	for _, device := range i.HostConfig.Devices {
		if card, ok := ParseDevice(device.PathOnHost); ok && strings.HasPrefix(device.PathOnHost, nvidiaDevice) {
			container.addDevices([]Device{card})
		}
	}
	if nvidiaRuntime(i.HostConfig.Runtime) {
		container.addDevices(visibleDevices(i.Config.Env, inherited, image != nil))
	}
	return container
}

const (
	nvidiaDevice = "/dev/nvidia"
	// maxDevices is how many GPUs one container can be said to have.
	maxDevices = 128
)

func (c *Container) addDevices(devices []Device) {
	for _, device := range devices {
		if len(c.Devices) < maxDevices && !slices.Contains(c.Devices, device) {
			c.Devices = append(c.Devices, device)
		}
	}
}

func (r deviceRequest) devices() []Device {
	if r.Driver != "" && r.Driver != "nvidia" && r.Driver != "cdi" {
		return nil
	}
	var devices []Device
	for _, id := range r.DeviceIDs {
		if device, ok := ParseDevice(id); ok {
			devices = append(devices, device)
		}
	}
	gpus := r.Driver == "nvidia" || slices.ContainsFunc(r.Capabilities, func(all []string) bool { return slices.Contains(all, "gpu") })
	switch {
	case !gpus:
	case r.Count == -1:
		devices = append(devices, AllDevices())
	case len(r.DeviceIDs) == 0: // --gpus 2 is the first two
		for i := range min(r.Count, maxDevices) {
			devices = append(devices, ByIndex(i))
		}
	}
	return devices
}

// nvidiaRuntime knows NVIDIA's OCI runtimes by the names and paths they are
// registered under: nvidia, nvidia-cdi, /usr/bin/nvidia-container-runtime.
func nvidiaRuntime(runtime string) bool {
	return strings.HasPrefix(runtime[strings.LastIndexByte(runtime, '/')+1:], "nvidia")
}

// visibleDevices are those that NVIDIA's runtime was asked for through the
// environment of a container. What comes with the image was nobody's choice;
// where the image is not known, all may be the image's.
func visibleDevices(environment, inherited []string, imageKnown bool) []Device {
	const variable = "NVIDIA_VISIBLE_DEVICES="
	value := ""
	for _, entry := range environment {
		if list, ok := strings.CutPrefix(entry, variable); ok {
			value = list
		}
	}
	if value == "" || slices.Contains(inherited, variable+value) || !imageKnown && value == "all" {
		return nil
	}
	var devices []Device
	for name := range strings.SplitSeq(value, ",") {
		if device, ok := ParseDevice(strings.TrimSpace(name)); ok {
			devices = append(devices, device)
		}
	}
	return devices
}
