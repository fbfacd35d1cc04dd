package metrics

import (
	"slices"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/snapshot"
)

// nodeWorkloadLabels are those of a workload on the node: what it uses beside
// its devices is there once, whatever their number.
var nodeWorkloadLabels = []string{"user", "kind", "workload"}

// nodeSeries is one label set of what workloads use of the node.
type nodeSeries struct {
	account
	name     workloadName
	labels   []*dto.LabelPair
	known    [countersLength]bool
	resident gpu.Optional[uint64]
}

// foldNode turns what workloads use of the node into series, sorted by name.
// It follows fold, which has decided about the names: a workload that is on no
// device in this pass is not shown.
func (f *folder) foldNode(resources []snapshot.Resources) []*nodeSeries {
	for i := range resources {
		r := &resources[i]
		name := workloadName{cleanLabel(r.Key.User), cleanLabel(r.Key.Kind), cleanLabel(r.Key.Name)}
		_, folded := f.folded[name]
		if _, shown := f.shown[name]; !shown && !folded {
			continue
		}
		if folded {
			name.workload = Overflow
		}
		s := f.onNode[name]
		if s == nil {
			s = &nodeSeries{name: name, labels: labelPairs(nodeWorkloadLabels, name.user, name.kind, name.workload)}
			s.members, s.born = map[memberKey]*member{}, f.pass
			f.onNode[name] = s
		}
		if s.pass != f.pass {
			s.resident = gpu.Optional[uint64]{}
		}
		totals := counters{cpuUS: r.CPUUS.Value, readBytes: r.ReadBytes.Value, writtenBytes: r.WrittenBytes.Value}
		s.take(memberOf(&r.Key), totals, r.FirstSeen, f.pass, f.previous)
		s.known[cpuUS] = s.known[cpuUS] || r.CPUUS.Known
		s.known[readBytes] = s.known[readBytes] || r.ReadBytes.Known
		s.known[writtenBytes] = s.known[writtenBytes] || r.WrittenBytes.Known
		if bytes, known := r.ResidentBytes.Get(); known {
			s.resident = gpu.Some(s.resident.Value + bytes)
		}
	}
	var current []*nodeSeries
	for name, s := range f.onNode {
		switch {
		case s.pass == f.pass:
			s.settle()
			current = append(current, s)
		case name.workload == Overflow:
			clear(s.members) // its totals are kept: its next member adds to them
		default:
			delete(f.onNode, name)
		}
	}
	slices.SortFunc(current, func(a, b *nodeSeries) int { return a.name.compare(b.name) })
	return current
}

// nodeWorkloadFamily is a family of what workloads use of the node.
func nodeWorkloadFamily(name string, kind Type, unit Unit, help, source string, read func(s *nodeSeries) (float64, bool)) Family {
	return Family{
		Name: "gpu_workload_" + name, Type: kind, Unit: unit, Labels: nodeWorkloadLabels, Help: help, Source: source, Group: GroupNodeWorkload,
		read: func(v *view, emit emitFunc) {
			for _, s := range v.onNode {
				value, known := read(s)
				if !known {
					continue
				}
				var created *timestamppb.Timestamp
				if kind == Counter {
					created = s.created
				}
				emit(s.labels, value, created)
			}
		},
	}
}

var nodeWorkloadFamilies = []Family{
	nodeWorkloadFamily("cpu_seconds_total", Counter, Seconds,
		"CPU time of the workload while it held a GPU", "its cgroup, or /proc/PID/stat",
		func(s *nodeSeries) (float64, bool) { return flooredSeconds(s.totals[cpuUS]), s.known[cpuUS] }),
	nodeWorkloadFamily("resident_memory_bytes", Gauge, Bytes,
		"Memory of the workload on the node that no file is behind: its own and shared, without the page cache; summed over processes, memory that they share counts for each", "its cgroup's memory.stat, or /proc/PID/status",
		func(s *nodeSeries) (float64, bool) { return float64(s.resident.Value), s.resident.Known }),
	nodeWorkloadFamily("read_bytes_total", Counter, Bytes,
		"What storage read for the workload while it held a GPU; what the page cache had is not in it", "its cgroup, or /proc/PID/io",
		func(s *nodeSeries) (float64, bool) { return float64(s.totals[readBytes]), s.known[readBytes] }),
	nodeWorkloadFamily("written_bytes_total", Counter, Bytes,
		"What the workload had storage write while it held a GPU", "its cgroup, or /proc/PID/io",
		func(s *nodeSeries) (float64, bool) { return float64(s.totals[writtenBytes]), s.known[writtenBytes] }),
}
