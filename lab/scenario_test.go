package lab_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"gpuledger/lab"
)

// Whatever bytes a name holds, a card stays one line.
func TestAnyNameStaysOnItsLine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := string(rapid.SliceOf(rapid.Byte()).Draw(t, "name"))
		text := lab.Scenario{GPUs: []lab.GPU{{Name: name}, {}}}.String()
		if n := strings.Count(text, "\n"); n != 2 {
			t.Fatalf("%d lines: %q", n, text)
		}
		for i := range len(text) {
			if c := text[i]; c != '\n' && (c < ' ' || c > '~') {
				t.Fatalf("byte %#x in %q", c, text)
			}
		}
	})
}

// integral is the energy counter of a one-card scenario, counted second by
// second, at which its times are drawn.
func integral(s lab.Scenario, until int) int64 {
	energy, power := s.GPUs[0].Values[lab.EnergyMJ], s.GPUs[0].Values[lab.PowerMW]
	for second := range until {
		for _, c := range s.Changes {
			if c.At == time.Duration(second)*time.Second {
				if e, ok := c.Values[lab.EnergyMJ]; ok {
					energy = e
				}
				if p, ok := c.Values[lab.PowerMW]; ok {
					power = p
				}
			}
		}
		energy += power
	}
	return energy
}

// Forgetting old changes leaves every counter where it was.
func TestForgetKeepsEnergy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := lab.Scenario{GPUs: []lab.GPU{{Values: lab.Values{lab.EnergyMJ: 1000, lab.PowerMW: 70000}}}}
		for range rapid.IntRange(0, 8).Draw(t, "changes") {
			c := lab.Change{At: time.Duration(rapid.IntRange(1, 50).Draw(t, "at")) * time.Second, Values: lab.Values{}}
			if rapid.Bool().Draw(t, "reload") {
				c.Values[lab.EnergyMJ] = rapid.Int64Range(0, 1e6).Draw(t, "energy")
			}
			if rapid.Bool().Draw(t, "power") {
				c.Values[lab.PowerMW] = rapid.Int64Range(0, 7e5).Draw(t, "mW")
			}
			s.Changes = append(s.Changes, c)
		}
		want, text := integral(s, 100), s.String()
		kept := s
		kept.Forget(time.Duration(rapid.IntRange(0, 60).Draw(t, "before")) * time.Second)
		if got := integral(kept, 100); got != want {
			t.Fatalf("%d mJ, want %d\n%s\n%s", got, want, text, kept)
		}
		if s.String() != text {
			t.Fatal("the original changed")
		}
	})
}

func TestWriteFileReplacesInOneStep(t *testing.T) {
	path := filepath.Join(t.TempDir(), "scenario")
	for _, driver := range []string{"1", "2"} {
		if err := (lab.Scenario{DriverVersion: driver}).WriteFile(path); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil || string(text) != "driver \"2\"\n" {
		t.Errorf("%q, %v", text, err)
	}
	if entries, _ := os.ReadDir(filepath.Dir(path)); len(entries) != 1 {
		t.Errorf("%d files, want 1", len(entries))
	}
	if err := (lab.Scenario{}).WriteFile("/nonexistent/scenario"); err == nil {
		t.Error("a missing folder was taken")
	}
}
