package metrics

import (
	"slices"
	"strconv"
	"time"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/types/known/timestamppb"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/snapshot"
)

// view is a snapshot made ready to be shown: label pairs built once and shared
// by all families, workloads folded, nothing twice.
type view struct {
	snapshot      *snapshot.Snapshot
	started       *timestamppb.Timestamp // nil if not known
	cards         []cardView
	instances     []instanceView
	workloads     []*series // on whole cards
	migWorkloads  []*series
	onNode        []*nodeSeries
	infos         []info
	droppedSeries int64
	measured      map[string]bool // cards whose energy is known, by UUID
}

// suspectCount is how many processes are suspected of having memory that no
// listed process explains, known once it was looked for them. A card with
// nothing to explain has none.
func suspectCount(c *snapshot.Card) (int, bool) {
	switch c.Search.Verdict {
	case snapshot.SearchNone:
		return 0, c.UnattributedMemoryBytes.Known
	case snapshot.SearchFound, snapshot.SearchNobody, snapshot.SearchHidden:
		count := 0
		for i := range c.Suspects {
			if !c.Suspects[i].Monitor {
				count++
			}
		}
		return count, true
	}
	return 0, false
}

type cardView struct {
	*snapshot.Card
	index  string
	labels []*dto.LabelPair
}

type instanceView struct {
	*gpu.Instance
	parent string
	labels []*dto.LabelPair
}

// info is what hangs on one workload's gpu_workload_info.
type info struct {
	name     workloadName
	workload *snapshot.Workload // nil for an overflow
}

// newView prepares s, which must be newer than all f has folded before.
func newView(s *snapshot.Snapshot, f *folder) *view {
	v := &view{snapshot: s, measured: map[string]bool{}}
	if !s.Started.IsZero() {
		v.started = timestamppb.New(s.Started)
	}
	seen := map[string]bool{}
	for i := range s.Cards {
		card := &s.Cards[i]
		index := strconv.Itoa(card.Identity.Index)
		// A driver that lists a card twice must not break the scrape.
		key := index + " " + card.Identity.UUID
		if seen[key] {
			continue
		}
		seen[key] = true
		v.cards = append(v.cards, cardView{card, index, labelPairs(cardLabels, index, card.Identity.UUID)})
		v.measured[card.Identity.UUID] = card.EnergyMJ.Known
		if card.Reading == nil {
			continue
		}
		for j := range card.Reading.Instances {
			instance := &card.Reading.Instances[j]
			if seen[instance.UUID] {
				continue
			}
			seen[instance.UUID] = true
			v.instances = append(v.instances, instanceView{instance, card.Identity.UUID,
				labelPairs(migLabels, instance.UUID, card.Identity.UUID, instance.Profile)})
		}
	}
	for _, one := range f.fold(s.At, s.Workloads) {
		if one.instance {
			v.migWorkloads = append(v.migWorkloads, one)
		} else {
			v.workloads = append(v.workloads, one)
		}
	}
	v.onNode = f.foldNode(s.Resources)
	v.droppedSeries = f.dropped
	v.infos = newestInfos(s.Workloads, f)
	return v
}

// newestInfos picks for each workload the one of its instances that is shown:
// what is there goes before what has ended, then the newest.
func newestInfos(workloads []snapshot.Workload, f *folder) []info {
	position := make(map[workloadName]int, len(workloads))
	var infos []info
	for i := range workloads {
		w := &workloads[i]
		name := f.nameOf(&w.Key)
		at, ok := position[name]
		if !ok {
			at = len(infos)
			position[name] = at
			infos = append(infos, info{name: name, workload: w})
		}
		switch {
		case name.workload == Overflow:
			infos[at].workload = nil
		case newer(w, infos[at].workload):
			infos[at].workload = w
		}
	}
	slices.SortFunc(infos, func(a, b info) int { return a.name.compare(b.name) })
	return infos
}

func newer(a, b *snapshot.Workload) bool {
	if a.Present != b.Present {
		return a.Present
	}
	return a.FirstSeen.After(b.FirstSeen)
}

// oneIf is 1 for true and 0 for false.
func oneIf(on bool) float64 {
	if on {
		return 1
	}
	return 0
}

// flooredSeconds is a counter of microseconds in seconds, floored to 3
// decimals: some storage engines keep no more.
func flooredSeconds(us int64) float64 { return thousandths(us / 1000) }

// thousandths divides instead of multiplying, so that the result is the float
// nearest to the decimal and prints with 3 decimals.
func thousandths(n int64) float64 { return float64(n) / 1000 }

// unixSeconds is a time with millisecond precision.
func unixSeconds(t time.Time) float64 { return thousandths(t.UnixMilli()) }
