package report

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/accounting/billing"
	"gpuledger/exporter/usage"
)

var update = flag.Bool("update", false, "rewrite the golden files and the example of docs/csv.md")

const header = "period,period_start,period_end,timezone,status,line_id,line_type,account,project,cost_centre,user,node,gpu_model,mig_profile,item,tariff,class,gpu_hours,held_hours,active_hours,idle_hours,reserved_hours,memory_gib_hours,energy_kwh,quantity,unit,unit_price,list_amount,amount,currency,coverage,corrects_period,corrects_line_id"

const hourUS = 3_600_000_000

type fataler interface {
	Helper()
	Fatal(args ...any)
}

func bill(t fataler, config billing.Config, accounts []billing.AccountConfig, usages []billing.Usage, capacity []billing.Capacity) billing.Statement {
	t.Helper()
	book, err := billing.NewBook(config, accounts, nil)
	if err != nil {
		t.Fatal(err)
	}
	period, err := billing.ParsePeriod("2026-11", book.Location)
	if err != nil {
		t.Fatal(err)
	}
	statement, err := billing.Bill(book, period, usages, capacity)
	if err != nil {
		t.Fatal(err)
	}
	return statement
}

func csvOf(t fataler, statement billing.Statement, options Options) string {
	t.Helper()
	var out bytes.Buffer
	if err := WriteCSV(&out, statement, options); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// example is the month of docs/csv.md: two people share a card, one reserves a
// MIG instance, the node is off for a while.
func example(t fataler) billing.Statement {
	at := func(card, model, profile, state, user, project string, amounts usage.Amounts) billing.Usage {
		return billing.Usage{Day: "2026-11-03", Node: "gpu01", Card: card, Model: model, Profile: profile,
			State: state, User: user, UID: -1, Project: project, Amounts: amounts}
	}
	const a100, h200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
	return bill(t,
		billing.Config{Timezone: "Asia/Shanghai", Currency: "CNY", Rates: []billing.RateConfig{{Name: "a100", GPU: "NVIDIA A100*", Price: "6.10"}}},
		[]billing.AccountConfig{{Name: "vision-lab", CostCentre: "0042", Projects: []string{"vision"}, Members: []billing.MemberConfig{{User: "alice"}, {User: "bob"}}}},
		[]billing.Usage{
			at("GPU-1", a100, "", usage.StateHeld, "alice", "vision", usage.Amounts{GPUUS: 25_200_000_000, ShareUS: 25_200_000_000, HeldUS: 36_000_000_000, ActiveUS: 18_000_000_000, ActiveKnownUS: 36_000_000_000, IdleUS: 3_600_000_000, MemoryKiBSeconds: 36_000 * 41_943_040, MemoryKnownUS: 36_000_000_000, EnergyMJ: 7_560_000_000}),
			at("GPU-1", a100, "", usage.StateHeld, "bob", "", usage.Amounts{GPUUS: 10_800_000_001, ShareUS: 10_800_000_001, HeldUS: 21_600_000_000, ActiveUS: 10_000_000_000, ActiveKnownUS: 21_600_000_000, MemoryKiBSeconds: 21_600 * 20_971_520, MemoryKnownUS: 21_600_000_000, EnergyMJ: 3_240_000_000}),
			at("GPU-1", a100, "", usage.StateIdle, "", "", usage.Amounts{GPUUS: 43_199_999_999, ShareUS: 43_199_999_999, EnergyMJ: 2_600_000_000}),
			at("GPU-2", h200, "2g.35gb", usage.StateHeld, "carol", "", usage.Amounts{GPUUS: 20_571_428_571, ShareUS: 72_000_000_000, HeldUS: 72_000_000_000, ReservedUS: 72_000_000_000, MemoryKiBSeconds: 72_000 * 10_485_760, MemoryKnownUS: 72_000_000_000, EnergyMJ: 8_000_000_000}),
			at("GPU-2", h200, "", usage.StateIdle, "", "", usage.Amounts{GPUUS: 51_428_571_429, ShareUS: 51_428_571_429, EnergyMJ: 9_000_000_000}),
			at("GPU-2", h200, "", usage.StateDown, "", "", usage.Amounts{GPUUS: 7_200_000_000, ShareUS: 7_200_000_000}),
		},
		[]billing.Capacity{
			{Day: "2026-11-03", Node: "gpu01", Card: "GPU-1", Model: a100, InServiceUS: 86_400_000_000},
			{Day: "2026-11-03", Node: "gpu01", Card: "GPU-2", Model: h200, InServiceUS: 86_400_000_000},
		})
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs (run with -update if that is meant):\n%s", path, cmp.Diff(string(want), got))
	}
}

