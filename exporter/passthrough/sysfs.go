package passthrough

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gpuledger/exporter/procfs"
	"gpuledger/exporter/procfs/text"
)

// Classes of PCI devices that are GPUs: with and without a display.
var gpuClasses = []string{"0x0300", "0x0302"}

const (
	nvidiaVendor = "0x10de"
	mostDevices  = 1 << 14 // PCI functions that are looked at
	maxNameBytes = 128
)

// card is a GPU that is bound to a driver which gives it to virtual machines.
type card struct {
	busID    string // domain:bus:device.function, as the kernel prints it
	deviceID string // four hex digits
	// devices are those that whoever uses the card has open: its IOMMU group's,
	// and the card's own where the kernel has one.
	devices []procfs.DeviceNumber
}

// scan finds the passed-through NVIDIA GPUs of a sysfs, by bus id. Those of
// other vendors are not metered, passed through or not.
func scan(sysfs string) ([]card, error) {
	root := filepath.Join(sysfs, "bus/pci/devices")
	directory, err := os.Open(root)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // a machine without PCI
	}
	if err != nil {
		return nil, fmt.Errorf("look for passed-through GPUs: %w", err)
	}
	defer directory.Close()
	names, err := directory.Readdirnames(mostDevices)
	if err != nil && len(names) == 0 {
		return nil, fmt.Errorf("look for passed-through GPUs: %w", err)
	}
	slices.Sort(names)
	var cards []card
	for _, name := range names {
		device := filepath.Join(root, name)
		if word(device, "vendor") != nvidiaVendor || !isGPU(word(device, "class")) || !passesThrough(link(device, "driver")) {
			continue
		}
		cards = append(cards, card{busID: name, deviceID: strings.TrimPrefix(word(device, "device"), "0x"), devices: vfioDevices(sysfs, device)})
	}
	return cards, nil
}

func isGPU(class string) bool {
	return slices.ContainsFunc(gpuClasses, func(gpu string) bool { return strings.HasPrefix(class, gpu) })
}

// passesThrough knows vfio-pci and its variants for certain cards.
func passesThrough(driver string) bool {
	return driver == "vfio-pci" || strings.HasSuffix(driver, "-vfio-pci") || strings.HasSuffix(driver, "_vfio_pci")
}

func vfioDevices(sysfs, device string) []procfs.DeviceNumber {
	var numbers []procfs.DeviceNumber
	add := func(directory string) {
		major, minor, ok := strings.Cut(word(directory, "dev"), ":")
		first, err := strconv.ParseUint(major, 10, 32)
		second, otherErr := strconv.ParseUint(minor, 10, 32)
		if ok && err == nil && otherErr == nil {
			numbers = append(numbers, procfs.DeviceNumber{Major: uint32(first), Minor: uint32(second)})
		}
	}
	if group := link(device, "iommu_group"); group != "" {
		for _, name := range []string{group, "noiommu-" + group} {
			add(filepath.Join(sysfs, "class/vfio", name))
		}
	}
	// Since Linux 6.6 a user of iommufd opens the device itself.
	own, err := filepath.Glob(filepath.Join(device, "vfio-dev", "vfio*"))
	if err == nil {
		for _, directory := range own {
			add(directory)
		}
	}
	return numbers
}

// word is the one word of a file of sysfs; empty if it can't be read.
func word(directory, name string) string {
	file, err := os.Open(filepath.Join(directory, name))
	if err != nil {
		return ""
	}
	defer file.Close()
	buffer := make([]byte, 64)
	n, _ := file.Read(buffer) // what can't be read is empty
	return strings.TrimSpace(string(buffer[:n]))
}

// link is the last part of what a link of sysfs leads to; empty if there is none.
func link(directory, name string) string {
	target, err := os.Readlink(filepath.Join(directory, name))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// PCIIDs are where distributions keep the names of PCI devices.
var PCIIDs = []string{"/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids"}

const unnamed = "NVIDIA GPU (passed through)"

// nameOf is a card's name by its device id, as near to NVML's as the list of
// PCI devices allows: of "GA100 [A100 PCIe 40GB]" what stands in brackets.
func nameOf(deviceID string, files []string) string {
	for _, file := range files {
		if name := nameIn(deviceID, file); name != "" {
			return name
		}
	}
	return unnamed
}

func nameIn(deviceID, path string) string {
	file, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	ours := false
	for lines.Scan() {
		line := lines.Text()
		switch {
		case line == "" || line[0] == '#' || strings.HasPrefix(line, "\t\t"):
		case line[0] != '\t':
			if ours {
				return "" // the next vendor
			}
			ours = strings.HasPrefix(line, strings.TrimPrefix(nvidiaVendor, "0x")+" ")
		case ours && strings.HasPrefix(line[1:], deviceID+" "):
			name := strings.TrimSpace(line[1+len(deviceID):])
			if _, inside, ok := strings.Cut(name, "["); ok {
				name, _, _ = strings.Cut(inside, "]")
			}
			return text.Clean("NVIDIA "+name, maxNameBytes)
		}
	}
	return ""
}
