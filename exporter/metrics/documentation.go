package metrics

import (
	"fmt"
	"io"
	"strings"
)

// Example is a query that a group of families is good for.
type Example struct{ Title, Query string }

// groups are the sections of the document.
var groups = []struct {
	group    Group
	text     string
	examples []Example
}{
	{GroupNode, "The node as a whole.", []Example{
		{"Number of cards that NVML counts but that do not work, by node", `gpu_exporter_devices_expected - on (instance, job) sum by (instance, job) (gpu_up) > 0`},
		{"Driver versions in use", `count by (driver_version) (gpu_driver_info)`},
	}},
	{GroupCard, "One series per card, labelled with its index `gpu` and its `uuid`. The index is frozen for a UUID while the exporter runs.", []Example{
		{"Utilization of each card with its product name", `gpu_utilization_ratio * on (instance, uuid) group_left (name) gpu_info`},
		{"Mean power over an hour, from energy", `rate(gpu_energy_joules_total[1h])`},
		{"Cards within 5 °C of slowing down", `gpu_temperature_threshold_celsius{threshold="slowdown"} - on (instance, uuid) group_left () gpu_temperature_celsius{sensor="core"} < 5`},
		{"Memory in use as a ratio", `gpu_memory_used_bytes / gpu_memory_total_bytes`},
	}},
	{GroupHealth, "Whether a card works, and what holds it back.", []Example{
		{"Cards that do not work, with the reason", `gpu_down_reason`},
		{"XIDs of the last ten minutes", `increase(gpu_xid_errors_total[10m]) > 0`},
		{"Part of the time a card was too hot to run at full speed", `rate(gpu_throttle_seconds_total{reason=~"hw_thermal_slowdown|sw_thermal_slowdown"}[5m])`},
	}},
	{GroupMIG, "One series per MIG instance, labelled with its own `uuid`, its card's `parent_uuid` and its `profile`. Instances have families of their own, so that a sum over cards never counts them again.", []Example{
		{"Memory in use by profile", `sum by (profile) (gpu_mig_memory_used_bytes)`},
		{"Slices of a card that instances use", `sum by (instance, parent_uuid) (gpu_mig_slices)`},
	}},
	{GroupWorkload, "One series per workload and card. A counter belongs to the workload, not to its processes: it never falls, whoever exits, and an ended workload stays for an hour (of very many the newest 2,000). " +
		"Two workloads that labels cannot tell apart are summed. Beyond `--metrics.max-workloads` further workloads fold into `workload=\"" + Overflow + "\"` by user and kind; users never fold, and a workload once shown never folds while it is there.", []Example{
		{"GPUs in use by user, each GPU shared among those who hold it", `sum by (user) (rate(gpu_workload_share_seconds_total[5m]))`},
		{"GPU hours of each user in the last day", `sum by (user) (increase(gpu_workload_share_seconds_total[1d])) / 3600`},
		{"The same by project", `sum by (project) (rate(gpu_workload_share_seconds_total[5m]) * on (instance, user, kind, workload) group_left (project) gpu_workload_info)`},
		{"Workloads with processes on a card that were last active over an hour ago", `time() - gpu_workload_last_active_timestamp_seconds > 3600 and gpu_workload_processes > 0`},
		{"Energy of each user in the last day, in kilowatt hours", `sum by (user) (increase(gpu_workload_energy_joules_total[1d])) / 3.6e6`},
	}},
	{GroupMIGWorkload, "The same for workloads on MIG instances. Their seconds are device time of the instance, not of the card.", []Example{
		{"Instances in use by user and profile", `sum by (user, profile) (rate(gpu_mig_workload_share_seconds_total[5m]))`},
		{"Slices in use by user", `sum by (user) (rate(gpu_mig_workload_share_seconds_total[5m]) * on (instance, uuid) group_left () gpu_mig_slices)`},
	}},
	{GroupNodeWorkload, "What workloads that hold a GPU use of the node beside it: they tell a job that waits for its data from one that was left running. One series a workload, whatever the number of its GPUs; names fold as above. " +
		"A container, pod, job or service is measured by its cgroup. A login session, and what a cgroup does not tell (its controller is not in use), is the sum over its processes on GPUs and all their descendants. " +
		"A process or cgroup counts from its start if it began while we looked on, else from when it was first seen; processes that live shorter than the 5 s between two looks may be missed. " +
		"Network file systems are not storage to a cgroup: what is read from them is missing there. Only root may see what other people's processes read and write.", []Example{
		{"Workloads that use neither GPU nor CPU nor storage: left running", `sum by (instance, user, kind, workload) (gpu_workload_utilization_ratio) == 0 and on (instance, user, kind, workload) rate(gpu_workload_cpu_seconds_total[15m]) < 0.02 and on (instance, user, kind, workload) rate(gpu_workload_read_bytes_total[15m]) < 1e5`},
		{"Workloads that keep CPUs or storage busy and their GPUs waiting: the data loader starves them", `avg by (instance, user, kind, workload) (avg_over_time(gpu_workload_utilization_ratio[15m])) < 0.3 and on (instance, user, kind, workload) (rate(gpu_workload_cpu_seconds_total[15m]) > 0.5 or rate(gpu_workload_read_bytes_total[15m]) > 5e7)`},
		{"Memory of the node that each user's GPU jobs take", `sum by (instance, user) (gpu_workload_resident_memory_bytes)`},
	}},
	{GroupLedger, "Every second of a card is held, idle, down or unobserved.", []Example{
		{"Part of the time a card was observed", `rate(gpu_metered_seconds_total[5m])`},
		{"Part of the time nobody held a card", `rate(gpu_state_seconds_total{state="idle"}[1h])`},
		{"The books do not balance", `gpu_conservation_error_seconds != 0`},
	}},
	{GroupExporter, "The exporter's view of itself. The `go_…` and `process_…` metrics of the Go client library are there as well; they are that library's and not listed here.", []Example{
		{"Age of what is shown", `time() - gpu_exporter_last_sample_timestamp_seconds`},
		{"Inputs that fail", `gpu_exporter_collector_success == 0`},
		{"Workloads were folded", `increase(gpu_exporter_dropped_series_total[1h]) > 0`},
	}},
}