func TestGolden(t *testing.T) {
	statement := example(t)
	golden(t, "month.csv", csvOf(t, statement, Options{}))
	var table, object bytes.Buffer
	if err := WriteTable(&table, statement); err != nil {
		t.Fatal(err)
	}
	golden(t, "month.txt", table.String())
	if err := WriteJSON(&object, statement); err != nil {
		t.Fatal(err)
	}
	golden(t, "month.json", object.String())
	if got, _, _ := strings.Cut(csvOf(t, statement, Options{}), "\r\n"); got != header {
		t.Errorf("header %s", got)
	}
}

// TestDocumentation keeps docs/csv.md true: its example is real output, and it
// describes every column in order.
func TestDocumentation(t *testing.T) {
	const path = "../../docs/csv.md"
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	statement := example(t)
	var table bytes.Buffer
	if err := WriteTable(&table, statement); err != nil {
		t.Fatal(err)
	}
	text := string(content)
	for language, output := range map[string]string{"csv": strings.ReplaceAll(csvOf(t, statement, Options{}), "\r\n", "\n"), "text": table.String()} {
		start := strings.Index(text, "```"+language+"\n")
		if start < 0 {
			t.Fatalf("%s has no block of %s", path, language)
		}
		start += len("```" + language + "\n")
		end := start + strings.Index(text[start:], "```")
		if text[start:end] != output {
			if !*update {
				t.Errorf("the %s example of %s is not what the code prints (run with -update):\n%s", language, path, cmp.Diff(text[start:end], output))
			}
			text = text[:start] + output + text[end:]
		}
	}
	if *update && text != string(content) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var described, names []string
	for line := range strings.Lines(text) {
		if name, ok := strings.CutPrefix(line, "| `"); ok {
			name, _, _ = strings.Cut(name, "`")
			described = append(described, name)
		}
	}
	for _, column := range Columns {
		names = append(names, column.Name)
	}
	if diff := cmp.Diff(names, described); diff != "" {
		t.Errorf("columns described in %s: %s", path, diff)
	}
}

var oddNames = []string{
	"=cmd|' /C calc'!A0", "-1+1", "+1", "@x", "'quoted'", "''", "\ttab", "\rcr", "a\r\nb", "line\nbreak", `say "hi"`, "a,b", " lead",
	"中文用户", "👩‍💻", "مستخدم", "\u202eevil", "\xff\xfe", "nul\x00byte", "\x1b[31mred", "", "alice", "\uFEFFbom",
}

func TestOddNamesComeBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.SampledFrom(oddNames), rapid.String(),
			rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }))
		var usages []billing.Usage
		for range rapid.IntRange(1, 5).Draw(t, "groups") {
			usages = append(usages, billing.Usage{Day: "2026-11-01", Node: name.Draw(t, "node"), Card: name.Draw(t, "card"),
				Model: name.Draw(t, "model"), Profile: name.Draw(t, "profile"), State: usage.StateHeld, User: name.Draw(t, "user"),
				Project: name.Draw(t, "project"), Class: name.Draw(t, "class"),
				Amounts: usage.Amounts{GPUUS: rapid.Int64Range(0, 24*hourUS).Draw(t, "us")}})
		}
		statement := bill(t, billing.Config{Currency: "CNY", Rates: []billing.RateConfig{{Name: "=1+1", Price: "1.7"}}}, nil, usages, nil)
		text := csvOf(t, statement, Options{BOM: rapid.Bool().Draw(t, "bom")})
		if !utf8.ValidString(text) || strings.ContainsRune(text, 0) {
			t.Fatal("the CSV is not clean UTF-8")
		}
		records, err := ReadCSV(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		if len(records) != len(statement.Lines) {
			t.Fatalf("%d records for %d lines", len(records), len(statement.Lines))
		}
		for i, line := range statement.Lines {
			got := []string{records[i]["user"], records[i]["node"], records[i]["gpu_model"], records[i]["mig_profile"], records[i]["project"], records[i]["class"], records[i]["item"]}
			want := []string{line.User, line.Node, line.Model, line.Profile, line.Project, line.Class, line.Item}
			if !slices.Equal(got, want) {
				t.Fatalf("record %d: got %q, want %q", i, got, want)
			}
		}
		// Someone else's reader sees the same shape, and no formula.
		raw, err := csv.NewReader(strings.NewReader(strings.TrimPrefix(text, "\uFEFF"))).ReadAll()
		if err != nil {
			t.Fatal(err)
		}
		for _, cells := range raw {
			if len(cells) != len(Columns) {
				t.Fatalf("%d cells", len(cells))
			}
			for _, cell := range cells {
				if cell != "" && strings.IndexByte("=+-@\t\r", cell[0]) >= 0 {
					t.Fatalf("cell %q could be taken for a formula", cell)
				}
			}
		}
		// One line of the table for each person, whatever the name.
		var table bytes.Buffer
		if err := WriteTable(&table, statement); err != nil {
			t.Fatal(err)
		}
		people := make(map[string]bool)
		for _, u := range statement.Unassigned {
			people[u.User] = true
		}
		_, rest, _ := strings.Cut(table.String(), "\n\n")
		body, _, _ := strings.Cut(rest, "\n\n")
		if got := strings.Count(body, "\n"); got != len(people) {
			t.Fatalf("%d lines for %d people:\n%s", got, len(people), body)
		}
		if strings.ContainsAny(table.String(), "\x1b\r\x00\t\u202e") {
			t.Fatalf("the table holds control characters: %q", table.String())
		}
	})
}

func TestPrintedHoursOfTheCSVAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var usages []billing.Usage
		var capacity []billing.Capacity
		for _, card := range []string{"GPU-1", "GPU-2", "GPU-3"} {
			left := rapid.Int64Range(0, 24*hourUS).Draw(t, "in service")
			capacity = append(capacity, billing.Capacity{Day: "2026-11-01", Node: "gpu01", Card: card, Model: "M", InServiceUS: left})
			for range rapid.IntRange(0, 8).Draw(t, "groups") {
				us := rapid.Int64Range(0, left).Draw(t, "us")
				left -= us
				u := billing.Usage{Day: "2026-11-01", Node: "gpu01", Card: card, Model: "M", State: rapid.SampledFrom([]string{"held", "idle", "down"}).Draw(t, "state"), Amounts: usage.Amounts{GPUUS: us}}
				if u.State == "held" {
					u.User = rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "user")
				}
				usages = append(usages, u)
			}
		}
		config := billing.Config{Currency: "CNY", Rates: []billing.RateConfig{{Name: "r", Price: "0.37"}}}
		statement := bill(t, config, nil, usages, capacity)
		text := csvOf(t, statement, Options{})
		records, err := ReadCSV(strings.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		var hours, cents int64
		for _, record := range records {
			hours += digits(t, record["gpu_hours"])
			cents += digits(t, record["amount"])
			if (record["gpu_hours"] == "") == (record["amount"] == "") {
				t.Fatalf("line %v carries both hours and money, or neither", record)
			}
		}
		var us int64
		for _, c := range capacity {
			us += c.InServiceUS
		}
		if want := (us + 1800) / 3600; hours != want {
			t.Fatalf("hours add up to %d millionths, capacity is %d", hours, want)
		}
		_, amount := statement.Total()
		if want := digits(t, amount.Decimal(statement.Currency)); cents != want {
			t.Fatalf("amounts add up to %d cents, the total is %d", cents, want)
		}
		random := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1))
		random.Shuffle(len(usages), func(i, j int) { usages[i], usages[j] = usages[j], usages[i] })
		random.Shuffle(len(capacity), func(i, j int) { capacity[i], capacity[j] = capacity[j], capacity[i] })
		if again := csvOf(t, bill(t, config, nil, usages, capacity), Options{}); again != text {
			t.Fatal("the bytes depend on the order of the input")
		}
	})
}

