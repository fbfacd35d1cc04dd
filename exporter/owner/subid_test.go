package owner

import (
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestSubIDRanges(t *testing.T) {
	ids := newSubIDs("")
	if _, status := ids.owners(100000); status != AccountWaiting {
		t.Errorf("before the file was read the answer is %d, want waiting", status)
	}
	ranges := parseSubIDs([]byte("# comment\nalice:100000:65536\n1002:165536:1\n" +
		"bob:100001:1\nbob:100001:1\n:5:5\nx:-1:5\nx:5:4294967296\nx:7:0\nx:8\n" + strings.Repeat("y", 300) + ":9:9\nlast:4294967290:10"))
	ids.ranges.Store(&ranges)
	for uid, want := range map[uint32][]string{
		99999: nil, 100000: {"alice"}, 100001: {"alice", "bob"}, 165535: {"alice"}, 165536: {"1002"}, 165537: nil,
		5: nil, 7: nil, 9: nil, 4294967289: nil, 4294967290: {"last"}, 4294967295: {"last"},
	} {
		if got, status := ids.owners(uid); !reflect.DeepEqual(got, want) || (status == AccountFound) != (want != nil) {
			t.Errorf("uid %d is lent to %v (%d), want %v", uid, got, status, want)
		}
	}
	if got := len(parseSubIDs([]byte(strings.Repeat("a:1:1\n", maxSubIDRanges+5)))); got != maxSubIDRanges {
		t.Errorf("%d ranges, the bound is %d", got, maxSubIDRanges)
	}
}

func FuzzSubIDs(f *testing.F) {
	f.Add([]byte(townSubUIDs))
	f.Fuzz(func(t *testing.T, data []byte) {
		for _, r := range parseSubIDs(data) {
			if r.owner == "" || r.count == 0 || r.first > 1<<32-1 || r.count > 1<<32-1 {
				t.Fatalf("%+v", r)
			}
		}
	})
}

func TestSubIDFileIsReadAgainWhenItChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "subuid")
	ids := newSubIDs(path)
	var log strings.Builder
	logger := slog.New(slog.NewTextHandler(&log, nil))
	changes := 0
	refresh := func() { ids.refresh(logger, func() { changes++ }) }
	hold := func(what string, wantChanges int, want ...string) {
		t.Helper()
		got, _ := ids.owners(100000)
		if changes != wantChanges || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: lent to %v after %d changes, want %v and %d", what, got, changes, want, wantChanges)
		}
	}
	write := func(text string, age time.Duration) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	refresh()
	if _, status := ids.owners(100000); status != AccountUnknown {
		t.Errorf("without a file the answer is %d, want unknown", status)
	}
	hold("no file", 1)
	write("alice:100000:10\n", time.Hour)
	refresh()
	hold("file", 2, "alice")
	refresh()
	hold("the same file", 2, "alice")
	write("carol:100000:10\n", time.Minute)
	refresh()
	hold("changed file of the same length", 3, "carol")
	write("carol:100000:10\n", time.Second)
	refresh()
	hold("touched file", 3, "carol")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(path, 0o700); err != nil {
		t.Fatal(err)
	}
	refresh()
	refresh()
	hold("what cannot be read leaves what was known", 3, "carol")
	if strings.Count(log.String(), "level=WARN") != 1 {
		t.Errorf("the log should have one line:\n%s", log.String())
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	refresh()
	hold("no file any more", 4)
}

// The ranges are read in the goroutine of the accounts.
func TestAccountsReadSubIDs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "subuid")
	if err := os.WriteFile(path, []byte("alice:100000:10\n"), fs.FileMode(0o644)); err != nil {
		t.Fatal(err)
	}
	h := NewHostAccounts(nil)
	h.subIDs = newSubIDs(path)
	ctx, cancel := context.WithCancel(context.Background())
	var done atomic.Bool
	go func() { _ = h.Run(ctx); done.Store(true) }()
	n := &nameService{HostAccounts: h, t: t}
	n.await("the range", func() bool {
		owners, status := h.Accounts().SubIDOwners(100001)
		return status == AccountFound && reflect.DeepEqual(owners, []string{"alice"})
	})
	if h.Generation() == 0 {
		t.Error("reading the file did not raise the generation")
	}
	cancel()
	n.await("the end", done.Load)
}