// WriteDocumentation writes docs/metrics.md, which is made from the table.
func WriteDocumentation(w io.Writer) error {
	var out strings.Builder
	out.WriteString("<!-- Made by `go run ./exporter/metrics/gendocs > docs/metrics.md`. Do not edit. -->\n\n" +
		"# Metrics of gpu-exporter\n\n" +
		"Names, types, units and labels are frozen by SemVer: within a major version families and labels are only added, never renamed, removed or given another meaning.\n\n" +
		"Units are base units and ratios go from 0 to 1. A value that can't be had is absent: it is never 0 and never the last one that was had. " +
		"Counters of seconds and joules are floored to 3 decimals. Counters say since when they count, in OpenMetrics and protobuf.\n\n" +
		"Scrapes don't sample: all scrapes between two samples get the same answer.\n")
	for _, section := range groups {
		fmt.Fprintf(&out, "\n## %s\n\n%s\n\n| metric | type | unit | labels | what | source |\n|---|---|---|---|---|---|\n", section.group, section.text)
		for _, f := range families {
			if f.Group != section.group {
				continue
			}
			labels := ""
			if len(f.Labels) > 0 {
				labels = "`" + strings.Join(f.Labels, "` `") + "`"
			}
			fmt.Fprintf(&out, "| `%s` | %s | %s | %s | %s | %s |\n", f.Name, f.Type, f.Unit, labels, f.Help, f.Source)
		}
		out.WriteString("\n")
		for _, example := range section.examples {
			fmt.Fprintf(&out, "%s:\n\n```promql\n%s\n```\n\n", example.Title, example.Query)
		}
	}
	if _, err := io.WriteString(w, strings.TrimRight(out.String(), "\n")+"\n"); err != nil {
		return fmt.Errorf("write the documentation of metrics: %w", err)
	}
	return nil
}
