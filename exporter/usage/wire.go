package usage

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"
	"unicode/utf8"
)

// ContentType is the media type of rows on the wire: one JSON object a line.
const ContentType = "application/x-ndjson"

// MaxLineBytes bounds a line of the wire, its newline included.
const MaxLineBytes = 1 << 20

// bucketLayout is RFC 3339 in UTC, with Z and whole seconds only.
const bucketLayout = "2006-01-02T15:04:05Z"

// AppendJSON appends r as one JSON object without a newline: every field, in
// the order of the wire. It does not validate.
func AppendJSON(dst []byte, r *Row) []byte {
	for i, f := range fields {
		if i == 0 {
			dst = append(dst, '{')
		} else {
			dst = append(dst, ',')
		}
		dst = append(dst, '"')
		dst = append(dst, f.name...)
		dst = append(dst, '"', ':')
		switch v := f.at(r).(type) {
		case *string:
			dst = appendText(dst, *v)
		case *int64:
			dst = strconv.AppendInt(dst, *v, 10)
		case *int:
			dst = strconv.AppendInt(dst, int64(*v), 10)
		case *bool:
			dst = strconv.AppendBool(dst, *v)
		case *time.Time:
			dst = append(dst, '"')
			dst = v.UTC().AppendFormat(dst, bucketLayout)
			dst = append(dst, '"')
		}
	}
	return append(dst, '}')
}

func appendText(dst []byte, text string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < 0x20 || c == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
		default:
			dst = append(dst, c)
		}
	}
	return append(dst, '"')
}

// Encoder writes final rows, one a line.
type Encoder struct {
	w    io.Writer
	line []byte
}

// NewEncoder returns an encoder that writes to w, one Write call a row.
func NewEncoder(w io.Writer) *Encoder { return &Encoder{w: w} }

// Encode writes one row. A row that a Decoder would refuse is an error, a
// *FieldError, and nothing is written.
func (e *Encoder) Encode(r *Row) error {
	if err := r.Validate(); err != nil {
		return fmt.Errorf("encode usage row: %w", err)
	}
	if r.Seq < 1 {
		return fmt.Errorf("encode usage row: %w", fieldError("seq", r.Seq, "is less than 1: the row is not final"))
	}
	e.line = append(AppendJSON(e.line[:0], r), '\n')
	if _, err := e.w.Write(e.line); err != nil {
		return fmt.Errorf("write usage row %d: %w", r.Seq, err)
	}
	return nil
}

// Decoder reads final rows, one a line. Fields it does not know are passed
// over, because fields are only ever added; every field it knows must be
// there, once, with a value that a row can have. Those that were added since
// there are rows may be missing. Blank lines are passed over.
type Decoder struct {
	r    *bufio.Reader
	line int
	buf  []byte
	err  error // a failed read; final
}

// NewDecoder returns a decoder that reads from r.
func NewDecoder(r io.Reader) *Decoder {
	return &Decoder{r: bufio.NewReaderSize(r, 64<<10)}
}

// Line is the number of the line that Decode read last, from 1.
func (d *Decoder) Line() int { return d.line }

// Decode returns the next row, or io.EOF after the last. A line that is not a
// valid row gives a *FieldError with its line and field; the next call goes on
// with the line after it. Any other error is a failed read, and final.
func (d *Decoder) Decode() (Row, error) {
	for {
		if d.err != nil {
			return Row{}, d.err
		}
		line, tooLong := d.next()
		if d.err != nil && d.err != io.EOF {
			d.err = fmt.Errorf("read usage rows after line %d: %w", d.line, d.err)
			return Row{}, d.err
		}
		if len(bytes.TrimSpace(line)) == 0 && !tooLong {
			continue
		}
		row, err := Row{}, &FieldError{Reason: fmt.Sprintf("longer than %d bytes", MaxLineBytes)}
		if !tooLong {
			row, err = parseLine(line)
		}
		if err != nil {
			err.Line = d.line
			return Row{}, err
		}
		return row, nil
	}
}

