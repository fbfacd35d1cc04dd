package journal

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gpuledger/exporter/usage"
)

func back(t *testing.T, j *Journal, from, to time.Time) (rows []usage.Row, begins, committed time.Time) {
	t.Helper()
	begins, committed, err := j.Back(t.Context(), from, to, func(row *usage.Row) (bool, error) {
		rows = append(rows, *row)
		return true, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows, begins, committed
}

func TestBackGivesFinalAndOpenRowsNewestFirst(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	if rows, begins, committed := back(t, j, start, bucketStart(9)); len(rows) != 0 || !begins.IsZero() || committed.Unix() != 0 {
		t.Errorf("an empty journal gives %v, from %v to %v", rows, begins, committed)
	}
	instant := bucketStart(4).Add(time.Minute)
	mustWrite(t, j, Batch{
		// Bucket 1 comes late, as after a clock that was set back.
		Final: []usage.Row{rowOf("r1", 0, "alice", 10), rowOf("r1", 2, "alice", 12), rowOf("r1", 3, "bob", 13), rowOf("r1", 1, "alice", 11)},
		Open:  []usage.Row{rowOf("r1", 4, "bob", 14), rowOf("r1", 3, "carol", 15)}, InstantUS: instant.UnixMicro(), OpenFrom: bucketStart(3),
	})
	rows, begins, committed := back(t, j, bucketStart(1), bucketStart(5))
	if !begins.Equal(bucketStart(0)) || !committed.Equal(instant) {
		t.Errorf("from %v to %v", begins, committed)
	}
	var got []string
	for _, row := range rows {
		got = append(got, fmt.Sprintf("%d %s %d", row.Bucket.Sub(start)/usage.BucketLength, row.User, row.GPUUS))
	}
	if !slices.IsSortedFunc(rows, func(a, b usage.Row) int { return b.Bucket.Compare(a.Bucket) }) {
		t.Errorf("not newest first: %v", got)
	}
	slices.Sort(got)
	if want := "[1 alice 11 2 alice 12 3 bob 13 3 carol 15 4 bob 14]"; fmt.Sprint(got) != want {
		t.Errorf("got %v, want %s", got, want)
	}
	if rows, _, _ := back(t, j, bucketStart(1), bucketStart(2)); len(rows) != 1 {
		t.Errorf("one bucket gives %d rows", len(rows))
	}
	// The newest buckets are read by index, not sorted out of all there are.
	var plan strings.Builder
	explained, err := j.reader.Query("EXPLAIN QUERY PLAN "+selectBack, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer explained.Close()
	for explained.Next() {
		var id, parent, unused int
		var detail string
		if err := explained.Scan(&id, &parent, &unused, &detail); err != nil {
			t.Fatal(err)
		}
		plan.WriteString(detail + "\n")
	}
	if !strings.Contains(plan.String(), "final USING INDEX final_bucket") || strings.Count(plan.String(), "TEMP B-TREE") != 1 {
		t.Errorf("plan:\n%s", &plan)
	}
}

func TestBackEndsWhenItsReaderWantsNoMore(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	var all []usage.Row
	for i := range 100 {
		all = append(all, rowOf("r1", i, "alice", 1))
	}
	mustWrite(t, j, Batch{Final: all})
	count := 0
	if _, _, err := j.Back(t.Context(), start, bucketStart(100), func(*usage.Row) (bool, error) { count++; return count < 7, nil }); err != nil || count != 7 {
		t.Errorf("%d rows, %v", count, err)
	}
	mine := errors.New("mine")
	if _, _, err := j.Back(t.Context(), start, bucketStart(100), func(*usage.Row) (bool, error) { return true, mine }); !errors.Is(err, mine) {
		t.Errorf("got %v", err)
	}
}

// A reader in the middle of its rows holds no write up, and sees none of it:
// every read is one state of the journal.
func TestBackBesideAWriter(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", 0, "alice", 1)}, Open: []usage.Row{rowOf("r1", 1, "alice", 1), rowOf("r1", 1, "bob", 1)}})
	inside, written := make(chan struct{}), make(chan struct{})
	var once sync.Once
	var done sync.WaitGroup
	done.Go(func() {
		<-inside
		for us := int64(2); us < 50; us++ {
			// The two grow together, in one transaction.
			mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", 1, "alice", us), rowOf("r1", 1, "bob", us)}})
		}
		close(written)
	})
	var seen []int64
	_, _, err := j.Back(t.Context(), start, bucketStart(9), func(row *usage.Row) (bool, error) {
		once.Do(func() {
			close(inside)
			select {
			case <-written: // while this transaction is open
			case <-time.After(30 * time.Second):
				t.Error("a reader holds the writer up")
			}
		})
		seen = append(seen, row.GPUUS)
		return true, nil
	})
	done.Wait()
	if err != nil || !slices.Equal(seen, []int64{1, 1, 1}) {
		t.Errorf("%v, %v: want the state before the writes", seen, err)
	}
	// And beside a writer that never rests.
	stop := make(chan struct{})
	done.Go(func() {
		for us := int64(100); ; us++ {
			select {
			case <-stop:
				return
			default:
				mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", 1, "alice", us), rowOf("r1", 1, "bob", us)}})
			}
		}
	})
	for range 50 {
		rows, _, _ := back(t, j, bucketStart(1), bucketStart(2))
		if len(rows) != 2 || rows[0].GPUUS != rows[1].GPUUS {
			t.Errorf("half a write is seen: %+v", rows)
		}
	}
	close(stop)
	done.Wait()
}
