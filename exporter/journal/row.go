package journal

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"
	"time"

	"gpuledger/exporter/usage"
)

// chainLength is the length of a key's and a chain's hash, in bytes.
const chainLength = 16

// columns are the columns of a row in both tables, without seq.
const columns = `run, node, device, card, "index", model, profile, slices, "of", bucket, state, user, uid, kind, workload, project, class,
	gpu_us, share_us, held_us, reserved_us, active_us, active_known_us, idle_us, memory_kib_seconds, memory_known_us, energy_mj,
	peak_memory_bytes, peak_temperature_c, estimated, attributed_by, review`

// places holds a ? for each of columns.
var places = strings.TrimSuffix(strings.Repeat("?, ", strings.Count(columns, ",")+1), ", ")

// values are what columns hold of r.
func values(r *usage.Row) []any {
	return []any{
		r.Run, r.Node, r.Device, r.Card, r.Index, r.Model, r.Profile, r.Slices, r.Of, r.Bucket.Unix(), r.State, r.User, r.UID, r.Kind, r.Workload, r.Project, r.Class,
		r.GPUUS, r.ShareUS, r.HeldUS, r.ReservedUS, r.ActiveUS, r.ActiveKnownUS, r.IdleUS, r.MemoryKiBSeconds, r.MemoryKnownUS, r.EnergyMJ,
		r.PeakMemoryBytes, r.PeakTemperatureC, r.Estimated, r.AttributedBy, r.Review,
	}
}

// scan reads columns into r, after what goes into before.
func scan(rows interface{ Scan(...any) error }, r *usage.Row, before ...any) error {
	var bucket int64
	err := rows.Scan(append(before,
		&r.Run, &r.Node, &r.Device, &r.Card, &r.Index, &r.Model, &r.Profile, &r.Slices, &r.Of, &bucket, &r.State, &r.User, &r.UID, &r.Kind, &r.Workload, &r.Project, &r.Class,
		&r.GPUUS, &r.ShareUS, &r.HeldUS, &r.ReservedUS, &r.ActiveUS, &r.ActiveKnownUS, &r.IdleUS, &r.MemoryKiBSeconds, &r.MemoryKnownUS, &r.EnergyMJ,
		&r.PeakMemoryBytes, &r.PeakTemperatureC, &r.Estimated, &r.AttributedBy, &r.Review)...)
	r.Bucket = time.Unix(bucket, 0).UTC()
	return err
}

// key is a row's key, hashed: 16 bytes of SHA-256 never meet by accident.
type key [chainLength]byte

func keyOf(k *usage.Key) key {
	text := make([]byte, 0, 256)
	for _, part := range []string{k.Run, k.Device, k.State, k.User, k.Kind, k.Workload, k.Project, k.Class} {
		text = binary.AppendUvarint(text, uint64(len(part)))
		text = append(text, part...)
	}
	for _, part := range []int64{k.Slices, k.Of, k.Bucket.Unix(), k.UID} {
		text = binary.AppendVarint(text, part)
	}
	sum := sha256.Sum256(text)
	return key(sum[:chainLength])
}

// chain names a row together with all rows before it: each is a hash over the
// one before and the row's own line, and the first begins with the journal's
// random id. Two journals that agree on one link agree on everything up to it;
// one that was lost, restored from an older copy or begun anew does not have
// the link that a reader saw, even if it has as many rows.
type chain [chainLength]byte

func (c chain) next(r *usage.Row) chain {
	sum := sha256.Sum256(usage.AppendJSON(append(make([]byte, 0, 1024), c[:]...), r))
	return chain(sum[:chainLength])
}

// describe names a row in logs and errors.
func describe(r *usage.Row) string {
	who := r.State
	if r.State == usage.StateHeld {
		who = fmt.Sprintf("%s by %q, %s %q", r.State, r.User, r.Kind, r.Workload)
	}
	return fmt.Sprintf("row of %s at %s, %s, run %s", r.Device, r.Bucket.UTC().Format(time.RFC3339), who, r.Run)
}
