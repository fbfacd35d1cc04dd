package owner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// DefaultSubUIDPath lists who was lent which uids for user namespaces
// (subuid(5)).
const DefaultSubUIDPath = "/etc/subuid"

const (
	// subIDReread is how often it is looked whether the file has changed.
	subIDReread     = 10 * time.Second
	maxSubIDBytes   = 4 << 20
	maxSubIDRanges  = 65536
	maxSubIDOverlap = 8 // owners of one uid that are told
)

// subIDRange is one line: count uids from first on, lent to owner.
type subIDRange struct {
	owner string
	first uint64
	count uint64
}

// subIDs knows a subuid file from memory.
type subIDs struct {
	path   string
	ranges atomic.Pointer[[]subIDRange] // nil before the first reading
	stamp  string                       // what the file looked like when it was read
	failed bool
}

func newSubIDs(path string) *subIDs { return &subIDs{path: path} }

// owners are those to whom a uid is lent. A file has few enough lines to be
// searched whole: ranges may overlap.
func (s *subIDs) owners(uid uint32) ([]string, AccountStatus) {
	ranges := s.ranges.Load()
	if ranges == nil {
		return nil, AccountWaiting
	}
	var found []string
	for _, r := range *ranges {
		if uint64(uid) >= r.first && uint64(uid)-r.first < r.count && !slices.Contains(found, r.owner) {
			if found = append(found, r.owner); len(found) == maxSubIDOverlap {
				break
			}
		}
	}
	if found == nil {
		return nil, AccountUnknown
	}
	return found, AccountFound
}

// run reads the file now, and again whenever it has changed, until ctx ends.
func (s *subIDs) run(ctx context.Context, logger *slog.Logger, changed func()) {
	tick := time.NewTicker(subIDReread)
	defer tick.Stop()
	for {
		s.refresh(logger, changed)
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// refresh reads the file if it has changed. A file that is not there lends
// nothing; one that cannot be read leaves what was known.
func (s *subIDs) refresh(logger *slog.Logger, changed func()) {
	ranges, stamp, err := s.read()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		ranges, stamp, err = nil, "", nil
	case err != nil:
		if !s.failed {
			logger.Warn("cannot read who was lent which uids", "path", s.path, "err", err)
		}
		s.failed = true
		if s.ranges.Load() != nil {
			return
		}
		stamp = ""
	}
	if err == nil {
		s.failed = false
	}
	before := s.ranges.Load()
	if before != nil && stamp == s.stamp {
		return
	}
	s.stamp = stamp
	if before == nil || !slices.Equal(*before, ranges) {
		s.ranges.Store(&ranges)
		changed()
	}
}

func (s *subIDs) read() (ranges []subIDRange, stamp string, err error) {
	info, err := os.Stat(s.path)
	if err != nil {
		return nil, "", err
	}
	if !info.Mode().IsRegular() {
		return nil, "", fmt.Errorf("%s is no regular file", s.path)
	}
	stamp = fmt.Sprint(info.ModTime().UnixNano(), " ", info.Size())
	if s.ranges.Load() != nil && stamp == s.stamp {
		return nil, stamp, nil
	}
	file, err := os.Open(s.path)
	if err != nil {
		return nil, "", err
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxSubIDBytes))
	if err != nil {
		return nil, "", err
	}
	return parseSubIDs(data), stamp, nil
}

// parseSubIDs reads lines OWNER:FIRST:COUNT. Lines of another form lend
// nothing, as they don't to newuidmap.
func parseSubIDs(data []byte) []subIDRange {
	ranges := []subIDRange{}
	for line := range bytes.Lines(data) {
		fields := strings.Split(strings.TrimSpace(string(line)), ":")
		if len(fields) != 3 || fields[0] == "" || len(fields[0]) > maxAccountBytes {
			continue
		}
		first, err := strconv.ParseUint(fields[1], 10, 32)
		if err != nil {
			continue
		}
		count, err := strconv.ParseUint(fields[2], 10, 32)
		if err != nil || count == 0 {
			continue
		}
		if ranges = append(ranges, subIDRange{owner: fields[0], first: first, count: count}); len(ranges) == maxSubIDRanges {
			break
		}
	}
	return ranges
}
