package history

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"gpuledger/exporter/usage"
)

func ask(t *testing.T, rows Rows, query string) (int, Answer, string) {
	t.Helper()
	now := func() time.Time { return bucketAt(200).Add(time.Minute) }
	recorder := httptest.NewRecorder()
	request := httptest.NewRequest("GET", Path+query, nil)
	Handler(rows, "gpu01", now, slog.New(slog.NewTextHandler(io.Discard, nil))).
		ServeHTTP(recorder, request.WithContext(WithReader(request.Context(), Reader{UID: 1001, Known: true})))
	var a Answer
	if recorder.Code == 200 {
		if err := json.Unmarshal(recorder.Body.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
	}
	return recorder.Code, a, recorder.Body.String()
}

func TestQuestions(t *testing.T) {
	var from, to time.Time
	rows := func(_ context.Context, f, u time.Time, take func(*usage.Row) (bool, error)) (time.Time, time.Time, error) {
		from, to = f, u
		r := row(199, "held", "alice", 1001, bucketUS, nil)
		_, err := take(&r)
		return begin, bucketAt(200), err
	}
	for query, want := range map[string]time.Time{
		"":                            bucketAt(200 - 96),
		"?since=1h":                   bucketAt(196),
		"?since=61m":                  bucketAt(196), // the start of a bucket
		"?since=62m":                  bucketAt(195),
		"?since=2d":                   bucketAt(8),
		"?since=2026-11-03T09:17:00Z": bucketAt(5),
		"?since=" + url.QueryEscape("2026-11-03T10:17:00+01:00"): bucketAt(5),
		"?card=0&user=alice": bucketAt(200 - 96),
	} {
		code, a, body := ask(t, rows, query)
		if code != 200 || !from.Equal(want) || !to.Equal(bucketAt(201)) || !a.From.Equal(want) || len(a.Cards) != 1 || a.Node != "gpu01" || *a.ViewerUID != 1001 {
			t.Errorf("%s: %d from %v to %v, want from %v: %s", query, code, from, to, want, body)
		}
	}
	for query, want := range map[string]string{
		"?since=":                     `400 {"error":"parameter since: \"\" is no length`,
		"?since=32d":                  `400 {"error":"parameter since: \"32d\" is not more than 0 and at most 31d`,
		"?since=1h&since=2h":          "400",
		"?since=2026-09-03T09:17:00Z": `400 {"error":"parameter since: at most 31d`,
		"?since=2030-09-03T09:17:00Z": "400",
		"?sinse=1h":                   "400",
		"?%zz":                        "400",
		"?card=" + strings.Repeat("&card=", maxSelectors): "400",
		"?card=3": `404 {"error":"no such card in this history: 3`,
	} {
		code, _, body := ask(t, rows, query)
		if got := strings.TrimSpace(strings.Join([]string{map[int]string{400: "400", 404: "404"}[code], body}, " ")); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %d %s, want %s", query, code, body, want)
		}
	}
	broken := func(context.Context, time.Time, time.Time, func(*usage.Row) (bool, error)) (time.Time, time.Time, error) {
		return time.Time{}, time.Time{}, errors.New("disk /var/lib is full")
	}
	if code, _, body := ask(t, broken, ""); code != 503 || strings.Contains(body, "/var/lib") {
		t.Errorf("a journal that can't be read: %d %s", code, body)
	}
}
