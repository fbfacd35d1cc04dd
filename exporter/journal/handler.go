package journal

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"gpuledger/exporter/usage"
)

const (
	defaultLimit = 1000
	// pageBytes ends a page early: two pages in flight then stay small beside
	// the 48 MiB that the exporter may use in all.
	pageBytes = 4 << 20
	// slotWait is how long a request waits while the pages of others are sent.
	slotWait = 5 * time.Second
	// sendTime is how long a reader may take for its page.
	sendTime = time.Minute
)

// Trailers of a page.
const (
	TrailerNextCursor      = "Next-Cursor"
	TrailerCompleteThrough = "Complete-Through"
)

// Handler serves GET ?after=CURSOR&limit=N: final rows as NDJSON, and in
// trailers Next-Cursor and Complete-Through (RFC 3339, UTC). A page may have
// fewer rows than limit though more are there; one without rows is the last.
// 400 says that a parameter is wrong, 410 that the reader must begin again, 503
// that other readers must finish first, or that the disk is full. Who may read is for the caller to
// check. A page is read into memory first, so that a slow reader holds neither
// the database nor the writer up.
func (j *Journal) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet {
			w.Header().Set("Allow", http.MethodGet)
			http.Error(w, "only GET is served here", http.StatusMethodNotAllowed)
			return
		}
		after, limit, err := pageParameters(r.URL.RawQuery)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		wait := time.NewTimer(slotWait)
		defer wait.Stop()
		select {
		case j.pages <- struct{}{}:
			defer func() { <-j.pages }()
		case <-wait.C:
			w.Header().Set("Retry-After", "5")
			http.Error(w, "other readers are being served: try again", http.StatusServiceUnavailable)
			return
		case <-r.Context().Done():
			return
		}
		var body bytes.Buffer
		encoder := usage.NewEncoder(&body)
		page, err := j.page(r.Context(), after, limit, func(row *usage.Row) (bool, error) {
			err := encoder.Encode(row)
			return body.Len() < pageBytes, err
		})
		if err != nil {
			j.fail(w, r, err)
			return
		}
		j.send(w, r, body.Bytes(), page)
	})
}

func pageParameters(query string) (Cursor, int, error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return "", 0, fmt.Errorf("query: %w", err)
	}
	for name, given := range values {
		if name != "after" && name != "limit" {
			return "", 0, fmt.Errorf("unknown parameter %.100q: there are after and limit", name)
		}
		if len(given) > 1 {
			return "", 0, fmt.Errorf("parameter %s is given %d times", name, len(given))
		}
	}
	after := Cursor(values.Get("after"))
	if after != "" {
		if _, _, err := after.parse(); err != nil {
			return "", 0, fmt.Errorf("parameter after: %w", err)
		}
	}
	limit := defaultLimit
	if text := values.Get("limit"); values.Has("limit") {
		limit, err = strconv.Atoi(text)
		if err != nil || limit < 1 || limit > MaxLimit {
			return "", 0, fmt.Errorf("parameter limit: %.100q is not a number from 1 to %d", text, MaxLimit)
		}
	}
	return after, limit, nil
}

func (j *Journal) fail(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		return // nobody is there to be told
	}
	if errors.Is(err, ErrCursorGone) {
		http.Error(w, ErrCursorGone.Error(), http.StatusGone)
		return
	}
	if errors.Is(err, ErrDiskFull) {
		w.Header().Set("Retry-After", "60")
		http.Error(w, "the journal can't be read, because its disk is full or fails: see the exporter's log", http.StatusServiceUnavailable)
		return
	}
	j.log.Error("journal can't be served", "err", err)
	http.Error(w, "the journal can't be read: see the exporter's log", http.StatusInternalServerError)
}

func (j *Journal) send(w http.ResponseWriter, r *http.Request, body []byte, page Page) {
	// Recorders and some wrappers have no deadline to set; the server takes it
	// off again after the response.
	if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
		j.log.Debug("no write deadline", "err", err)
	}
	header := w.Header()
	header.Set("Content-Type", usage.ContentType)
	header.Set("Cache-Control", "no-store")
	header.Set("Trailer", TrailerNextCursor+", "+TrailerCompleteThrough)
	w.WriteHeader(http.StatusOK)
	if _, err := w.Write(body); err != nil {
		j.log.Info("a reader went away or was too slow", "remote", r.RemoteAddr, "err", err)
		return
	}
	header.Set(TrailerNextCursor, string(page.Next))
	header.Set(TrailerCompleteThrough, page.CompleteThrough.Format(time.RFC3339))
}
