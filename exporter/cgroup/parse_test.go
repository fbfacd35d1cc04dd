package cgroup

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"gpuledger/exporter/procfs/text"
)

// unsupported are the rows of the table that are not read right yet. The list
// may only shrink.
var unsupported = map[string]bool{}

const unsupportedRows = 0

type tableRow struct {
	id, content string
	want        map[string]string
}

// columns of the table that Identity answers.
var columns = []string{
	"mode", "runtime", "container_id", "outer_runtime", "outer_container_id", "pod_uid", "qos",
	"job_system", "job_id", "step", "uid", "unit", "machine", "role",
}

// table is the rows of the table, and of the further contents beside it.
func table(t testing.TB) []tableRow {
	t.Helper()
	return append(readTable(t, "testdata/cgroups.tsv", 146), readTable(t, "testdata/further.tsv", 40)...)
}

func readTable(t testing.TB, name string, atLeast int) []tableRow {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	unescape := strings.NewReplacer(`\\`, `\`, `\n`, "\n")
	lines := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	header := strings.Split(lines[0], "\t")
	var rows []tableRow
	for _, l := range lines[1:] {
		row := tableRow{want: map[string]string{}}
		for i, cell := range strings.Split(l, "\t") {
			cell = unescape.Replace(cell)
			switch header[i] {
			case "id":
				row.id = cell
			case "content":
				row.content = cell
			default:
				row.want[header[i]] = cell
			}
		}
		rows = append(rows, row)
	}
	if len(rows) < atLeast {
		t.Fatalf("%s has only %d rows", name, len(rows))
	}
	return rows
}

func identityOf(t testing.TB, content string) map[string]string {
	t.Helper()
	data, err := json.Marshal(Parse(content).Identity())
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	if err := json.Unmarshal(data, &got); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestTable(t *testing.T) {
	if len(unsupported) != unsupportedRows {
		t.Errorf("%d rows are listed as unsupported, want %d", len(unsupported), unsupportedRows)
	}
	for _, row := range table(t) {
		got := identityOf(t, row.content)
		var differences []string
		for _, column := range columns {
			if got[column] != row.want[column] {
				differences = append(differences, column+" = "+got[column]+", want "+row.want[column])
			}
		}
		switch {
		case len(differences) > 0 && !unsupported[row.id]:
			t.Errorf("row %s: %s\n%s", row.id, strings.Join(differences, "; "), row.content)
		case len(differences) == 0 && unsupported[row.id]:
			t.Errorf("row %s is read right now: take it off the list", row.id)
		}
	}
}

// The order of the lines is the kernel's business, and must not matter.
func TestOrderOfLinesDoesNotMatter(t *testing.T) {
	for _, row := range table(t) {
		lines := strings.Split(row.content, "\n")
		if len(lines) == 1 {
			continue
		}
		rapid.Check(t, func(rt *rapid.T) {
			shuffled := rapid.Permutation(lines).Draw(rt, "lines")
			got, want := Parse(strings.Join(shuffled, "\n")).Identity(), Parse(row.content).Identity()
			if got != want {
				rt.Fatalf("row %s: %+v, want %+v", row.id, got, want)
			}
		})
	}
}

func FuzzParse(f *testing.F) {
	for _, row := range table(f) {
		f.Add(row.content)
	}
	f.Add("0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_1/step_0")
	f.Add(`0::/machine.slice/machine-qemu\x2d1\x2da\x00\xff\x.scope`)
	f.Add("0::/docker/\xff\n0::/..")
	f.Fuzz(func(t *testing.T, content string) {
		chain := Parse(content)
		identity := chain.Identity()
		if chain.Delegated {
			for _, level := range chain.Levels {
				if level.Kind == LevelJob && level.System != "flux" {
					t.Errorf("a job below a user's slice was believed: %+v", identity)
				}
			}
		}
		if chain.Ambiguous && (identity.ContainerID != "" || identity.UID != "" || identity.Unit != "") {
			t.Errorf("ambiguous, and yet named: %+v", identity)
		}
		switch identity.Runtime {
		case "docker", "podman", "containerd", "crio", "nerdctl":
			if identity.ContainerID != "" && !fullID(identity.ContainerID) {
				t.Errorf("%q is no container id", identity.ContainerID)
			}
		}
		if identity.ContainerID != "" && identity.Runtime == "" {
			t.Errorf("a container without a runtime: %+v", identity)
		}
		for _, level := range chain.Levels {
			if level.ID != "" && !strings.Contains(text.Clean(content, 0), level.ID) && !strings.Contains(content, `\x`) &&
				!strings.Contains(content, "_") && !strings.HasPrefix(level.ID, "sluid:") {
				t.Errorf("id %q is not in the text, cleaned as names are", level.ID)
			}
		}
	})
}

// What a user can make below his own slice, or a container inside itself,
// must never name another user, job or unit.
func TestForgedPaths(t *testing.T) {
	const id = "7951fb549ab99e0722a949b6c121634e1f3a36b5bacbe5392991e3b12251e6b8"
	for _, test := range []struct {
		name, content string
		check         func(Chain) bool
	}{
		{"job below a user's manager", "0::/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_1/step_0",
			func(c Chain) bool { return len(c.Levels) == 0 && c.UID == 1000 && c.Delegated }},
		{"another user's slice below the own", "0::/user.slice/user-1000.slice/user@1000.service/user.slice/user-1001.slice",
			func(c Chain) bool { return c.UID == 1000 }},
		{"slice inside a container", "0::/docker/" + id + "/user.slice/user-1001.slice/session-1.scope",
			func(c Chain) bool { return !c.HasUID && c.Unit == "" }},
		{"job inside a container", "0::/docker/" + id + "/system.slice/slurmstepd.scope/job_1/step_0",
			func(c Chain) bool { return len(c.Levels) == 1 && c.Levels[0].System == "docker" }},
		{"unit below a delegating unit", "0::/system.slice/runner.service/system.slice/ollama.service",
			func(c Chain) bool { return c.Unit == "runner.service" }},
		{"docker scope below a user", "0::/user.slice/user-1000.slice/user@1000.service/docker-" + id + ".scope",
			func(c Chain) bool { return c.Delegated && c.UID == 1000 && c.Levels[0].ID == id }},
		{"uid that wraps", "0::/user.slice/user-4294967296.slice/session-1.scope", func(c Chain) bool { return !c.HasUID }},
		{"uid -1", "0::/user.slice/user-4294967295.slice/session-1.scope", func(c Chain) bool { return !c.HasUID }},
		{"two jobs", "2:freezer:/slurm/uid_1/job_1/step_0\n3:memory:/slurm/uid_2/job_2/step_0", func(c Chain) bool { return c.Ambiguous && !c.HasUID }},
		{"dockerd started from a session", "2:memory:/docker/" + id + "\n1:name=systemd:/user.slice/user-1000.slice/session-2.scope",
			func(c Chain) bool { return c.UIDElsewhere && c.UID == 1000 && !c.Delegated }},
		{"deep user path beside a shallow container", "2:memory:/docker/" + id + "\n1:name=systemd:/user.slice/user-1000.slice/user@1000.service/a.slice/b.service/c/d/e",
			func(c Chain) bool { return len(c.Levels) == 1 && c.Levels[0].ID == id }},
	} {
		if c := Parse(test.content); !test.check(c) {
			t.Errorf("%s: %+v", test.name, c)
		}
	}
}
