package usage

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

var update = flag.Bool("update", false, "write the golden files anew")

func exampleRow() Row {
	return Row{
		Key: Key{
			Run: "01K3ABCDEFGHJKMNPQRSTVWXYZ", Device: "GPU-1f0e", Slices: 1, Of: 1,
			Bucket: time.Date(2026, 11, 3, 8, 15, 0, 0, time.UTC), State: StateHeld,
			User: "alice", UID: 1001, Kind: "docker", Workload: "train", Project: "vision",
		},
		Seq: 1234, Node: "gpu01", Card: "GPU-1f0e", Model: "NVIDIA H200",
		Amounts: Amounts{
			GPUUS: 450000000, ShareUS: 450000000, HeldUS: 900000000, ActiveUS: 612000000, ActiveKnownUS: 900000000,
			MemoryKiBSeconds: 35156250000, MemoryKnownUS: 900000000, EnergyMJ: 270000000,
		},
		PeakMemoryBytes: 42949672960, PeakTemperatureC: 71, AttributedBy: "label",
	}
}

// The golden line is the example of the contract: its bytes are the wire.
func TestGoldenLine(t *testing.T) {
	golden := filepath.Join("testdata", "row.ndjson")
	row := exampleRow()
	var got bytes.Buffer
	if err := NewEncoder(&got).Encode(&row); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("the wire changed (-golden +now):\n%s", diff)
	}
	decoded, err := NewDecoder(bytes.NewReader(want)).Decode()
	if err != nil {
		t.Fatal(err)
	}
	if decoded != row {
		t.Errorf("decoded %+v, want %+v", decoded, row)
	}
}

// Every exported number and text of Row must be on the wire: a field that is
// added to the struct and forgotten in the table would be lost silently.
func TestEveryFieldIsOnTheWire(t *testing.T) {
	asStruct, err := json.Marshal(exampleRow())
	if err != nil {
		t.Fatal(err)
	}
	var inStruct map[string]any
	if err := json.Unmarshal(asStruct, &inStruct); err != nil {
		t.Fatal(err)
	}
	for name := range inStruct {
		if _, ok := fieldIndex[name]; !ok {
			t.Errorf("field %s of Row is not in the table of the wire", name)
		}
	}
	if len(inStruct) != len(fields) {
		t.Errorf("Row has %d fields, the wire %d", len(inStruct), len(fields))
	}
	row := exampleRow()
	var onWire map[string]any
	if err := json.Unmarshal(AppendJSON(nil, &row), &onWire); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(inStruct, onWire); diff != "" {
		t.Errorf("encoding/json and the wire differ (-json +wire):\n%s", diff)
	}
}

