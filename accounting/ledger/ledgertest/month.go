// Package ledgertest makes usage rows of invented servers: the same ones every
// time, as many as a test needs.
package ledgertest

import (
	"fmt"
	"iter"
	"time"

	"gpuledger/exporter/usage"
)

// Site is an invented site. All its rows add up: each bucket of each card is
// full, but of the node that dies.
type Site struct {
	Start        time.Time // on a quarter hour of UTC
	Buckets      int
	Nodes        int
	CardsPerNode int
	// HoldersPerCard is how many users hold each card in each bucket; one idle
	// row comes on top.
	HoldersPerCard int
	// Dies is when the last node stops for good; never, if zero.
	Dies time.Time
}

// Month is a month of 100 cards on 10 nodes with 4 rows for each bucket of a
// card, of which the last node dies on the 3rd: 1,046,400 rows in November.
func Month(start, end time.Time) Site {
	return Site{
		Start: start, Buckets: int(end.Sub(start) / usage.BucketLength),
		Nodes: 10, CardsPerNode: 10, HoldersPerCard: 3, Dies: start.AddDate(0, 0, 2).Add(12 * time.Hour),
	}
}

const bucketUS = int64(usage.BucketLength / time.Microsecond)

// Rows are the site's rows, node after node, each in the order of its journal.
func (s Site) Rows() iter.Seq[usage.Row] {
	return func(yield func(usage.Row) bool) {
		for node := range s.Nodes {
			seq := int64(0)
			for b := range s.Buckets {
				bucket := s.Start.Add(time.Duration(b) * usage.BucketLength).UTC()
				if node == s.Nodes-1 && !s.Dies.IsZero() && !bucket.Before(s.Dies) {
					break
				}
				for card := range s.CardsPerNode {
					left := bucketUS
					for holder := range s.HoldersPerCard + 1 {
						seq++
						row := s.row(node, card, holder, bucket, seq)
						if holder < s.HoldersPerCard {
							row.GPUUS = bucketUS/int64(s.HoldersPerCard+1) + mix(node, card, holder, b)%1000
							left -= row.GPUUS
						} else {
							row.GPUUS = left
						}
						fill(&row)
						if !yield(row) {
							return
						}
					}
				}
			}
		}
	}
}

func (s Site) row(node, card, holder int, bucket time.Time, seq int64) usage.Row {
	row := usage.Row{
		Key: usage.Key{
			Run:    fmt.Sprintf("run-%03d", node),
			Device: fmt.Sprintf("GPU-%08d-0000-0000-0000-%012d", node, card),
			Slices: 1, Of: 1, Bucket: bucket, State: usage.StateIdle, UID: -1,
		},
		Seq: seq, Node: fmt.Sprintf("gpu%02d", node+1), Index: card, Model: "NVIDIA H200", PeakTemperatureC: 60,
	}
	row.Card = row.Device
	if holder < s.HoldersPerCard {
		// Users take turns, so that days differ.
		user := (node*7 + card*3 + holder + bucket.YearDay()) % 50
		row.State, row.User, row.UID = usage.StateHeld, fmt.Sprintf("user%02d", user), int64(1000+user)
		row.Kind, row.Workload, row.AttributedBy = "docker", fmt.Sprintf("job-%d", user%5), "label"
	}
	return row
}

func fill(row *usage.Row) {
	row.ShareUS, row.MemoryKnownUS, row.ActiveKnownUS = row.GPUUS, row.GPUUS, row.GPUUS
	row.EnergyMJ = row.GPUUS / 1000 * 300
	if row.State != usage.StateHeld {
		row.IdleUS = row.GPUUS
		return
	}
	row.HeldUS, row.ActiveUS = row.GPUUS, row.GPUUS/2
	row.MemoryKiBSeconds = row.GPUUS / 1_000_000 * (8 << 20)
	row.PeakMemoryBytes = 8 << 30
}

// mix spreads its arguments over the non-negative integers.
func mix(parts ...int) int64 {
	x := uint64(0x9e3779b97f4a7c15)
	for _, part := range parts {
		x ^= uint64(part)
		x *= 0xff51afd7ed558ccd
		x ^= x >> 32
	}
	return int64(x >> 1)
}
