package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/exporter/usage"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
	}
	testscript.Main(m, map[string]func(){
		"gpu-accounting": main,
		"rows":           rows,
	})
}

// asProgram makes the test binary the program.
const asProgram = "GPU_ACCOUNTING_AS_PROGRAM"

// rows writes invented rows: rows START BUCKETS NODES CARDS HOLDERS.
func rows() {
	start, err := time.Parse(time.RFC3339, os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	var numbers [4]int
	for i := range numbers {
		if numbers[i], err = strconv.Atoi(os.Args[2+i]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
	}
	site := ledgertest.Site{Start: start, Buckets: numbers[0], Nodes: numbers[1], CardsPerNode: numbers[2], HoldersPerCard: numbers[3]}
	encoder := usage.NewEncoder(os.Stdout)
	for row := range site.Rows() {
		if err := encoder.Encode(&row); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata/script", RequireExplicitExec: true})
}

func TestHelpNamesEveryCommandAndExitCode(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run(context.Background(), []string{"--help"}, nil, &out, &errs); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errs.String())
	}
	for _, want := range []string{"serve", "import", "report", "verify", "node", "device", "--config.file", "Exit codes"} {
		if !bytes.Contains(out.Bytes(), []byte(want)) {
			t.Errorf("help does not mention %q", want)
		}
	}
}
