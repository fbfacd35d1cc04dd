package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gpuledger/accounting/billing"
	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/accounting/report"
	"gpuledger/exporter/usage"
)

// micros reads a decimal with six places exactly.
func micros(t *testing.T, text string) int64 {
	t.Helper()
	value, ok := new(big.Rat).SetString(text)
	if !ok {
		t.Fatalf("%q is not a decimal", text)
	}
	value.Mul(value, big.NewRat(1_000_000, 1))
	if !value.IsInt() {
		t.Fatalf("%q has more than six places", text)
	}
	return value.Num().Int64()
}

// TestMonthOfAHundredCards takes a month of 100 cards, over a million rows, in
// which a node dies on the 3rd, through the program as it is shipped: without
// the race detector, each command a process. The month has a day of 25 hours.
func TestMonthOfAHundredCards(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: a month of a million rows")
	}
	dir := t.TempDir()
	binary := filepath.Join(dir, "gpu-accounting")
	if out, err := exec.Command("go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	month, err := billing.ParsePeriod("2025-10", berlin)
	if err != nil {
		t.Fatal(err)
	}
	site := ledgertest.Month(month.Start, month.End)

	// Every tenth row comes a second time, from a file.
	again, err := os.Create(filepath.Join(dir, "again.ndjson"))
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	config := writeConfig(t, dir, `billing:
  timezone: Europe/Berlin
  currency: EUR
  rates: [{name: gpu, price: "2.50"}]
accounts:
  - {name: lab, members: [{user: user01}, {user: user02}]}
`)
	command := exec.Command(binary, "import", "--config.file="+config, "-")
	stdin, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	var said bytes.Buffer
	command.Stdout, command.Stderr = &said, &said
	began := time.Now()
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	everything, tenth := usage.NewEncoder(stdin), usage.NewEncoder(again)
	var rows, repeated, heldUS, meteredUS int64
	for row := range site.Rows() {
		if err = everything.Encode(&row); err != nil {
			break
		}
		rows++
		if rows%10 == 0 {
			if err = tenth.Encode(&row); err != nil {
				break
			}
			repeated++
		}
		meteredUS += row.GPUUS
		if row.State == usage.StateHeld {
			heldUS += row.GPUUS
		}
	}
	if err := errors.Join(err, stdin.Close(), command.Wait()); err != nil {
		t.Fatalf("import: %v\n%s", err, said.Bytes())
	}
	t.Logf("made and imported %d rows: %v", rows, time.Since(began).Round(time.Millisecond))
	if want := fmt.Sprintf("%d rows new, 0 there already, 0 quarantined", rows); rows < 1_000_000 || !strings.Contains(said.String(), want) {
		t.Fatalf("%d rows, and it said: %s", rows, said.String())
	}

	run := func(what string, args ...string) []byte {
		t.Helper()
		command := exec.Command(binary, append(args, "--config.file="+config)...)
		var out, errs bytes.Buffer
		command.Stdout, command.Stderr = &out, &errs
		began := time.Now()
		if err := command.Run(); err != nil {
			t.Fatalf("%s: %v\n%s%s", what, err, out.Bytes(), errs.Bytes())
		}
		t.Logf("%s: %v", what, time.Since(began).Round(time.Millisecond))
		return out.Bytes()
	}
	reports := func() [3][]byte {
		t.Helper()
		return [3][]byte{
			run("report as CSV", "report", "--month=2025-10", "--format=csv"),
			run("report as JSON", "report", "--month=2025-10", "--format=json"),
			run("verify", "verify", "--month=2025-10"),
		}
	}
	first := reports()

	// Hours: in all, and for each node, exactly its cards' time in the month.
	records, err := report.ReadCSV(bytes.NewReader(first[0]))
	if err != nil {
		t.Fatal(err)
	}
	const cards = 100
	hours := map[string]int64{} // millionths, by line type
	nodes := map[string]int64{}
	unobserved := map[string]int64{}
	amounts := map[string]int64{}
	for _, record := range records {
		kind := record["line_type"]
		if kind == "charge" {
			amounts[record["account"]] += micros(t, record["amount"])
			if record["gpu_hours"] != "" {
				t.Errorf("a charge has hours: %v", record)
			}
			continue
		}
		us := micros(t, record["gpu_hours"])
		hours[kind] += us
		nodes[record["node"]] += us
		if kind == "unobserved" {
			unobserved[record["node"]] += us
		}
	}
	if got := hours["usage"] + hours["idle"] + hours["down"] + hours["unobserved"]; got != cards*745_000_000 {
		t.Errorf("hours add up to %d millionths, the capacity is %d: %v", got, cards*745_000_000, hours)
	}
	if len(nodes) != site.Nodes {
		t.Errorf("%d nodes, want %d", len(nodes), site.Nodes)
	}
	for node, got := range nodes {
		if want := int64(site.CardsPerNode) * 745_000_000; got != want {
			t.Errorf("%s has %d millionths of an hour, want %d", node, got, want)
		}
	}
	// The node that died at noon of the 3rd is missed from then on, no other is.
	dead := fmt.Sprintf("gpu%02d", site.Nodes)
	missing := int64(site.CardsPerNode) * int64(month.End.Sub(site.Dies)/time.Hour) * 1_000_000
	if len(unobserved) != 1 || unobserved[dead] != missing || site.Dies.In(berlin).Day() != 3 {
		t.Errorf("unobserved: %v, want %d of %s", unobserved, missing, dead)
	}
	if whole := cards * month.LengthUS(); meteredUS+missing*3600 != whole {
		t.Errorf("metered %d µs and missing %d of %d", meteredUS, missing*3600, whole)
	}
	// Amounts: what was held at 2.50 an hour, rounded once an account.
	exact := new(big.Rat).SetFrac(big.NewInt(heldUS), big.NewInt(3600_000_000))
	exact.Mul(exact, big.NewRat(5, 2))
	difference := new(big.Rat).Sub(big.NewRat(amounts["lab"]+amounts["unassigned"], 1_000_000), exact)
	if difference.Abs(difference).Cmp(big.NewRat(int64(len(amounts)), 200)) > 0 || len(amounts) != 2 || amounts["lab"] == 0 {
		t.Errorf("amounts %v, held time is worth %s", amounts, exact.FloatString(6))
	}

	// Rows that come again change nothing, and nor does asking again: not a byte.
	if out := string(run("import of a tenth again", "import", again.Name())); !strings.Contains(out, fmt.Sprintf("0 rows new, %d there already, 0 quarantined", repeated)) {
		t.Fatal(out)
	}
	second := reports()
	for i, what := range []string{"CSV", "JSON", "verification"} {
		if !bytes.Equal(first[i], second[i]) {
			t.Errorf("the %s is another one the second time", what)
		}
	}
}
