package usage

import "time"

// field is one field of a row on the wire: its name, where it lives in a Row,
// and whether its number can only grow while the row is open.
type field struct {
	name  string
	grows bool
	at    func(*Row) any // *string, *int64, *int, *bool or *time.Time
}

// fields is the order of the wire. Fields are only ever added, at the end.
var fields = []field{
	{"run", false, func(r *Row) any { return &r.Run }},
	{"seq", false, func(r *Row) any { return &r.Seq }},
	{"node", false, func(r *Row) any { return &r.Node }},
	{"device", false, func(r *Row) any { return &r.Device }},
	{"card", false, func(r *Row) any { return &r.Card }},
	{"index", false, func(r *Row) any { return &r.Index }},
	{"model", false, func(r *Row) any { return &r.Model }},
	{"profile", false, func(r *Row) any { return &r.Profile }},
	{"slices", false, func(r *Row) any { return &r.Slices }},
	{"of", false, func(r *Row) any { return &r.Of }},
	{"bucket", false, func(r *Row) any { return &r.Bucket }},
	{"state", false, func(r *Row) any { return &r.State }},
	{"user", false, func(r *Row) any { return &r.User }},
	{"uid", false, func(r *Row) any { return &r.UID }},
	{"kind", false, func(r *Row) any { return &r.Kind }},
	{"workload", false, func(r *Row) any { return &r.Workload }},
	{"project", false, func(r *Row) any { return &r.Project }},
	{"class", false, func(r *Row) any { return &r.Class }},
	{"gpu_us", true, func(r *Row) any { return &r.GPUUS }},
	{"share_us", true, func(r *Row) any { return &r.ShareUS }},
	{"held_us", true, func(r *Row) any { return &r.HeldUS }},
	{"reserved_us", true, func(r *Row) any { return &r.ReservedUS }},
	{"active_us", true, func(r *Row) any { return &r.ActiveUS }},
	{"active_known_us", true, func(r *Row) any { return &r.ActiveKnownUS }},
	{"idle_us", true, func(r *Row) any { return &r.IdleUS }},
	{"memory_kib_seconds", true, func(r *Row) any { return &r.MemoryKiBSeconds }},
	{"memory_known_us", true, func(r *Row) any { return &r.MemoryKnownUS }},
	{"energy_mj", true, func(r *Row) any { return &r.EnergyMJ }},
	{"peak_memory_bytes", true, func(r *Row) any { return &r.PeakMemoryBytes }},
	{"peak_temperature_c", true, func(r *Row) any { return &r.PeakTemperatureC }},
	{"estimated", false, func(r *Row) any { return &r.Estimated }},
	{"attributed_by", false, func(r *Row) any { return &r.AttributedBy }},
}

// fieldIndex finds a field by its name.
var fieldIndex = func() map[string]int {
	index := make(map[string]int, len(fields))
	for i, f := range fields {
		index[f.name] = i
	}
	return index
}()

// Shrunk names the first number of r that is smaller than in earlier, an older
// state of the same row. The numbers of an open row only grow.
func (r *Row) Shrunk(earlier *Row) (name string, before, now int64, shrunk bool) {
	for _, f := range fields {
		if !f.grows {
			continue
		}
		before, now := *f.at(earlier).(*int64), *f.at(r).(*int64)
		if now < before {
			return f.name, before, now, true
		}
	}
	return "", 0, 0, false
}

// SameContent reports whether two rows say the same, wherever they stand in a
// journal.
func (r *Row) SameContent(other *Row) bool {
	a, b := *r, *other
	a.Seq, b.Seq = 0, 0
	a.Bucket, b.Bucket = canonical(a.Bucket), canonical(b.Bucket)
	return a == b
}

// canonical makes equal instants equal values, so that rows and keys can be
// compared with == and used in maps.
func canonical(t time.Time) time.Time { return time.Unix(t.Unix(), int64(t.Nanosecond())).UTC() }