func drawRow(t *rapid.T) Row {
	text := rapid.Map(rapid.String(), func(s string) string {
		s = strings.ReplaceAll(strings.ToValidUTF8(s, ""), "\x00", "")
		if len(s) > MaxTextBytes {
			s = ""
		}
		return s
	})
	some := rapid.Map(text, func(s string) string { return "x" + s })
	amount := rapid.Int64Range(0, math.MaxInt64)
	of := rapid.Int64Range(1, 8).Draw(t, "of")
	row := Row{
		Key: Key{
			Run: some.Draw(t, "run"), Device: some.Draw(t, "device"), Of: of, Slices: rapid.Int64Range(1, of).Draw(t, "slices"),
			Bucket: time.Unix(900*rapid.Int64Range(0, 5_000_000).Draw(t, "bucket"), 0).UTC(),
			State:  rapid.SampledFrom([]string{StateHeld, StateIdle, StateDown}).Draw(t, "state"), UID: -1,
		},
		Seq: rapid.Int64Range(1, math.MaxInt64).Draw(t, "seq"), Node: some.Draw(t, "node"), Card: some.Draw(t, "card"),
		Index: rapid.IntRange(0, 64).Draw(t, "index"), Model: text.Draw(t, "model"), Profile: text.Draw(t, "profile"),
		Amounts: Amounts{
			GPUUS: amount.Draw(t, "gpu"), ShareUS: amount.Draw(t, "share"), HeldUS: amount.Draw(t, "held"),
			ReservedUS: amount.Draw(t, "reserved"), ActiveUS: amount.Draw(t, "active"), ActiveKnownUS: amount.Draw(t, "known"),
			IdleUS: amount.Draw(t, "idle"), MemoryKiBSeconds: amount.Draw(t, "memory"), MemoryKnownUS: amount.Draw(t, "mknown"),
			EnergyMJ: amount.Draw(t, "energy"),
		},
		PeakMemoryBytes: amount.Draw(t, "peak"), PeakTemperatureC: amount.Draw(t, "temp"),
		Estimated: rapid.Bool().Draw(t, "estimated"), AttributedBy: text.Draw(t, "by"),
	}
	if row.State == StateHeld {
		row.User, row.UID, row.Kind = some.Draw(t, "user"), rapid.Int64Range(-1, 1<<32-1).Draw(t, "uid"), text.Draw(t, "kind")
		row.Workload, row.Project, row.Class = text.Draw(t, "workload"), text.Draw(t, "project"), text.Draw(t, "class")
	}
	return row
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows := rapid.SliceOfN(rapid.Custom(drawRow), 0, 5).Draw(t, "rows")
		var wire bytes.Buffer
		encoder := NewEncoder(&wire)
		for i := range rows {
			if err := encoder.Encode(&rows[i]); err != nil {
				t.Fatal(err)
			}
		}
		decoder := NewDecoder(iotest.OneByteReader(&wire))
		for i := range rows {
			got, err := decoder.Decode()
			if err != nil {
				t.Fatal(err)
			}
			if got != rows[i] {
				t.Fatalf("row %d: got %+v, want %+v", i, got, rows[i])
			}
		}
		if _, err := decoder.Decode(); err != io.EOF {
			t.Fatalf("after the last row: %v, want EOF", err)
		}
	})
}

func TestLongestRowFitsALine(t *testing.T) {
	row := exampleRow()
	longest := strings.Repeat("\x01", MaxTextBytes)
	for _, f := range fields {
		switch v := f.at(&row).(type) {
		case *string:
			if f.name != "state" {
				*v = longest
			}
		case *int64:
			if f.grows {
				*v = math.MaxInt64
			}
		}
	}
	var wire bytes.Buffer
	if err := NewEncoder(&wire).Encode(&row); err != nil {
		t.Fatal(err)
	}
	got, err := NewDecoder(&wire).Decode()
	if err != nil {
		t.Fatal(err)
	}
	if got != row {
		t.Error("the longest row did not come back as it was")
	}
}

func TestFutureFieldsAreTolerated(t *testing.T) {
	row := exampleRow()
	line := string(AppendJSON(nil, &row))
	line = `{"new":{"a":[1,{"gpu_us":-1}]},` + strings.TrimSuffix(line[1:], "}") + `,"later":null}` + "\r\n\n"
	got, err := NewDecoder(strings.NewReader(line)).Decode()
	if err != nil {
		t.Fatal(err)
	}
	if got != row {
		t.Errorf("got %+v", got)
	}
}

// A row of an exporter that knows nothing of reviews needs none.
func TestRowFromBeforeReviews(t *testing.T) {
	row := exampleRow()
	row.Review = true
	line := string(AppendJSON(nil, &row))
	old := strings.Replace(line, `,"review":true`, "", 1)
	if old == line {
		t.Fatalf("no review in %s", line)
	}
	got, err := NewDecoder(strings.NewReader(old)).Decode()
	if row.Review = false; err != nil || got != row {
		t.Errorf("got %+v, %v, want %+v", got, err, row)
	}
}

