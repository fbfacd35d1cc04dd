package endtoend

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"gpuledger/exporter/who"
	"gpuledger/lab"
)

// vfioSysFS is a sysfs with one GPU that is bound to vfio-pci.
func vfioSysFS(t *testing.T, busID string, major, minor uint32) string {
	t.Helper()
	root := t.TempDir()
	device := filepath.Join(root, "bus/pci/devices", busID)
	group := filepath.Join(root, "class/vfio/77")
	err := errors.Join(os.MkdirAll(device, 0o755), os.MkdirAll(group, 0o755),
		os.Symlink("../../../bus/pci/drivers/vfio-pci", filepath.Join(device, "driver")),
		os.Symlink("../../../kernel/iommu_groups/77", filepath.Join(device, "iommu_group")),
		os.WriteFile(filepath.Join(group, "dev"), fmt.Appendf(nil, "%d:%d\n", major, minor), 0o644))
	for name, content := range map[string]string{"vendor": "0x10de\n", "class": "0x030200\n", "device": "0xfffe\n"} {
		err = errors.Join(err, os.WriteFile(filepath.Join(device, name), []byte(content), 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// TestCardPassedThrough wants the time of a GPU that NVML does not know to go
// to who has it, and to be idle when nobody does.
func TestCardPassedThrough(t *testing.T) {
	const major, minor = 241, 911
	machine := holdDevice(t, takenUID, major, minor)
	n := newNode(t, "gpu-vm", lab.Scenario{GPUs: one(t)})
	n.flags = []string{"--path.sysfs=" + vfioSysFS(t, "0000:81:00.0", major, minor)}
	n.start()
	var answer who.Answer
	var card who.Card
	await(t, "the holder of the card", func() bool {
		answer, _ = n.gwho()
		if len(answer.Cards) != 2 {
			return false
		}
		card = answer.Cards[1]
		return len(card.Devices) == 1 && len(card.Devices[0].Holders) == 1 && !card.Devices[0].Holders[0].Pending
	})
	holder := card.Devices[0].Holders[0]
	if card.UUID != "PCI-0000:81:00.0" || !card.PassedThrough || card.State != who.CardUp || card.MemoryUsedBytes != nil || card.UtilizationPercent != nil ||
		holder.User != fmt.Sprintf("uid:%d", takenUID) || holder.PID == nil || *holder.PID != machine.pid || !holder.Holds || holder.ActivityPercent != nil {
		t.Errorf("card %+v, holder %+v", card, holder)
	}
	if got := n.metric(fmt.Sprintf("gpu_up{gpu=\"1\",uuid=%q}", card.UUID)); got != "1" {
		t.Errorf("gpu_up is %q", got)
	}
	seconds := func(family, labels string) float64 {
		value, err := strconv.ParseFloat(n.metric(fmt.Sprintf("%s{gpu=\"1\",%suuid=%q}", family, labels, card.UUID)), 64)
		if err != nil {
			return 0 // not there yet
		}
		return value
	}
	await(t, "some seconds held", func() bool { return seconds("gpu_metered_seconds_total", "") > 3 })
	machine.end()
	await(t, "the card's being idle", func() bool {
		answer, _ = n.gwho()
		return len(answer.Cards[1].Devices[0].Holders) == 0
	})
	if answer.Cards[1].Devices[0].Free {
		t.Error("a card for virtual machines is called free")
	}
	await(t, "idle time", func() bool {
		return seconds("gpu_state_seconds_total", "state=\"idle\",") > 0.5
	})
	n.exporter.stop(t)
	var heldUS, idleUS int64
	for _, row := range n.rows() {
		if row.Card != card.UUID {
			continue
		}
		switch {
		case row.User == holder.User:
			heldUS += row.GPUUS
		case row.State == "idle":
			idleUS += row.GPUUS
		default:
			t.Errorf("row %+v", row)
		}
		if row.ActiveKnownUS != 0 || row.EnergyMJ != 0 {
			t.Errorf("activity or energy of a card that says nothing: %+v", row)
		}
	}
	if heldUS < 2_000_000 || idleUS == 0 {
		t.Errorf("held %d µs, idle %d µs", heldUS, idleUS)
	}
}
