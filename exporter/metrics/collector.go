package metrics

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/snapshot"
)

// Collector shows the newest snapshot to a client_golang registry, as const
// metrics. Handler shows the same series and is what serves /metrics; a
// Collector is for those who have a registry of their own. It remembers which
// workloads it has folded, so it has to live as long as its store.
type Collector struct {
	store        *snapshot.Store
	descriptions []*prometheus.Desc // by position in familiesByName

	mu     sync.Mutex
	folder *folder
}

// NewCollector returns a collector over store that shows at most maxWorkloads
// workloads under their own names.
func NewCollector(store *snapshot.Store, maxWorkloads int) *Collector {
	c := &Collector{store: store, folder: newFolder(maxWorkloads)}
	for _, family := range familiesByName {
		c.descriptions = append(c.descriptions, prometheus.NewDesc(family.Name, family.HelpText(), family.Labels, nil))
	}
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(descriptions chan<- *prometheus.Desc) {
	for i, family := range familiesByName {
		if family.read != nil {
			descriptions <- c.descriptions[i]
		}
	}
}

// Collect implements prometheus.Collector. It sends nothing before the first
// snapshot.
func (c *Collector) Collect(metrics chan<- prometheus.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	newest := c.store.Load()
	if newest == nil {
		return
	}
	v := newView(newest, c.folder)
	for i, family := range familiesByName {
		if family.read == nil {
			continue
		}
		description := c.descriptions[i]
		family.read(v, func(labels []*dto.LabelPair, value float64, created *timestamppb.Timestamp) {
			metrics <- constMetric(description, family, labels, value, created)
		})
	}
}

func constMetric(description *prometheus.Desc, family Family, labels []*dto.LabelPair, value float64, created *timestamppb.Timestamp) prometheus.Metric {
	byName := make(map[string]string, len(labels))
	for _, pair := range labels {
		byName[pair.GetName()] = pair.GetValue()
	}
	values := make([]string, len(family.Labels))
	for i, name := range family.Labels {
		values[i] = byName[name]
	}
	kind := prometheus.GaugeValue
	if family.Type == Counter {
		kind = prometheus.CounterValue
	}
	var metric prometheus.Metric
	var err error
	if created != nil {
		metric, err = prometheus.NewConstMetricWithCreatedTimestamp(description, kind, value, created.AsTime(), values...)
	} else {
		metric, err = prometheus.NewConstMetric(description, kind, value, values...)
	}
	if err != nil {
		return prometheus.NewInvalidMetric(description, err)
	}
	return metric
}