func TestMissingFields(t *testing.T) {
	row := exampleRow()
	for _, f := range fields {
		var object map[string]json.RawMessage
		if err := json.Unmarshal(AppendJSON(nil, &row), &object); err != nil {
			t.Fatal(err)
		}
		delete(object, f.name)
		line, err := json.Marshal(object)
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewDecoder(bytes.NewReader(line)).Decode()
		if f.later {
			if err != nil {
				t.Errorf("a row from before there was %s: %v", f.name, err)
			}
			continue
		}
		if want := "line 1: field " + f.name + ": is missing"; err == nil || err.Error() != want {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

func TestBadLines(t *testing.T) {
	example := exampleRow()
	good := string(AppendJSON(nil, &example))
	replace := func(old, new string) string {
		if strings.Count(good, old) != 1 {
			t.Fatalf("%s is not there once", old)
		}
		return strings.Replace(good, old, new, 1)
	}
	idle := example
	idle.State = StateIdle
	held := `"held","user":"alice","uid":1001,"kind":"docker","workload":"train","project":"vision","class":""`
	for _, test := range []struct{ name, line, want string }{
		{"negative amount", replace(`"gpu_us":450000000`, `"gpu_us":-1`), "line 2: field gpu_us: -1 is negative"},
		{"negative energy", replace(`"energy_mj":270000000`, `"energy_mj":-5`), "line 2: field energy_mj: -5 is negative"},
		{"fraction", replace(`"gpu_us":450000000`, `"gpu_us":1.5`), "line 2: field gpu_us: 1.5 is not a whole number of 64 bits"},
		{"exponent", replace(`"gpu_us":450000000`, `"gpu_us":1e3`), "line 2: field gpu_us: 1e3 is not a whole number of 64 bits"},
		{"overflow", replace(`"gpu_us":450000000`, `"gpu_us":9223372036854775808`), "line 2: field gpu_us: 9223372036854775808 is not a whole number of 64 bits"},
		{"number as text", replace(`"gpu_us":450000000`, `"gpu_us":"1"`), `line 2: field gpu_us: "1" is not a whole number of 64 bits`},
		{"null", replace(`"gpu_us":450000000`, `"gpu_us":null`), "line 2: field gpu_us: null is not a whole number of 64 bits"},
		{"off the quarter", replace("08:15:00Z", "08:16:00Z"), "line 2: field bucket: \"2026-11-03T08:16:00Z\" is not on a quarter hour of UTC since 1970"},
		{"offset", replace("08:15:00Z", "08:15:00+08:00"), `line 2: field bucket: "2026-11-03T08:15:00+08:00" is not an RFC 3339 time in UTC with Z and whole seconds`},
		{"before 1970", replace("2026-11", "1926-11"), "line 2: field bucket: \"1926-11-03T08:15:00Z\" is not on a quarter hour of UTC since 1970"},
		{"state", replace(`"state":"held"`, `"state":"busy"`), `line 2: field state: "busy" is none of held, idle, down`},
		{"slices 0", replace(`"slices":1`, `"slices":0`), "line 2: field slices: 0 is less than 1"},
		{"slices over of", replace(`"slices":1`, `"slices":2`), "line 2: field of: 1 is less than slices, which is 2"},
		{"seq 0", replace(`"seq":1234`, `"seq":0`), "line 2: field seq: 0 is less than 1"},
		{"held by nobody", replace(`"user":"alice"`, `"user":""`), `line 2: field user: "" is empty in a held row`},
		{"idle with a user", replace(`"state":"held"`, `"state":"idle"`), `line 2: field user: "alice" is not empty in a row that is idle`},
		{"down with a uid", replace(held, `"down","user":"","uid":0,"kind":"","workload":"","project":"","class":""`), "line 2: field uid: 0 is not -1 in a row that is down"},
		{"uid", replace(`"uid":1001`, `"uid":-2`), "line 2: field uid: -2 is neither -1 nor a user id"},
		{"NUL", replace(`"workload":"train"`, `"workload":"tr\u0000ain"`), `line 2: field workload: "tr\x00ain" holds a NUL character`},
		{"not UTF-8", replace(`"workload":"train"`, "\"workload\":\"tr\xffain\""), `line 2: field workload: "\"tr\xffain\"" is not valid UTF-8`},
		{"text as number", replace(`"workload":"train"`, `"workload":7`), "line 2: field workload: 7 is not text"},
		{"null text", replace(`"workload":"train"`, `"workload":null`), "line 2: field workload: null is not text"},
		{"long text", replace(`"workload":"train"`, `"workload":"`+strings.Repeat("a", MaxTextBytes+1)+`"`), "is longer than 4096 bytes"},
		{"boolean", replace(`"estimated":false`, `"estimated":0`), "line 2: field estimated: 0 is neither true nor false"},
		{"no node", replace(`"node":"gpu01"`, `"node":""`), `line 2: field node: "" is empty`},
		{"index", replace(`"index":0`, `"index":-1`), "line 2: field index: -1 is negative"},
		{"twice", replace(`"class":""`, `"class":"","class":""`), "line 2: field class: stands there twice"},
		{"other case", replace(`"gpu_us"`, `"GPU_US"`), "line 2: field gpu_us: is missing"},
		{"cut off", good[:len(good)-20], "line 2: ends within the row: the stream was cut off"},
		{"two objects", good + good, "line 2: more than one JSON object"},
		{"an array", "[1]", "line 2: not a JSON object"},
		{"words", "<html>", "line 2: not a JSON object"},
		{"too long", `{"run":"` + strings.Repeat("a", MaxLineBytes) + `"}`, "line 2: longer than 1048576 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			decoder := NewDecoder(strings.NewReader(good + "\n" + test.line + "\n" + good + "\n"))
			if _, err := decoder.Decode(); err != nil {
				t.Fatal(err)
			}
			_, err := decoder.Decode()
			var wrong *FieldError
			if !errors.As(err, &wrong) || wrong.Line != 2 || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got  %v\nwant %s", err, test.want)
			}
			if row, err := decoder.Decode(); err != nil || row != example {
				t.Errorf("the line after the bad one: %+v, %v", row, err)
			}
		})
	}
}

func TestEncoderRefusesWhatADecoderWould(t *testing.T) {
	for name, change := range map[string]func(*Row){
		"no seq":   func(r *Row) { r.Seq = 0 },
		"negative": func(r *Row) { r.IdleUS = -1 },
		"NUL":      func(r *Row) { r.Project = "a\x00" },
		"UTF-8":    func(r *Row) { r.User = "\xff" },
		"bucket":   func(r *Row) { r.Bucket = r.Bucket.Add(time.Nanosecond) },
	} {
		row := exampleRow()
		change(&row)
		var wire bytes.Buffer
		var wrong *FieldError
		if err := NewEncoder(&wire).Encode(&row); !errors.As(err, &wrong) || wire.Len() != 0 {
			t.Errorf("%s: got %v and %d bytes, want a FieldError and nothing", name, err, wire.Len())
		}
	}
}

func TestReadErrorIsFinal(t *testing.T) {
	broken := errors.New("connection reset")
	decoder := NewDecoder(iotest.ErrReader(broken))
	for range 2 {
		if _, err := decoder.Decode(); !errors.Is(err, broken) {
			t.Errorf("got %v, want %v", err, broken)
		}
	}
}

func TestShrunkAndSameContent(t *testing.T) {
	earlier, now := exampleRow(), exampleRow()
	now.Seq, now.Bucket = 0, now.Bucket.In(time.FixedZone("", 3600))
	if !now.SameContent(&earlier) {
		t.Error("rows that differ in seq and time zone only are not the same")
	}
	now.EnergyMJ++
	if now.SameContent(&earlier) {
		t.Error("rows with other energy are the same")
	}
	if name, _, _, shrunk := now.Shrunk(&earlier); shrunk {
		t.Errorf("%s shrank", name)
	}
	name, before, after, shrunk := earlier.Shrunk(&now)
	if !shrunk || name != "energy_mj" || before != 270000001 || after != 270000000 {
		t.Errorf("got %s %d %d %v", name, before, after, shrunk)
	}
}

func FuzzDecoder(f *testing.F) {
	row := exampleRow()
	f.Add(append(AppendJSON(nil, &row), '\n'))
	f.Add([]byte("{}\n\n{"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		decoder := NewDecoder(bytes.NewReader(wire))
		for {
			got, err := decoder.Decode()
			var wrong *FieldError
			if errors.As(err, &wrong) {
				continue
			}
			if err != nil {
				return
			}
			if err := NewEncoder(io.Discard).Encode(&got); err != nil {
				t.Fatalf("decoded a row that can't be encoded: %v", err)
			}
		}
	})
}
