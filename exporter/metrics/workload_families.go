package metrics

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/snapshot"
)

// Label names of workloads, by the kind of device they are on.
var (
	workloadLabels     = with(cardLabels, "user", "kind", "workload")
	migWorkloadLabels  = with(migLabels, "user", "kind", "workload")
	workloadInfoLabels = []string{
		"user", "kind", "workload", "project", "class", "container_id", "container_name",
		"image", "pod_namespace", "pod_name", "slurm_job",
	}
)

// workloadFamily is a family that exists once for whole cards and once for MIG
// instances.
type workloadFamily struct {
	suffix string
	kind   Type
	unit   Unit
	help   string
	source string
	read   func(v *view, s *series) (float64, bool)
}

// workloadFamilies makes the families of workloads on one kind of device.
func workloadFamilies(prefix string, group Group, labels []string, pick func(*view) []*series) []Family {
	var made []Family
	for _, f := range perWorkload {
		made = append(made, Family{
			Name: prefix + f.suffix, Type: f.kind, Unit: f.unit, Labels: labels,
			Help: f.help, Source: f.source, Group: group,
			read: func(v *view, emit emitFunc) {
				for _, s := range pick(v) {
					value, ok := f.read(v, s)
					if !ok {
						continue
					}
					var created *timestamppb.Timestamp
					if f.kind == Counter {
						created = s.created
					}
					emit(s.labels, value, created)
				}
			},
		})
	}
	return made
}

// seconds reads one of a workload's times, absent as long as nothing is known
// of it.
func seconds(position int, known func(s *series) bool) func(*view, *series) (float64, bool) {
	return func(_ *view, s *series) (float64, bool) {
		return flooredSeconds(s.totals[position]), known == nil || known(s)
	}
}

func activityKnown(s *series) bool { return s.totals[activeKnownUS] > 0 }

var perWorkload = []workloadFamily{
	{
		"processes", Gauge, Count,
		"Processes of the workload on the device", "NVML's process lists and /proc",
		func(_ *view, s *series) (float64, bool) { return float64(s.processes), true },
	},
	{
		"zombie_processes", Gauge, Count,
		"Processes of the workload on the device that have ended without being waited for", "/proc/PID/stat",
		func(_ *view, s *series) (float64, bool) { return float64(s.zombies), true },
	},
	{
		"memory_used_bytes", Gauge, Bytes,
		"Device memory of the workload's processes", "NVML's process lists",
		func(_ *view, s *series) (float64, bool) { return s.memoryBytes.get() },
	},
	{
		"utilization_ratio", Gauge, Ratio,
		"The workload's own SM activity in the last interval", "nvmlDeviceGetProcessUtilization",
		func(_ *view, s *series) (float64, bool) {
			percent, ok := s.activityPercent.get()
			return min(percent, 100) / 100, ok
		},
	},
	{
		"power_watts", Gauge, Watts,
		"The workload's part of the device's power in the last interval", "the card's energy, split by SM activity",
		func(_ *view, s *series) (float64, bool) {
			mw, ok := s.powerMW.get()
			return mw / 1000, ok
		},
	},
	{
		"temperature_celsius", Gauge, Celsius,
		"Core temperature of the card the workload is on", "nvmlDeviceGetTemperature",
		func(_ *view, s *series) (float64, bool) { return float64(s.temperatureC.Value), s.temperatureC.Known },
	},
	{
		"held_since_timestamp_seconds", Gauge, UnixSeconds,
		"Since when the workload has held the device; absent while it holds nothing", "the meter",
		func(_ *view, s *series) (float64, bool) { return unixSeconds(s.heldSince), !s.heldSince.IsZero() },
	},
	{
		"last_active_timestamp_seconds", Gauge, UnixSeconds,
		"When the workload was last seen to run a kernel; absent if never", "nvmlDeviceGetProcessUtilization",
		func(_ *view, s *series) (float64, bool) { return unixSeconds(s.lastActive), !s.lastActive.IsZero() },
	},
	{
		"assigned", Gauge, Flag,
		"Whether the workload was started with the device and has no context on it yet", "the container runtime",
		func(_ *view, s *series) (float64, bool) { return oneIf(s.assigned), true },
	},
	{
		"share_seconds_total", Counter, Seconds,
		"Device time of the workload, shared equally with the other users that held the device; adds up to the device's time", "the meter",
		seconds(shareUS, nil),
	},
	{
		"held_seconds_total", Counter, Seconds,
		"Time for which the workload's user held the device, divided among the user's own workloads only; adds up within a user", "the meter",
		seconds(heldUS, nil),
	},
	{
		"reserved_seconds_total", Counter, Seconds,
		"The part of the held time in which a scheduler had given the device exclusively", "the scheduler",
		seconds(reservedUS, nil),
	},
	{
		"active_seconds_total", Counter, Seconds,
		"Time multiplied by the workload's own SM activity; absent while that was never known", "nvmlDeviceGetProcessUtilization",
		seconds(activeUS, activityKnown),
	},
	{
		"idle_seconds_total", Counter, Seconds,
		"The part of the share in which the workload's own SM activity was known to be zero; absent while it was never known", "nvmlDeviceGetProcessUtilization",
		seconds(idleUS, activityKnown),
	},
	{
		"memory_byte_seconds_total", Counter, ByteSeconds,
		"Device memory of the workload multiplied by time; absent while it was never known", "NVML's process lists",
		func(_ *view, s *series) (float64, bool) {
			return float64(s.totals[memoryKiBSeconds]) * 1024, s.totals[memoryKnownUS] > 0
		},
	},
	{
		"energy_joules_total", Counter, Joules,
		"The workload's part of the card's energy; absent where the card's can't be had", "the card's energy, split by SM activity",
		func(v *view, s *series) (float64, bool) {
			return thousandths(s.totals[energyMJ]), s.totals[energyMJ] > 0 || v.measured[s.card]
		},
	},
}

var workloadInfoFamilies = []Family{{
	Name: "gpu_workload_info", Unit: Info, Group: GroupWorkload, Labels: workloadInfoLabels,
	Help:   "What is known of a workload besides its name; one series a workload, the newest, whatever the number of its devices",
	Source: "cgroups, container runtimes, schedulers, site rules",
	read: func(v *view, emit emitFunc) {
		for _, i := range v.infos {
			var w snapshot.Workload
			if i.workload != nil {
				w = *i.workload
			}
			emit(labelPairs(workloadInfoLabels, i.name.user, i.name.kind, i.name.workload, w.Key.Project, w.Key.Class,
				w.Detail.ContainerID, w.Detail.ContainerName, w.Detail.Image,
				w.Detail.PodNamespace, w.Detail.PodName, w.Detail.SlurmJob), 1, nil)
		}
	},
}}
