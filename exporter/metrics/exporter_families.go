package metrics

import (
	"maps"
	"slices"

	dto "github.com/prometheus/client_model/go"

	"gpuledger/exporter/snapshot"
)

var ledgerFamilies = []Family{
	{
		Name: "gpu_state_seconds_total", Type: Counter, Unit: Seconds, Group: GroupLedger, Labels: with(cardLabels, "state"),
		Help:   "Card time that nobody held, by state: idle, or down because the card could not work",
		Source: "committed rows",
		read: ofCardsSince(sinceStart, func(c cardView, put putFunc) {
			put(flooredSeconds(c.IdleUS), "idle")
			put(flooredSeconds(c.DownUS), "down")
		}, "state"),
	},
	{
		Name: "gpu_metered_seconds_total", Type: Counter, Unit: Seconds, Group: GroupLedger, Labels: cardLabels,
		Help:   "Card time that was observed and is accounted for; what is missing to wall time is unobserved",
		Source: "committed intervals",
		read:   ofCardsSince(sinceStart, func(c cardView, put putFunc) { put(flooredSeconds(c.MeteredUS)) }),
	},
	{
		Name: "gpu_conservation_error_seconds", Unit: Seconds, Group: GroupLedger, Labels: cardLabels,
		Help:   "Difference between the card time in committed rows and the intervals they came from; anything but 0 is a fault of the exporter",
		Source: "rows as the journal took them",
		read:   ofCards(func(c cardView, put putFunc) { put(float64(c.ConservationErrorUS) / 1e6) }),
	},
}

var exporterFamilies = []Family{
	{
		Name: "gpu_exporter_build_info", Unit: Info, Group: GroupExporter,
		Labels: []string{"version", "revision", "branch", "goversion", "goos", "goarch", "tags"},
		Help:   "Version and build of the exporter",
		Source: "the build",
	},
	exporterGauge("sample_duration_seconds", Seconds, "Duration of the newest pass over all cards", "the sampler",
		func(s *snapshot.Snapshot) float64 { return s.Exporter.SampleDuration.Seconds() }),
	{
		Name: "gpu_exporter_last_sample_timestamp_seconds", Unit: UnixSeconds, Group: GroupExporter,
		Help:   "When the values shown here were sampled; scrapes don't sample, so this tells their age",
		Source: "the sampler",
		read:   ofNode(func(s *snapshot.Snapshot) (float64, bool) { return unixSeconds(s.At), !s.At.IsZero() }),
	},
	{
		Name: "gpu_exporter_collector_success", Unit: Flag, Group: GroupExporter, Labels: []string{"collector"},
		Help:   "Whether an input gave what was asked of it at its last try",
		Source: "the collector",
		read: ofCollectors(func(c snapshot.CollectorState) float64 {
			return oneIf(c.Up)
		}),
	},
	{
		Name: "gpu_exporter_collector_duration_seconds", Unit: Seconds, Group: GroupExporter, Labels: []string{"collector"},
		Help:   "Duration of an input's last try",
		Source: "the collector",
		read: ofCollectors(func(c snapshot.CollectorState) float64 {
			return c.Duration.Seconds()
		}),
	},
	{
		Name: "gpu_exporter_dropped_series_total", Type: Counter, Unit: Count, Group: GroupExporter,
		Help:   "Workloads, counted on each device, that folded into workload=\"" + Overflow + "\" because of --metrics.max-workloads",
		Source: "the exposition",
		read: func(v *view, emit emitFunc) {
			emit([]*dto.LabelPair{}, float64(v.droppedSeries), v.started)
		},
	},
	{
		Name: "gpu_exporter_dropped_values_total", Type: Counter, Unit: Count, Group: GroupExporter, Labels: []string{"metric"},
		Help:   "Values that NVML gave and that were thrown away as impossible, by metric",
		Source: "range checks on every reading",
		read: func(v *view, emit emitFunc) {
			dropped := v.snapshot.Exporter.DroppedValues
			for _, metric := range slices.Sorted(maps.Keys(dropped)) {
				emit(labelPairs([]string{"metric"}, metric), float64(dropped[metric]), v.started)
			}
		},
	},
	exporterCounter("dropped_energy_steps_total", "Steps of a card's energy counter that were thrown away as impossible", "the meter",
		func(e *snapshot.Exporter) int64 { return e.DroppedEnergySteps }),
	exporterCounter("unobserved_gaps_total", "Intervals between readings that were longer than --sample.max-gap and count as unobserved", "the meter",
		func(e *snapshot.Exporter) int64 { return e.MaxGaps }),
	exporterCounter("gone_pids_total", "Processes that NVML listed and that were gone before they could be looked at", "/proc",
		func(e *snapshot.Exporter) int64 { return e.GonePIDs }),
	exporterCounter("hidden_pids_total", "Processes that NVML listed and that the exporter was not allowed to look at", "/proc",
		func(e *snapshot.Exporter) int64 { return e.HiddenPIDs }),
	exporterCounter("child_restarts_total", "Restarts of the child process that calls NVML", "the supervisor",
		func(e *snapshot.Exporter) int64 { return e.ChildRestarts }),
	exporterCounter("clock_waits_total", "Times the wall clock was behind the ledger's and time stood still until it had caught up", "the meter",
		func(e *snapshot.Exporter) int64 { return e.ClockWaits }),
	exporterCounter("clock_jumps_total", "Jumps of the wall clock ahead, whose time counts as unobserved", "the meter",
		func(e *snapshot.Exporter) int64 { return e.ClockJumps }),
	exporterGauge("journal_up", Flag, "Whether the journal takes rows", "the journal",
		func(s *snapshot.Snapshot) float64 { return oneIf(s.Exporter.JournalError == "") }),
	exporterGauge("journal_size_bytes", Bytes, "Size of the journal on disk", "the journal",
		func(s *snapshot.Snapshot) float64 { return float64(s.Exporter.JournalBytes) }),
	exporterGauge("journal_oldest_unpulled_seconds", Seconds, "Age of the oldest final row that no collector has pulled yet", "the journal",
		func(s *snapshot.Snapshot) float64 { return s.Exporter.JournalOldestUnpulled.Seconds() }),
	exporterGauge("journal_waiting_rows", Count, "Rows that wait in memory for the journal to take them", "the journal",
		func(s *snapshot.Snapshot) float64 { return float64(s.Exporter.JournalWaitingRows) }),
}

func exporterGauge(name string, unit Unit, help, source string, read func(*snapshot.Snapshot) float64) Family {
	return Family{
		Name: "gpu_exporter_" + name, Unit: unit, Group: GroupExporter, Help: help, Source: source,
		read: ofNode(func(s *snapshot.Snapshot) (float64, bool) { return read(s), true }),
	}
}

func exporterCounter(name, help, source string, read func(*snapshot.Exporter) int64) Family {
	return Family{
		Name: "gpu_exporter_" + name, Type: Counter, Unit: Count, Group: GroupExporter, Help: help + ", since the exporter started", Source: source,
		read: func(v *view, emit emitFunc) {
			emit([]*dto.LabelPair{}, float64(read(&v.snapshot.Exporter)), v.started)
		},
	}
}

func ofCollectors(read func(snapshot.CollectorState) float64) func(*view, emitFunc) {
	return func(v *view, emit emitFunc) {
		states := v.snapshot.Exporter.Collectors
		for _, name := range slices.Sorted(maps.Keys(states)) {
			emit(labelPairs([]string{"collector"}, name), read(states[name]), nil)
		}
	}
}
