package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"slices"

	"gpuledger/exporter/usage"
)

// contentVersion heads the hashed bytes: another encoding must not look like
// another content.
const contentVersion = "gpuledger ledger content 1\n"

// AppendContent appends the row's key and content, without seq, in a form that
// is the same for the same fact and no other: numbers as varints, texts with
// their length before them.
func AppendContent(to []byte, row *usage.Row) []byte {
	text := func(s string) {
		to = binary.AppendUvarint(to, uint64(len(s)))
		to = append(to, s...)
	}
	number := func(n int64) { to = binary.AppendVarint(to, n) }

	number(row.Bucket.Unix())
	text(row.Device)
	number(row.Slices)
	number(row.Of)
	text(row.State)
	text(row.User)
	number(row.UID)
	text(row.Kind)
	text(row.Workload)
	text(row.Project)
	text(row.Class)
	text(row.Run)

	text(row.Node)
	text(row.Card)
	number(int64(row.Index))
	text(row.Model)
	text(row.Profile)
	number(row.GPUUS)
	number(row.ShareUS)
	number(row.HeldUS)
	number(row.ReservedUS)
	number(row.ActiveUS)
	number(row.ActiveKnownUS)
	number(row.IdleUS)
	number(row.MemoryKiBSeconds)
	number(row.MemoryKnownUS)
	number(row.EnergyMJ)
	number(row.PeakMemoryBytes)
	number(row.PeakTemperatureC)
	if row.Estimated {
		number(1)
	} else {
		number(0)
	}
	text(row.AttributedBy)
	// Rows that need no review are hashed as they were before there was such a
	// thing. The number is told from the next row's bucket by its being one byte.
	if row.Review {
		number(1)
	}
	return to
}

// ContentHash is the SHA-256 over rows in canonical order: by bucket, and within
// a bucket by their content's bytes. So it is the same whatever order rows came
// in, how often, and who pulled them.
type ContentHash struct {
	sum     hash.Hash
	arena   []byte
	extents [][2]int
}

// NewContentHash returns the hash of no rows.
func NewContentHash() *ContentHash {
	h := &ContentHash{sum: sha256.New()}
	h.sum.Write([]byte(contentVersion))
	return h
}

// Bucket adds all rows of one bucket, in any order. Buckets must come in order
// of time.
func (h *ContentHash) Bucket(rows []usage.Row) {
	h.arena, h.extents = h.arena[:0], h.extents[:0]
	for i := range rows {
		from := len(h.arena)
		h.arena = AppendContent(h.arena, &rows[i])
		h.extents = append(h.extents, [2]int{from, len(h.arena)})
	}
	slices.SortFunc(h.extents, func(a, b [2]int) int {
		return bytes.Compare(h.arena[a[0]:a[1]], h.arena[b[0]:b[1]])
	})
	for _, extent := range h.extents {
		h.sum.Write(h.arena[extent[0]:extent[1]])
	}
}

// String returns the hash so far as "sha256:" and hex.
func (h *ContentHash) String() string {
	return "sha256:" + hex.EncodeToString(h.sum.Sum(nil))
}
