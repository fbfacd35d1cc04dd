package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"gpuledger/exporter/explain"
)

func TestDebugPID(t *testing.T) {
	broken := filepath.Join(t.TempDir(), "exporter.yml")
	if err := os.WriteFile(broken, []byte("owner: {steps: [magic]}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	self := strconv.Itoa(os.Getpid())
	for _, test := range []struct {
		arguments []string
		code      int
		says      string
	}{
		{[]string{"pid", self}, exitOK, "process " + self + " ("},
		{[]string{"pid", self, "--json"}, exitOK, `"resolver_version"`},
		{[]string{"pid", "4194305"}, exitFailed, "process 4194305: "},
		{[]string{"pid", self, "--config.file=" + broken}, exitFailed, broken + ":1:17: owner.steps[0]"},
		{[]string{"pid", self, "--path.procfs=" + t.TempDir()}, exitFailed, "is it a mounted procfs?"},
		{[]string{"pid"}, exitUsage, "one PID"},
		{[]string{"pid", "0"}, exitUsage, `"0" is no PID`},
		{[]string{"pid", "x"}, exitUsage, `"x" is no PID`},
		{[]string{"pid", self, "7"}, exitUsage, "one PID"},
		{nil, exitUsage, "debug what?"},
	} {
		var out, errs bytes.Buffer
		code := run(context.Background(), append([]string{"debug"}, test.arguments...), strings.NewReader(""), &out, &errs)
		if strings.Contains(errs.String(), "initial PID namespace") {
			if os.Getenv("CI") == "true" {
				t.Fatal(errs.String())
			}
			t.Skip("needs the initial PID namespace")
		}
		if code != test.code || !strings.Contains(out.String()+errs.String(), test.says) {
			t.Errorf("debug %v: code %d, want %d, and %q in\n%s%s", test.arguments, code, test.code, test.says, out.String(), errs.String())
		}
		if code == exitOK && errs.Len() > 0 || code != exitOK && out.Len() > 0 {
			t.Errorf("debug %v writes %q and %q", test.arguments, out.String(), errs.String())
		}
		if len(test.arguments) == 3 && test.arguments[2] == "--json" {
			var report explain.Report
			if err := json.Unmarshal(out.Bytes(), &report); err != nil || report.PID != uint32(os.Getpid()) {
				t.Errorf("%v: %+v", err, report)
			}
		}
	}
}
