package who

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"gpuledger/exporter/snapshot"
)

// Path is where the exporter serves Handler.
const Path = "/api/v1/who"

// Failure is the JSON body of an answer that is not 200.
type Failure struct {
	Error string `json:"error"`
}

// Handler serves the newest snapshot of store as an Answer for the viewer in
// the request's context (WithViewer); without one, for an unknown viewer. The
// query takes card= and user=, each any number of times (Filter). It answers
// 503 before the first snapshot and 404 for a card that is not there. Now may
// be nil for the wall clock.
func Handler(store *snapshot.Store, now func() time.Time) http.Handler {
	if now == nil {
		now = time.Now
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Answers differ by viewer: none may be kept on the way.
		w.Header().Set("Cache-Control", "no-store")
		s := store.Load()
		if s == nil {
			w.Header().Set("Retry-After", "1")
			WriteFailure(w, http.StatusServiceUnavailable, "the cards have not been read yet: ask again in a second")
			return
		}
		query := r.URL.Query()
		filter := Filter{Cards: query["card"], Users: query["user"]}
		a, unknown := filter.Apply(Build(s, ViewerOf(r.Context()), SourceExporter, now()))
		if len(unknown) > 0 {
			WriteFailure(w, http.StatusNotFound, "no such card here: "+strings.Join(unknown, ", "))
			return
		}
		write(w, http.StatusOK, a)
	})
}

// WriteFailure answers with status and a Failure that says message.
func WriteFailure(w http.ResponseWriter, status int, message string) {
	write(w, status, Failure{Error: message})
}

func write(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	// Answer and Failure have no type that can fail to encode; what is left is
	// a client that went away, which is nobody's error.
	_ = json.NewEncoder(w).Encode(body)
}
