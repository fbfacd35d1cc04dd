// Package metrics shows a node's newest snapshot in Prometheus's formats.
//
// One table defines every family: name, type, unit, labels, help, source and
// where its values come from. The exposition, the collector, docs/metrics.md
// and the tests are all made from it. Nothing here calls NVML or walks /proc:
// a snapshot is rendered once, on first demand, and every scrape until the
// next snapshot gets the same bytes.
//
// The rules of the table are those of docs/design.md §5: base units, ratios
// from 0 to 1, _total on counters only, and a value that can't be had is
// absent, never 0 and never the last one.
package metrics

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Type is a family's type: a gauge, which can go both ways, or a counter,
// which never falls.
type Type uint8

// Types of a family.
const (
	Gauge Type = iota
	Counter
)

// String is the type's name in the exposition formats.
func (t Type) String() string {
	if t == Counter {
		return "counter"
	}
	return "gauge"
}

// Unit is the unit of a family's values.
type Unit string

// Units, all of them base units.
const (
	Bytes       Unit = "bytes"
	ByteSeconds Unit = "byte-seconds"
	Celsius     Unit = "celsius"
	Count       Unit = "count"
	Flag        Unit = "flag" // 1 or 0
	Generation  Unit = "generation"
	Hertz       Unit = "hertz"
	Info        Unit = "info" // always 1, the labels are the value
	Joules      Unit = "joules"
	Lanes       Unit = "lanes"
	Ratio       Unit = "ratio"
	Seconds     Unit = "seconds"
	UnixSeconds Unit = "unix seconds"
	Watts       Unit = "watts"
)

// phrase says the unit within a help text.
func (u Unit) phrase() string {
	switch u {
	case Celsius:
		return "in degrees Celsius"
	case Count:
		return "as a count"
	case Flag:
		return "1 if so, 0 if not"
	case Generation:
		return "as a generation number"
	case Info:
		return "always 1"
	case Ratio:
		return "as a ratio from 0 to 1"
	case UnixSeconds:
		return "in Unix seconds"
	default:
		return "in " + string(u)
	}
}

// Family is one metric family, as the table defines it.
type Family struct {
	Name string
	Type Type
	Unit Unit
	// Labels are all label names, those of the device or workload first.
	Labels []string
	// Help says what is measured, without unit and source.
	Help string
	// Source says where the values come from.
	Source string
	// Group is the section of docs/metrics.md it belongs to.
	Group Group

	// read emits the family's series. It is nil for a family that comes from
	// a Prometheus collector of the exporter itself (Options.Runtime).
	read func(v *view, emit emitFunc)
}

// emitFunc takes one series: its label pairs sorted by name, its value, and
// for counters since when it counts, nil if that is not known.
type emitFunc func(labels []*dto.LabelPair, value float64, created *timestamppb.Timestamp)

// HelpText is the HELP line: what is measured, its unit and its source.
func (f Family) HelpText() string {
	return f.Help + ", " + f.Unit.phrase() + " (source: " + f.Source + ")."
}

// Group is a section of docs/metrics.md.
type Group string

// Groups, in the order of the document.
const (
	GroupNode         Group = "Node and driver"
	GroupCard         Group = "Cards"
	GroupHealth       Group = "Health of cards"
	GroupMIG          Group = "MIG instances"
	GroupWorkload     Group = "Workloads on whole cards"
	GroupMIGWorkload  Group = "Workloads on MIG instances"
	GroupNodeWorkload Group = "Workloads beside their GPUs"
	GroupLedger       Group = "Accounting of time"
	GroupExporter     Group = "The exporter itself"
)

// families is the table, in the order of the document.
var families = slices.Concat(
	nodeFamilies, cardFamilies, healthFamilies, migFamilies,
	workloadFamilies("gpu_workload_", GroupWorkload, workloadLabels, func(v *view) []*series { return v.workloads }),
	workloadFamilies("gpu_mig_workload_", GroupMIGWorkload, migWorkloadLabels, func(v *view) []*series { return v.migWorkloads }),
	workloadInfoFamilies, nodeWorkloadFamilies, ledgerFamilies, exporterFamilies,
)

// familiesByName is the table in the order of the exposition.
var familiesByName = slices.SortedFunc(slices.Values(families), func(a, b Family) int {
	return strings.Compare(a.Name, b.Name)
})

// Families is the table of all metric families, in the order of
// docs/metrics.md.
func Families() []Family { return slices.Clone(families) }