// digits reads a decimal of fixed scale as an integer; an empty cell is 0.
func digits(t fataler, cell string) int64 {
	t.Helper()
	var value int64
	for _, r := range cell {
		if r == '.' {
			continue
		}
		if r < '0' || r > '9' {
			t.Fatal("not a decimal: " + cell)
		}
		value = value*10 + int64(r-'0')
	}
	return value
}

func TestTableNamesWhatNeedsAttention(t *testing.T) {
	statement := bill(t, billing.Config{}, nil,
		[]billing.Usage{{Day: "2026-11-01", Node: "gpu01", Card: "GPU-1", Model: "M", State: usage.StateHeld, User: "中文", Amounts: usage.Amounts{GPUUS: 2 * hourUS}}},
		[]billing.Capacity{{Day: "2026-11-01", Node: "gpu01", Card: "GPU-1", Model: "M", InServiceUS: hourUS}, {Day: "2026-11-01", Node: "gpu01", Card: "GPU-2", Model: "M", InServiceUS: 25 * hourUS}})
	var table bytes.Buffer
	if err := WriteTable(&table, statement); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"中文          unassigned   2.000000", "OVERLAP: GPU-1 on gpu01 was metered for 2.000000 h", "in service for 25.000000 h on 2026-11-01, a day of 24.000000 h",
		"NO PRICE for M on gpu01", "coverage of M on gpu01 is 0.038461",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, table.String())
		}
	}
	if strings.Contains(table.String(), "no account pays") {
		t.Errorf("a site without accounts is told that nobody pays:\n%s", table.String())
	}
}

func TestTableNamesUsersWithoutAnAccountOnce(t *testing.T) {
	var usages []billing.Usage
	for i := range 8 {
		usages = append(usages, billing.Usage{
			Day: "2026-11-01", Node: "gpu01", Card: "GPU-1", Model: "M", State: usage.StateHeld,
			User: fmt.Sprintf("user%d", i), Amounts: usage.Amounts{GPUUS: int64(i+1) * hourUS / 2},
		})
	}
	statement := bill(t, billing.Config{}, []billing.AccountConfig{{Name: "lab", Members: []billing.MemberConfig{{User: "user7"}}}},
		usages, []billing.Capacity{{Day: "2026-11-01", Node: "gpu01", Card: "GPU-1", Model: "M", InServiceUS: 24 * hourUS}})
	var table bytes.Buffer
	if err := WriteTable(&table, statement); err != nil {
		t.Fatal(err)
	}
	want := "no account pays for 14.000000 h of users who are members of none: user6, user5, user4, user3, user2, 2 more\n"
	if !strings.Contains(table.String(), want) || strings.Count(table.String(), "no account pays") != 1 {
		t.Errorf("no %q in\n%s", want, table.String())
	}
}

func TestReadCSVRefuses(t *testing.T) {
	good := csvOf(t, example(t), Options{})
	for name, text := range map[string]string{
		"empty": "", "LF": strings.ReplaceAll(good, "\r\n", "\n"), "cut": good[:len(good)-2], "quote": header + "\r\n\"",
		"other header": strings.Replace(good, "period", "Period", 1), "short": header + "\r\na,b\r\n",
	} {
		if _, err := ReadCSV(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), ErrCSV.Error()) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestJSONKeepsIntegersExact(t *testing.T) {
	const exact = 1<<62 + 12345
	statement := bill(t, billing.Config{}, nil, []billing.Usage{{Day: "2026-11-01", Node: "n", Card: "c", Model: "m", State: usage.StateHeld, User: "u",
		Amounts: usage.Amounts{MemoryKiBSeconds: exact, MemoryKnownUS: 1}}}, nil)
	var out bytes.Buffer
	if err := WriteJSON(&out, statement); err != nil {
		t.Fatal(err)
	}
	var read struct {
		Lines []struct {
			Hours map[string]json.RawMessage `json:"hours"`
		} `json:"lines"`
	}
	if err := json.Unmarshal(out.Bytes(), &read); err != nil {
		t.Fatal(err)
	}
	hours := read.Lines[0].Hours
	if got := string(hours["memory_kib_seconds"]); got != "4611686018427400249" {
		t.Errorf("memory_kib_seconds %s", got)
	}
	if _, ok := hours["active_hours"]; ok {
		t.Error("activity that is not known is shown")
	}
}
