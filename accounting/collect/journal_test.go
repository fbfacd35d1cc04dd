package collect_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"gpuledger/accounting/collect"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/usage"
)

// The exporter's own journal is served to the end, and begun anew when it is
// lost: the ledger holds each row once.
func TestPullsFromAJournal(t *testing.T) {
	rows := rowsOf(0)
	openJournal := func(rows []usage.Row) *journal.Journal {
		dir := t.TempDir()
		j, err := journal.Open(context.Background(), journal.Options{
			Dir: dir, Node: "gpu01", BootID: "boot", LockPath: filepath.Join(t.TempDir(), "lock"),
			Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return now },
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := j.Close(context.Background(), journal.Batch{}); err != nil {
				t.Error(err)
			}
		})
		end := rows[len(rows)-1].Bucket.Add(usage.BucketLength)
		if err := j.Write(context.Background(), journal.Batch{Final: rows, InstantUS: end.UnixMicro(), OpenFrom: end}); err != nil {
			t.Fatal(err)
		}
		return j
	}
	first := openJournal(rows[:24])
	var serving atomic.Pointer[http.Handler]
	serve := func(handler http.Handler) { serving.Store(&handler) }
	serve(first.Handler())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { (*serving.Load()).ServeHTTP(w, r) }))
	t.Cleanup(server.Close)
	f := collecting(t, collect.Options{Targets: []string{server.URL}})
	f.wantRows(t, 24)

	await(t, "complete-through", func() bool {
		target, err := f.store.Target(context.Background(), server.URL)
		return err == nil && target.Node == "gpu01" && target.CompleteThrough.Equal(rows[23].Bucket.Add(usage.BucketLength))
	})

	serve(openJournal(rows).Handler())
	f.wantRows(t, len(rows))
	if f.audit(t).ContentHash != hashOf(t, rows...) {
		t.Error("the ledger's content is another one")
	}
}
