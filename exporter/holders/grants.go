package holders

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

// maxGrants bounds what schedulers and engines can make us keep.
const maxGrants = 4096

// Given is a device that a workload was given. Table.Attribute and Table.Info
// know its key as they know those of processes.
type Given struct {
	Device string // UUID of the card or MIG instance
	Key    meter.ProcessKey
	// Exclusive says that it holds the device without a process too.
	Exclusive bool
	Since     time.Time // zero if not known
}

// grants are what was given, as of the newest Refresh.
type grants struct {
	generation uint64
	read       bool
	number     uint64
	// known stand for the workloads that were given something, by who and what.
	known map[string]*granted
}

// granted is one grant. Its process stands for the workload: it is a process
// of it, or one that never was and is only where the grant says.
type granted struct {
	grant   runtimes.Grant
	process *process
	live    bool
}

func newGrants() grants { return grants{known: map[string]*granted{}} }

// refreshGrants takes in what schedulers and engines say now.
func (t *Table) refreshGrants(now time.Time) {
	generation := uint64(0)
	for _, granter := range t.options.Granters {
		generation += granter.Generation()
	}
	if !t.grants.read || generation != t.grants.generation {
		t.grants.read, t.grants.generation = true, generation
		t.readGrants(now)
	}
	for id, g := range t.grants.known {
		if !g.live {
			delete(t.grants.known, id) // intervals that wait may still ask for its process
			continue
		}
		g.process.lastListed = now
		if !g.process.known {
			t.readFirst(g)
		}
	}
}

func (t *Table) readGrants(now time.Time) {
	for _, g := range t.grants.known {
		g.live = false
	}
	for _, granter := range t.options.Granters {
		for _, grant := range granter.Grants() {
			id := grantID(grant)
			g := t.grants.known[id]
			if g == nil {
				if len(t.grants.known) >= maxGrants {
					continue
				}
				t.grants.number++
				g = &granted{process: &process{
					// No process has number 0.
					key: meter.ProcessKey{StartTicks: t.grants.number}, firstSeen: now, startedAt: grant.Since,
					facts: procfs.Process{ExecutableUID: -1, LoginUID: -1},
				}}
				t.grants.known[id] = g
				t.processes[g.process.key] = g.process
			}
			g.grant, g.live = grant, true
			g.process.pod, g.process.podContainer = grant.Pod, grant.Container
			g.process.granted, g.process.known, g.process.resolved = true, false, false
			g.process.chain = cgroup.Chain{Levels: grant.Levels, SystemSlice: grant.UID < 0}
			if grant.UID >= 0 {
				g.process.chain.UID, g.process.chain.HasUID, g.process.chain.Delegated = uint32(grant.UID), true, true
			}
		}
	}
}

// readFirst takes the facts of a process of the workload: its uid and cgroup
// are what those of any other would be.
func (t *Table) readFirst(g *granted) {
	pid := g.grant.PID
	if level, ok := g.process.chain.Container(); ok && pid == 0 {
		container, _ := t.lookup(g.process.chain, level.ID)
		pid = container.PID
	}
	if pid == 0 {
		return
	}
	handle, err := t.options.FS.Process(pid)
	if err != nil {
		return // gone or hidden: what the grant says has to do
	}
	defer handle.Close()
	facts, err := handle.Read()
	if err != nil || facts.Exiting() {
		return
	}
	chain := cgroup.Parse(facts.Cgroup)
	// A number that was given away meanwhile is somebody else's.
	if !sameLevels(chain.Levels, g.grant.Levels) {
		return
	}
	g.process.facts, g.process.chain, g.process.known, g.process.resolved = facts, chain, true, false
}

// sameLevels compares where two processes are. Steps of a job are its own
// business.
func sameLevels(a, b []cgroup.Level) bool {
	return slices.EqualFunc(a, b, func(x, y cgroup.Level) bool { return x.Kind == y.Kind && x.ID == y.ID })
}

// grantID is who was given what.
func grantID(grant runtimes.Grant) string {
	var b strings.Builder
	for _, level := range grant.Levels {
		fmt.Fprintf(&b, "%s %s %q/", level.Kind, level.System, level.ID)
	}
	if grant.Pod != nil {
		fmt.Fprintf(&b, "%q/%q/%q ", grant.Pod.Namespace, grant.Pod.Name, grant.Container)
	}
	fmt.Fprintf(&b, "%d %t %v", grant.UID, grant.Exclusive, grant.Devices)
	return b.String()
}

// Given is what of a card and its instances was given to workloads, as of the
// newest Refresh: ordered by device and key, each device once for a workload.
func (t *Table) Given(reading *gpu.Reading) []Given {
	var all []Given
	for _, g := range t.grants.known {
		devices := map[string]bool{}
		for _, device := range g.grant.Devices {
			for _, uuid := range matching(device, reading) {
				devices[uuid] = true
			}
		}
		for uuid := range devices {
			all = append(all, Given{Device: uuid, Key: g.process.key, Exclusive: g.grant.Exclusive, Since: g.grant.Since})
		}
	}
	slices.SortFunc(all, func(a, b Given) int {
		if a.Device != b.Device {
			return strings.Compare(a.Device, b.Device)
		}
		return int(int64(a.Key.StartTicks) - int64(b.Key.StartTicks))
	})
	return all
}

// matching are the UUIDs of the devices of a card that are meant. On a card
// that is cut into instances all of them are meant where the whole card is.
func matching(device runtimes.Device, reading *gpu.Reading) []string {
	card := reading.Card
	instances := make([]string, len(reading.Instances))
	for i, instance := range reading.Instances {
		instances[i] = instance.UUID
	}
	whole := []string{card.UUID}
	if reading.SlicesTotal > 0 {
		whole = instances
	}
	minor, minorKnown := card.Minor.Get()
	switch {
	case device.All:
		return whole
	case device.UUID != "":
		if strings.HasPrefix(card.UUID, device.UUID) {
			return whole
		}
		for _, uuid := range instances {
			if strings.HasPrefix(uuid, device.UUID) {
				return []string{uuid}
			}
		}
		return nil
	case device.Index >= 0 && device.Index != card.Index, device.Minor >= 0 && (!minorKnown || int64(device.Minor) != minor):
		return nil
	case device.Index < 0 && device.Minor < 0:
		return nil
	case device.Instance < 0:
		return whole
	case device.Instance < len(instances):
		return instances[device.Instance : device.Instance+1]
	}
	return nil
}
