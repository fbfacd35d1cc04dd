package usage

import "time"

// field is one field of a row on the wire: its name, where it lives in a Row,
// and whether its number can only grow while the row is open.
type field struct {
	name  string
	grows bool
	at    func(*Row) any // *string, *int64, *int, *bool or *time.Time
	// later says that there are rows without it, written before there was such a
	// field: they mean its zero value.
	later bool
}

// fields is the order of the wire. Fields are only ever added, at the end.
var fields = []field{
	{"run", false, func(r *Row) any { return &r.Run }, false},
	{"seq", false, func(r *Row) any { return &r.Seq }, false},
	{"node", false, func(r *Row) any { return &r.Node }, false},
	{"device", false, func(r *Row) any { return &r.Device }, false},
	{"card", false, func(r *Row) any { return &r.Card }, false},
	{"index", false, func(r *Row) any { return &r.Index }, false},
	{"model", false, func(r *Row) any { return &r.Model }, false},
	{"profile", false, func(r *Row) any { return &r.Profile }, false},
	{"slices", false, func(r *Row) any { return &r.Slices }, false},
	{"of", false, func(r *Row) any { return &r.Of }, false},
	{"bucket", false, func(r *Row) any { return &r.Bucket }, false},
	{"state", false, func(r *Row) any { return &r.State }, false},
	{"user", false, func(r *Row) any { return &r.User }, false},
	{"uid", false, func(r *Row) any { return &r.UID }, false},
	{"kind", false, func(r *Row) any { return &r.Kind }, false},
	{"workload", false, func(r *Row) any { return &r.Workload }, false},
	{"project", false, func(r *Row) any { return &r.Project }, false},
	{"class", false, func(r *Row) any { return &r.Class }, false},
	{"gpu_us", true, func(r *Row) any { return &r.GPUUS }, false},
	{"share_us", true, func(r *Row) any { return &r.ShareUS }, false},
	{"held_us", true, func(r *Row) any { return &r.HeldUS }, false},
	{"reserved_us", true, func(r *Row) any { return &r.ReservedUS }, false},
	{"active_us", true, func(r *Row) any { return &r.ActiveUS }, false},
	{"active_known_us", true, func(r *Row) any { return &r.ActiveKnownUS }, false},
	{"idle_us", true, func(r *Row) any { return &r.IdleUS }, false},
	{"memory_kib_seconds", true, func(r *Row) any { return &r.MemoryKiBSeconds }, false},
	{"memory_known_us", true, func(r *Row) any { return &r.MemoryKnownUS }, false},
	{"energy_mj", true, func(r *Row) any { return &r.EnergyMJ }, false},
	{"peak_memory_bytes", true, func(r *Row) any { return &r.PeakMemoryBytes }, false},
	{"peak_temperature_c", true, func(r *Row) any { return &r.PeakTemperatureC }, false},
	{"estimated", false, func(r *Row) any { return &r.Estimated }, false},
	{"attributed_by", false, func(r *Row) any { return &r.AttributedBy }, false},
	{"review", false, func(r *Row) any { return &r.Review }, true},
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
