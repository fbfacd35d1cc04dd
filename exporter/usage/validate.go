package usage

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// MaxTextBytes bounds every text of a row, so that a valid row always fits
// into MaxLineBytes however it must be escaped.
const MaxTextBytes = 4096

// FieldError says which field of a row is wrong, and how.
type FieldError struct {
	Line   int    // line of the stream, from 1; 0 for a row that was not read from one
	Field  string // empty if the line as a whole is wrong
	Value  string // as it stands there, quoted if it is text, cut if it is long
	Reason string
}

func (e *FieldError) Error() string {
	var b strings.Builder
	if e.Line > 0 {
		fmt.Fprintf(&b, "line %d: ", e.Line)
	}
	if e.Field != "" {
		fmt.Fprintf(&b, "field %s: ", e.Field)
	}
	if e.Value != "" {
		b.WriteString(e.Value)
		b.WriteString(" ")
	}
	b.WriteString(e.Reason)
	return b.String()
}

// Validate reports the first thing that makes r no row at all, as a
// *FieldError. Seq is not looked at: an open row has none. Sums over rows,
// such as more time in a bucket than the bucket has, are the ledger's to
// judge, because one such row must not keep the others from being pulled.
func (r *Row) Validate() error {
	for _, f := range fields {
		switch v := f.at(r).(type) {
		case *string:
			if err := checkText(f.name, *v); err != nil {
				return err
			}
		case *int64:
			if f.grows && *v < 0 {
				return fieldError(f.name, *v, "is negative")
			}
		}
	}
	for _, required := range []struct{ name, value string }{
		{"run", r.Run}, {"node", r.Node}, {"device", r.Device}, {"card", r.Card},
	} {
		if required.value == "" {
			return fieldError(required.name, "", "is empty")
		}
	}
	switch {
	case r.Index < 0:
		return fieldError("index", r.Index, "is negative")
	case r.Slices < 1:
		return fieldError("slices", r.Slices, "is less than 1")
	case r.Of < r.Slices:
		return fieldError("of", r.Of, "is less than slices, which is "+strconv.FormatInt(r.Slices, 10))
	case !OnBucketEdge(r.Bucket):
		return fieldError("bucket", r.Bucket.UTC().Format(time.RFC3339Nano), "is not on a quarter hour of UTC since 1970")
	case r.UID < -1 || r.UID > 1<<32-1:
		return fieldError("uid", r.UID, "is neither -1 nor a user id")
	}
	switch r.State {
	case StateHeld:
		if r.User == "" {
			return fieldError("user", "", "is empty in a held row")
		}
	case StateIdle, StateDown:
		for _, empty := range []struct{ name, value string }{
			{"user", r.User}, {"kind", r.Kind}, {"workload", r.Workload}, {"project", r.Project}, {"class", r.Class},
		} {
			if empty.value != "" {
				return fieldError(empty.name, empty.value, "is not empty in a row that is "+r.State)
			}
		}
		if r.UID != -1 {
			return fieldError("uid", r.UID, "is not -1 in a row that is "+r.State)
		}
	default:
		return fieldError("state", r.State, "is none of held, idle, down")
	}
	return nil
}

// OnBucketEdge reports whether t is the start of a bucket.
func OnBucketEdge(t time.Time) bool {
	return t.Nanosecond() == 0 && t.Unix() >= 0 && t.Year() <= 9999 && t.Unix()%int64(BucketLength/time.Second) == 0
}

func checkText(name, text string) error {
	switch {
	case len(text) > MaxTextBytes:
		return fieldError(name, text, fmt.Sprintf("is longer than %d bytes", MaxTextBytes))
	case !utf8.ValidString(text):
		return fieldError(name, text, "is not valid UTF-8")
	case strings.IndexByte(text, 0) >= 0:
		return fieldError(name, text, "holds a NUL character")
	}
	return nil
}

func fieldError(name string, value any, reason string) *FieldError {
	e := &FieldError{Field: name, Reason: reason}
	switch v := value.(type) {
	case string:
		e.Value = strconv.Quote(v)
		if len(e.Value) > 100 {
			e.Value = cut(e.Value)
		}
	default:
		e.Value = fmt.Sprint(v)
	}
	return e
}

// cut keeps an error message readable whatever stood in the field.
func cut(text string) string {
	const most = 80
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
