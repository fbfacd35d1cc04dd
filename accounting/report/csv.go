package report

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"gpuledger/accounting/billing"
)

// Options shape the CSV.
type Options struct {
	// BOM puts a byte order mark first, without which Excel reads names that
	// are not ASCII wrongly. Other readers may stumble over it.
	BOM bool
}

const byteOrderMark = "\uFEFF"

// WriteCSV writes a statement as the monthly CSV: UTF-8, CRLF, the header of
// Columns, one record a line in the statement's order. The same statement
// gives the same bytes.
//
// It does not use encoding/csv, which drops carriage returns in cells when it
// ends records with CRLF: a name must come back as it was.
func WriteCSV(w io.Writer, statement billing.Statement, options Options) error {
	out := bufio.NewWriter(w)
	if options.BOM {
		out.WriteString(byteOrderMark)
	}
	for i, column := range Columns {
		if i > 0 {
			out.WriteByte(',')
		}
		out.WriteString(column.Name)
	}
	out.WriteString("\r\n")
	for i := range statement.Lines {
		r := row{&statement, &statement.Lines[i]}
		for j, column := range Columns {
			if j > 0 {
				out.WriteByte(',')
			}
			cell := column.cell(r)
			if column.Text {
				cell = neutralise(printable(cell))
			}
			writeCell(out, cell)
		}
		out.WriteString("\r\n")
	}
	if err := out.Flush(); err != nil { // holds the first error of all writes
		return fmt.Errorf("write the CSV of %s: %w", statement.Period.Name, err)
	}
	return nil
}

func writeCell(out *bufio.Writer, cell string) {
	if !strings.ContainsAny(cell, ",\"\r\n") {
		out.WriteString(cell)
		return
	}
	out.WriteByte('"')
	out.WriteString(strings.ReplaceAll(cell, `"`, `""`))
	out.WriteByte('"')
}

// neutralise keeps spreadsheets from running a name: a cell that they would
// take for a formula, or that starts with ' itself, gets a ' before it.
// Decoding takes exactly one away.
func neutralise(cell string) string {
	if cell != "" && strings.IndexByte("=+-@\t\r'", cell[0]) >= 0 {
		return "'" + cell
	}
	return cell
}

// printable replaces bytes that are not UTF-8, and NUL. Statements have none;
// those read back from elsewhere might.
func printable(cell string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(cell, "\uFFFD"), "\x00", "\uFFFD")
}

// Record is one record of the monthly CSV by column name, its text cells
// decoded.
type Record map[string]string

// ErrCSV is the error of a file that is not a monthly CSV.
var ErrCSV = errors.New("not a monthly CSV")

// ReadCSV reads what WriteCSV wrote, with or without a byte order mark. It
// takes the one ' from text cells that neutralising put there.
func ReadCSV(r io.Reader) ([]Record, error) {
	content, err := io.ReadAll(r)
	if err != nil {
		return nil, fmt.Errorf("read the CSV: %w", err)
	}
	rows, err := splitCSV(strings.TrimPrefix(string(content), byteOrderMark))
	if err != nil {
		return nil, err
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%w: it is empty", ErrCSV)
	}
	for i, cells := range rows {
		if len(cells) != len(Columns) {
			return nil, fmt.Errorf("%w: record %d has %d cells, not %d", ErrCSV, i+1, len(cells), len(Columns))
		}
	}
	for i, column := range Columns {
		if rows[0][i] != column.Name {
			return nil, fmt.Errorf("%w: column %d is %q, not %q", ErrCSV, i+1, rows[0][i], column.Name)
		}
	}
	records := make([]Record, 0, len(rows)-1)
	for _, cells := range rows[1:] {
		record := make(Record, len(Columns))
		for i, column := range Columns {
			if column.Text {
				cells[i] = strings.TrimPrefix(cells[i], "'")
			}
			record[column.Name] = cells[i]
		}
		records = append(records, record)
	}
	return records, nil
}

// splitCSV splits RFC 4180 text into cells, keeping every byte of them.
func splitCSV(content string) ([][]string, error) {
	var rows [][]string
	var cells []string
	for rest := content; rest != ""; {
		var cell strings.Builder
		if strings.HasPrefix(rest, `"`) {
			rest = rest[1:]
			for {
				end := strings.IndexByte(rest, '"')
				if end < 0 {
					return nil, fmt.Errorf("%w: record %d has a quote that does not end", ErrCSV, len(rows)+1)
				}
				cell.WriteString(rest[:end])
				rest = rest[end+1:]
				if !strings.HasPrefix(rest, `"`) {
					break
				}
				cell.WriteByte('"')
				rest = rest[1:]
			}
		} else {
			end := strings.IndexAny(rest, ",\r")
			if end < 0 {
				end = len(rest)
			}
			cell.WriteString(rest[:end])
			rest = rest[end:]
		}
		cells = append(cells, cell.String())
		if after, ok := strings.CutPrefix(rest, ","); ok {
			rest = after
			continue
		}
		after, ok := strings.CutPrefix(rest, "\r\n")
		if !ok {
			return nil, fmt.Errorf("%w: record %d does not end with CRLF", ErrCSV, len(rows)+1)
		}
		rest = after
		rows, cells = append(rows, cells), nil
	}
	if cells != nil {
		return nil, fmt.Errorf("%w: its last record is cut off", ErrCSV)
	}
	return rows, nil
}