// next reads up to the next newline and keeps at most MaxLineBytes of it.
func (d *Decoder) next() (line []byte, tooLong bool) {
	d.buf = d.buf[:0]
	for {
		part, err := d.r.ReadSlice('\n')
		if len(d.buf)+len(part) > MaxLineBytes {
			tooLong = true
		} else {
			d.buf = append(d.buf, part...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if err == nil || len(d.buf) > 0 || tooLong {
			d.line++
		}
		d.err = err
		return d.buf, tooLong
	}
}

func parseLine(line []byte) (Row, *FieldError) {
	line = bytes.TrimSpace(line)
	decoder := json.NewDecoder(bytes.NewReader(line))
	notJSON := func(err error) *FieldError {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return &FieldError{Reason: "ends within the row: the stream was cut off"}
		}
		return &FieldError{Reason: "not a JSON object: " + err.Error()}
	}
	start, err := decoder.Token()
	if err != nil {
		return Row{}, notJSON(err)
	}
	if start != json.Delim('{') {
		return Row{}, &FieldError{Reason: "not a JSON object"}
	}
	var row Row
	var raw json.RawMessage
	seen := make([]bool, len(fields))
	for decoder.More() {
		key, err := decoder.Token()
		if err != nil {
			return Row{}, notJSON(err)
		}
		if err := decoder.Decode(&raw); err != nil {
			return Row{}, notJSON(err)
		}
		i, known := fieldIndex[key.(string)]
		if !known {
			continue
		}
		if seen[i] {
			return Row{}, &FieldError{Field: fields[i].name, Reason: "stands there twice"}
		}
		seen[i] = true
		if err := parseValue(fields[i], &row, raw); err != nil {
			return Row{}, err
		}
	}
	if _, err := decoder.Token(); err != nil {
		return Row{}, notJSON(err)
	}
	if len(bytes.TrimSpace(line[decoder.InputOffset():])) != 0 {
		return Row{}, &FieldError{Reason: "more than one JSON object"}
	}
	for i, f := range fields {
		if !seen[i] && !f.later {
			return Row{}, &FieldError{Field: f.name, Reason: "is missing"}
		}
	}
	if row.Seq < 1 {
		return Row{}, fieldError("seq", row.Seq, "is less than 1")
	}
	if err := row.Validate(); err != nil {
		var wrong *FieldError
		errors.As(err, &wrong)
		return Row{}, wrong
	}
	return row, nil
}

func parseValue(f field, row *Row, raw json.RawMessage) *FieldError {
	wrong := func(reason string) *FieldError {
		return &FieldError{Field: f.name, Value: cut(string(raw)), Reason: reason}
	}
	text := func(into *string) *FieldError {
		if !utf8.Valid(raw) {
			return fieldError(f.name, string(raw), "is not valid UTF-8")
		}
		if raw[0] != '"' || json.Unmarshal(raw, into) != nil {
			return wrong("is not text")
		}
		return nil
	}
	switch v := f.at(row).(type) {
	case *string:
		return text(v)
	case *int64:
		n, err := strconv.ParseInt(string(raw), 10, 64)
		if err != nil {
			return wrong("is not a whole number of 64 bits")
		}
		*v = n
	case *int:
		n, err := strconv.ParseInt(string(raw), 10, 32)
		if err != nil {
			return wrong("is not a whole number of 32 bits")
		}
		*v = int(n)
	case *bool:
		switch string(raw) {
		case "true":
			*v = true
		case "false":
			*v = false
		default:
			return wrong("is neither true nor false")
		}
	case *time.Time:
		var written string
		if err := text(&written); err != nil {
			return err
		}
		t, err := time.Parse(bucketLayout, written)
		if err != nil {
			return wrong("is not an RFC 3339 time in UTC with Z and whole seconds")
		}
		*v = canonical(t)
	}
	return nil
}
