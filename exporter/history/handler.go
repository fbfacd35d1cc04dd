package history

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"gpuledger/exporter/usage"
	"gpuledger/exporter/who"
)

// Path is where the exporter serves Handler.
const Path = "/api/v1/history"

// How far back an answer goes.
const (
	DefaultLength = 24 * time.Hour
	MaxLength     = 31 * 24 * time.Hour
)

const (
	// slotWait is how long a request waits while another is answered.
	slotWait = 5 * time.Second
	// readTime is how long the journal may take.
	readTime = 20 * time.Second
	// maxSelectors is how many cards and users one question may name.
	maxSelectors = 100
)

// Rows gives the journal's rows of the buckets from from to before to, newest
// bucket first, and says where the journal begins and up to where it is
// written: journal.Journal's Back.
type Rows func(ctx context.Context, from, to time.Time, take func(*usage.Row) (more bool, err error)) (begins, committed time.Time, err error)

type readerKey struct{}

// WithReader returns a context that carries the reader of a request. Who that
// is must be proven: by the kernel, a token or a certificate.
func WithReader(ctx context.Context, r Reader) context.Context {
	return context.WithValue(ctx, readerKey{}, r)
}

// Handler serves GET ?since=24h&card=…&user=… as an Answer for the reader in
// the request's context, who is told nothing in full without one. since is how
// long ago (24h, 90m, 7d) or when (RFC 3339), by default a day and at most 31;
// it is moved back to the bucket's start. card and user may be given more than
// once (Filter). It answers 400 for what it does not understand, 404 for a card
// that held nothing then, and 503 while it answers another or the journal can't
// be read. At most one answer is made at a time: it is memory.
func Handler(rows Rows, node string, now func() time.Time, logger *slog.Logger) http.Handler {
	if now == nil {
		now = time.Now
	}
	slot := make(chan struct{}, 1)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-store") // answers differ by reader
		at := now()
		from, filter, err := question(r.URL.RawQuery, at)
		if err != nil {
			who.WriteFailure(w, http.StatusBadRequest, err.Error())
			return
		}
		wait := time.NewTimer(slotWait)
		defer wait.Stop()
		select {
		case slot <- struct{}{}:
			defer func() { <-slot }()
		case <-wait.C:
			w.Header().Set("Retry-After", "5")
			who.WriteFailure(w, http.StatusServiceUnavailable, "others are being answered: ask again in a few seconds")
			return
		case <-r.Context().Done():
			return
		}
		reader, _ := r.Context().Value(readerKey{}).(Reader)
		a, err := read(r.Context(), rows, reader, node, from, at)
		if err != nil {
			if r.Context().Err() != nil {
				return // nobody is there to be told
			}
			logger.Error("History can't be read", "err", err)
			w.Header().Set("Retry-After", "60")
			who.WriteFailure(w, http.StatusServiceUnavailable, "the journal can't be read: see the exporter's log")
			return
		}
		a, unknown := filter.Apply(a)
		if len(unknown) > 0 {
			who.WriteFailure(w, http.StatusNotFound, "no such card in this history: "+strings.Join(unknown, ", "))
			return
		}
		w.Header().Set("Content-Type", "application/json; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		// An Answer has no type that can fail to encode; what is left is a
		// client that went away, which is nobody's error.
		_ = json.NewEncoder(w).Encode(a)
	})
}

// read makes the answer for a reader.
func read(ctx context.Context, rows Rows, reader Reader, node string, from, at time.Time) (Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, readTime)
	defer cancel()
	f := newFold(reader)
	// The bucket under way is wanted whole, and none that a clock far ahead
	// has left in the future.
	to := at.Truncate(usage.BucketLength).Add(usage.BucketLength)
	begins, committed, err := rows(ctx, from, to, func(row *usage.Row) (bool, error) { return f.add(row), nil })
	if err != nil {
		return Answer{}, err
	}
	if committed.After(to) {
		committed = to
	}
	return f.answer(span{from: from, begins: begins, committed: committed, now: at, node: node}), nil
}

func question(query string, now time.Time) (from time.Time, filter Filter, err error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return from, filter, fmt.Errorf("query: %w", err)
	}
	since := DefaultLength.String()
	for name, given := range values {
		switch name {
		case "card":
			filter.Cards = given
		case "user":
			filter.Users = given
		case "since":
			if len(given) > 1 {
				return from, filter, fmt.Errorf("parameter since is given %d times", len(given))
			}
			since = given[0]
		default:
			return from, filter, fmt.Errorf("unknown parameter %.100q: there are since, card and user", name)
		}
		if len(given) > maxSelectors {
			return from, filter, fmt.Errorf("parameter %s is given %d times, at most %d are answered", name, len(given), maxSelectors)
		}
	}
	from, err = time.Parse(time.RFC3339, since)
	if err != nil {
		length, err := ParseLength(since)
		if err != nil {
			return from, filter, fmt.Errorf("parameter since: %w, nor a time such as %s", err, now.UTC().Add(-DefaultLength).Format(time.RFC3339))
		}
		from = now.Add(-length)
	}
	switch ago := now.Sub(from); {
	case ago > MaxLength:
		return from, filter, fmt.Errorf("parameter since: at most %s are answered at once", FormatLength(MaxLength))
	case ago <= 0:
		return from, filter, fmt.Errorf("parameter since: %s is not before now", from.UTC().Format(time.RFC3339))
	}
	return from.UTC().Truncate(usage.BucketLength), filter, nil
}

var days = regexp.MustCompile(`^([0-9]{1,4})d(.*)$`)

// ParseLength reads how long ago: a duration in the form of time.ParseDuration,
// before which there may be days, such as 7d or 1d12h. It is more than 0 and at
// most MaxLength.
func ParseLength(text string) (time.Duration, error) {
	length, rest := time.Duration(0), text
	if match := days.FindStringSubmatch(text); match != nil {
		n, err := strconv.Atoi(match[1])
		if err != nil {
			return 0, fmt.Errorf("%.100q: %w", text, err)
		}
		length, rest = time.Duration(n)*24*time.Hour, match[2]
	}
	if rest != "" || length == 0 {
		part, err := time.ParseDuration(rest)
		if err != nil || part < 0 && length > 0 {
			return 0, fmt.Errorf("%.100q is no length of time such as 24h, 90m or 7d", text)
		}
		length += min(part, 2*MaxLength)
	}
	if length <= 0 || length > MaxLength {
		return 0, fmt.Errorf("%.100q is not more than 0 and at most %s", text, FormatLength(MaxLength))
	}
	return length, nil
}

// FormatLength writes a length of time as ParseLength reads it.
func FormatLength(length time.Duration) string {
	if day := 24 * time.Hour; length >= 2*day && length%day == 0 {
		return fmt.Sprintf("%dd", length/day)
	}
	text := length.String()
	for _, zero := range []struct{ end, cut string }{{"m0s", "0s"}, {"h0m", "0m"}} {
		if strings.HasSuffix(text, zero.end) {
			text = strings.TrimSuffix(text, zero.cut)
		}
	}
	return text
}
