package journal

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"gpuledger/exporter/usage"
)

func fetch(t *testing.T, server *httptest.Server, query string) (*http.Response, []usage.Row, string) {
	t.Helper()
	response, err := http.Get(server.URL + "/api/v1/usage" + query)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	var rows []usage.Row
	if response.StatusCode == http.StatusOK {
		decoder := usage.NewDecoder(strings.NewReader(string(body)))
		for {
			row, err := decoder.Decode()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			rows = append(rows, row)
		}
	}
	return response, rows, string(body)
}

func TestHandlerServesPages(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	server := httptest.NewServer(j.Handler())
	defer server.Close()
	response, rows, _ := fetch(t, server, "")
	if len(rows) != 0 || response.Trailer.Get("Next-Cursor") != "" || response.Trailer.Get("Complete-Through") != "1970-01-01T00:00:00Z" {
		t.Errorf("empty journal: %d rows, trailers %v", len(rows), response.Trailer)
	}
	var all []usage.Row
	for i := range 2500 {
		all = append(all, rowOf("r1", i, "al\"ice\n", 1))
	}
	mustWrite(t, j, Batch{Final: all, InstantUS: bucketStart(2500).UnixMicro(), OpenFrom: bucketStart(2500)})
	for _, limit := range []string{"", "1", "777", "10000"} {
		query := url.Values{}
		if limit != "" {
			query.Set("limit", limit)
		}
		count := 0
		for pages := 0; pages < 3; pages++ {
			response, rows, _ := fetch(t, server, "?"+query.Encode())
			if got := response.Header.Get("Content-Type"); got != usage.ContentType {
				t.Fatalf("content type %s", got)
			}
			for _, row := range rows {
				if row.Seq != int64(count+1) || !row.SameContent(&all[count]) {
					t.Fatalf("row %d is %+v", count, row)
				}
				count++
			}
			want := bucketStart(min(count, 2500)).Format(time.RFC3339)
			if got := response.Trailer.Get("Complete-Through"); got != want {
				t.Fatalf("after %d rows complete through %s, want %s", count, got, want)
			}
			if got := response.Trailer.Get("Next-Cursor"); got == "" || got == query.Get("after") && len(rows) > 0 {
				t.Fatalf("next cursor %q", got)
			}
			query.Set("after", response.Trailer.Get("Next-Cursor"))
		}
	}
}

func TestHandlerRefuses(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	server := httptest.NewServer(j.Handler())
	defer server.Close()
	for query, want := range map[string]string{
		"?limit=0":                              "400 parameter limit",
		"?limit=10001":                          "400 parameter limit",
		"?limit=":                               "400 parameter limit",
		"?limit=1&limit=2":                      "400 parameter limit is given 2 times",
		"?after=nonsense":                       "400 parameter after: not a cursor",
		"?cursor=1":                             "400 unknown parameter",
		"?after=%zz":                            "400 query",
		"?after=1-" + strings.Repeat("00", 16):  "410 this journal does not have the row",
		"?after=99-" + strings.Repeat("ab", 16): "410 this journal does not have the row",
	} {
		response, _, body := fetch(t, server, query)
		if got := fmt.Sprintf("%d %s", response.StatusCode, body); !strings.HasPrefix(got, want) {
			t.Errorf("%s: got %s, want %s", query, got, want)
		}
	}
	response, err := http.Post(server.URL, "text/plain", nil)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %s", response.Status)
	}
}

// Readers that ask and never read hold neither the writer nor the log up.
func TestHangingReadersDoNotBlockWrites(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	var all []usage.Row
	for i := range 10_000 {
		all = append(all, rowOf("r1", i, "alice", 1))
	}
	mustWrite(t, j, Batch{Final: all})
	server := httptest.NewServer(j.Handler())
	defer server.Close()
	for range cap(j.pages) {
		connection, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer connection.Close()
		if err := connection.(*net.TCPConn).SetReadBuffer(4096); err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(connection, "GET /?limit=10000 HTTP/1.1\r\nHost: x\r\n\r\n")
		// The answer has begun, so the page is read and is being sent.
		if _, err := bufio.NewReaderSize(connection, 16).ReadByte(); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 50 {
		mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r2", i, "alice", 1)}})
	}
	var busy int
	if err := j.writer.QueryRow("PRAGMA wal_checkpoint(TRUNCATE)").Scan(&busy, new(int), new(int)); err != nil || busy != 0 {
		t.Errorf("a reader holds the log: busy %d, %v", busy, err)
	}
}

// Readers and the writer at once: each reader sees every row once, in order.
func TestReadersBesideTheWriter(t *testing.T) {
	j := mustOpen(t, optionsIn(t.TempDir()))
	closeLater(t, j)
	const buckets = 60
	var wait sync.WaitGroup
	for reader := range 3 {
		wait.Go(func() {
			var cursor Cursor
			seen := 0
			for deadline := time.Now().Add(time.Minute); seen < buckets; {
				page, err := j.Usage(t.Context(), cursor, reader+1)
				if err != nil {
					t.Error(err)
					return
				}
				for _, row := range page.Rows {
					if !row.Bucket.Equal(bucketStart(seen)) {
						t.Errorf("reader %d: row %d is of %v", reader, seen, row.Bucket)
					}
					seen++
				}
				if page.CompleteThrough.After(bucketStart(seen)) {
					t.Errorf("reader %d: complete through %v after %d rows", reader, page.CompleteThrough, seen)
				}
				if cursor = page.Next; time.Now().After(deadline) {
					t.Errorf("reader %d has seen %d rows", reader, seen)
					return
				}
				j.Stats()
			}
		})
	}
	for i := range buckets {
		mustWrite(t, j, Batch{Open: []usage.Row{rowOf("r1", i, "alice", 1)}, InstantUS: bucketStart(i).UnixMicro() + 1, OpenFrom: bucketStart(i)})
		mustWrite(t, j, Batch{Final: []usage.Row{rowOf("r1", i, "alice", 2)}, InstantUS: bucketStart(i + 1).UnixMicro(), OpenFrom: bucketStart(i + 1)})
	}
	wait.Wait()
}
