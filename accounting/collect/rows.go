// Package collect brings usage rows to the ledger: it pulls them from exporters
// and reads them from files.
package collect

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"gpuledger/accounting/ledger"
	"gpuledger/exporter/usage"
)

// BatchRows is how many rows go into one transaction at most.
const BatchRows = 10_000

// ErrNotRows is the error of a stream that holds something else than usage rows.
var ErrNotRows = errors.New("not usage rows as gpu-exporter serves them (one JSON object a line)")

// ReadRows reads rows to the end of r and hands them over in batches. A line
// that is somebody's usage and has a value that no row can have is handed over
// as a bad line; any other line that is no row ends the reading with
// ErrNotRows, which names the line, once what came before is handed over.
func ReadRows(r io.Reader, take func(rows []usage.Row, bad []ledger.BadLine) error) error {
	lines := &lineKeeper{from: r}
	decoder := usage.NewDecoder(lines)
	var rows []usage.Row
	var bad []ledger.BadLine
	for {
		row, err := decoder.Decode()
		var wrong *usage.FieldError
		switch {
		case err == nil:
			rows = append(rows, row)
		case errors.As(err, &wrong):
			line := lines.line(decoder.Line())
			badLine, ok := readBadLine(line, wrong)
			if !ok {
				err = fmt.Errorf("%w: %w", wrong, ErrNotRows)
				if len(rows)+len(bad) > 0 {
					err = errors.Join(take(rows, bad), err)
				}
				return err
			}
			bad = append(bad, badLine)
		case errors.Is(err, io.EOF):
			if len(rows) == 0 && len(bad) == 0 {
				return nil
			}
			return take(rows, bad)
		default:
			return err
		}
		if len(rows)+len(bad) >= BatchRows {
			lines.forget(decoder.Line())
			if err := take(rows, bad); err != nil {
				return err
			}
			// The taker may keep what it was given.
			rows, bad = make([]usage.Row, 0, BatchRows), nil
		}
	}
}

// readBadLine takes a line for a row if it says which run metered which device
// when.
func readBadLine(line []byte, wrong *usage.FieldError) (ledger.BadLine, bool) {
	var row struct {
		Run, Device, Node string
		Bucket            any
	}
	// A field of a wrong type leaves the others filled in.
	var mistyped *json.UnmarshalTypeError
	if err := json.Unmarshal(line, &row); err != nil && !errors.As(err, &mistyped) {
		return ledger.BadLine{}, false
	}
	if row.Run == "" || row.Device == "" || row.Bucket == nil {
		return ledger.BadLine{}, false
	}
	reason := usage.FieldError{Field: wrong.Field, Value: wrong.Value, Reason: wrong.Reason}
	bad := ledger.BadLine{Line: string(line), Reason: ledger.ReasonInvalid, Detail: reason.Error(), Node: row.Node}
	if text, ok := row.Bucket.(string); ok {
		if at, err := time.Parse(time.RFC3339, text); err == nil {
			bad.Bucket = &at
		}
	}
	return bad, true
}

// lineKeeper keeps what a decoder has read and not yet decoded, so that a line
// that can't be decoded can be shown as it came.
type lineKeeper struct {
	from  io.Reader
	kept  []byte
	first int // lines before kept
}

func (k *lineKeeper) Read(p []byte) (int, error) {
	n, err := k.from.Read(p)
	k.kept = append(k.kept, p[:n]...)
	return n, err
}

// forget drops lines up to and with number, from 1.
func (k *lineKeeper) forget(number int) {
	at := 0
	for k.first < number {
		end := bytes.IndexByte(k.kept[at:], '\n')
		if end < 0 {
			break
		}
		at += end + 1
		k.first++
	}
	k.kept = append(k.kept[:0], k.kept[at:]...)
}

// line is the line of a number, and what comes before it is forgotten.
func (k *lineKeeper) line(number int) []byte {
	k.forget(number - 1)
	line, _, _ := bytes.Cut(k.kept, []byte{'\n'})
	return bytes.Clone(line)
}
