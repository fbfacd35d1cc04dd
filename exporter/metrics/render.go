package metrics

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// slabLength is how many series are allocated at a time.
const slabLength = 256

type gaugeCell struct {
	metric dto.Metric
	gauge  dto.Gauge
	value  float64
}

type counterCell struct {
	metric  dto.Metric
	counter dto.Counter
	value   float64
}

// gather makes the metric families of v, sorted by name.
//
// It does what a registry's Gather does, without its goroutines, channel and
// per-series hashing, which for the thousands of series of a busy node take
// longer than everything else (BenchmarkGather). The registry's checks are
// made in the tests, on the Collector, which shows the same series.
func gather(v *view) []*dto.MetricFamily {
	gathered := make([]*dto.MetricFamily, 0, len(familiesByName))
	var gauges []gaugeCell
	var counters []counterCell
	for i := range familiesByName {
		family := &familiesByName[i]
		if family.read == nil {
			continue
		}
		var metrics []*dto.Metric
		family.read(v, func(labels []*dto.LabelPair, value float64, created *timestamppb.Timestamp) {
			if family.Type == Counter {
				if len(counters) == 0 {
					counters = make([]counterCell, slabLength)
				}
				cell := &counters[0]
				counters = counters[1:]
				cell.value = value
				cell.counter.Value = &cell.value
				cell.counter.CreatedTimestamp = created
				cell.metric.Label = labels
				cell.metric.Counter = &cell.counter
				metrics = append(metrics, &cell.metric)
				return
			}
			if len(gauges) == 0 {
				gauges = make([]gaugeCell, slabLength)
			}
			cell := &gauges[0]
			gauges = gauges[1:]
			cell.value = value
			cell.gauge.Value = &cell.value
			cell.metric.Label = labels
			cell.metric.Gauge = &cell.gauge
			metrics = append(metrics, &cell.metric)
		})
		if len(metrics) == 0 {
			continue
		}
		kind := dto.MetricType_GAUGE
		if family.Type == Counter {
			kind = dto.MetricType_COUNTER
		}
		gathered = append(gathered, &dto.MetricFamily{
			Name: proto.String(family.Name), Help: proto.String(family.HelpText()), Type: &kind, Metric: metrics,
		})
	}
	return gathered
}

// merge joins two lists of families and sorts them by name.
func merge(a, b []*dto.MetricFamily) []*dto.MetricFamily {
	all := slices.Concat(a, b)
	slices.SortStableFunc(all, func(x, y *dto.MetricFamily) int { return strings.Compare(x.GetName(), y.GetName()) })
	return all
}
