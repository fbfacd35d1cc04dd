package metrics

import (
	"bytes"
	"errors"
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"gpuledger/exporter/snapshot"
)

var update = flag.Bool("update", false, "write the golden files and docs/metrics.md anew")

func render(t *testing.T, machine string, format expfmt.Format) []byte {
	t.Helper()
	var store snapshot.Store
	store.Publish(machines[machine]())
	content, err := NewHandler(&store, Options{MaxWorkloads: goldenLimit(machine)}).Render(format, false)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

func compareGolden(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s is stale, run go test with -update if this is meant (-want +got):\n%s", path, diff)
	}
}

// promtool returns the path of promtool, which CI must have.
func promtool(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("promtool")
	if err == nil {
		return path
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("promtool is missing: install the package prometheus")
	}
	t.Skip("promtool is missing")
	return ""
}

func TestGolden(t *testing.T) {
	for machine := range machines {
		t.Run(machine, func(t *testing.T) {
			text := render(t, machine, expfmt.FmtText)
			compareGolden(t, filepath.Join("testdata", machine+".txt"), text)
			openMetrics := render(t, machine, expfmt.FmtOpenMetrics_1_0_0)
			compareGolden(t, filepath.Join("testdata", machine+".openmetrics"), openMetrics)
		})
	}
}

func TestPromtoolAcceptsEveryMachine(t *testing.T) {
	tool := promtool(t)
	for machine := range machines {
		command := exec.Command(tool, "check", "metrics")
		command.Stdin = bytes.NewReader(render(t, machine, expfmt.FmtText))
		if out, err := command.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: promtool check metrics: %v\n%s", machine, err, out)
		}
	}
}

// TestTextParsesBack reads the text with Prometheus's own parser and compares
// it with what was rendered, label values included.
func TestTextParsesBack(t *testing.T) {
	for machine, build := range machines {
		parser := expfmt.NewTextParser(model.LegacyValidation)
		parsed, err := parser.TextToMetricFamilies(bytes.NewReader(render(t, machine, expfmt.FmtText)))
		if err != nil {
			t.Fatalf("%s: %v", machine, err)
		}
		want := gather(newView(build(), newFolder(goldenLimit(machine))))
		if len(parsed) != len(want) {
			t.Errorf("%s: %d families parsed of %d", machine, len(parsed), len(want))
		}
		for _, family := range want {
			if diff := cmp.Diff(seriesOf(family, false), seriesOf(parsed[family.GetName()], false)); diff != "" {
				t.Errorf("%s: %s (-rendered +parsed):\n%s", machine, family.GetName(), diff)
			}
		}
	}
}

// seriesOf is a family's type, help and series as sorted text.
func seriesOf(family *dto.MetricFamily, created bool) []string {
	var all []string
	for _, m := range family.GetMetric() {
		text := family.GetType().String() + " " + family.GetHelp()
		labels := map[string]string{}
		for _, pair := range m.Label {
			labels[pair.GetName()] = pair.GetValue()
		}
		for _, name := range slices.Sorted(maps.Keys(labels)) {
			if labels[name] != "" {
				text += "|" + name + "=" + strconv.Quote(labels[name])
			}
		}
		text += " " + strconv.FormatFloat(m.GetGauge().GetValue()+m.GetCounter().GetValue(), 'g', -1, 64)
		if created && m.GetCounter().GetCreatedTimestamp() != nil {
			text += " since " + m.Counter.CreatedTimestamp.AsTime().String()
		}
		all = append(all, text)
	}
	slices.Sort(all)
	return all
}

// TestCollectorIsTheHandler checks the series with client_golang's pedantic
// registry, and that the handler, which goes without it, shows the same.
func TestCollectorIsTheHandler(t *testing.T) {
	for machine, build := range machines {
		var store snapshot.Store
		store.Publish(build())
		registry := prometheus.NewPedanticRegistry()
		if err := registry.Register(NewCollector(&store, goldenLimit(machine))); err != nil {
			t.Fatal(err)
		}
		gathered, err := registry.Gather()
		if err != nil {
			t.Fatalf("%s: %v", machine, err)
		}
		direct := gather(newView(build(), newFolder(goldenLimit(machine))))
		if len(gathered) != len(direct) {
			t.Fatalf("%s: registry has %d families, handler %d", machine, len(gathered), len(direct))
		}
		for i, family := range direct {
			if family.GetName() != gathered[i].GetName() {
				t.Fatalf("%s: family %d is %s, in the registry %s", machine, i, family.GetName(), gathered[i].GetName())
			}
			if diff := cmp.Diff(seriesOf(gathered[i], true), seriesOf(family, true)); diff != "" {
				t.Errorf("%s: %s (-registry +handler):\n%s", machine, family.GetName(), diff)
			}
		}
		problems, err := promlint.NewWithMetricFamilies(direct).Lint()
		if err != nil || len(problems) > 0 {
			t.Errorf("%s: promlint: %v %v", machine, problems, err)
		}
	}
}

var (
	sampleLine = regexp.MustCompile(`^([a-z_]+)(\{.*\})? ([0-9.e+-]+)$`)
	labelPart  = regexp.MustCompile(`^([a-z_]+)="((?:[^"\\\n]|\\["\\n])*)"(,|\})`)
)

// checkOpenMetrics is a strict reader of what OpenMetrics 1.0 allows in our
// exposition: metadata before samples, families not interleaved, _total and
// _created on counters only and side by side, no label set twice, one EOF.
func checkOpenMetrics(content string) error {
	body, ok := strings.CutSuffix(content, "# EOF\n")
	if !ok {
		return errors.New("no # EOF at the end")
	}
	kinds, helped, seen := map[string]string{}, map[string]bool{}, map[string]bool{}
	current, total := "", ""
	for n, line := range strings.Split(strings.TrimSuffix(body, "\n"), "\n") {
		fail := func(what string) error {
			return errors.New("line " + strconv.Itoa(n+1) + ": " + what + ": " + line)
		}
		if rest, ok := strings.CutPrefix(line, "# HELP "); ok {
			name, _, _ := strings.Cut(rest, " ")
			if helped[name] {
				return fail("second HELP")
			}
			helped[name] = true
			continue
		}
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			name, kind, _ := strings.Cut(rest, " ")
			if kinds[name] != "" || !helped[name] || strings.HasSuffix(name, "_total") {
				return fail("second TYPE, TYPE without HELP or with _total")
			}
			kinds[name], current = kind, name
			continue
		}
		parts := sampleLine.FindStringSubmatch(line)
		if parts == nil {
			return fail("not a sample")
		}
		name, labels := parts[1], parts[2]
		for rest := strings.TrimPrefix(labels, "{"); rest != ""; {
			pair := labelPart.FindString(rest)
			if pair == "" {
				return fail("bad labels")
			}
			rest = rest[len(pair):]
		}
		if seen[name+labels] {
			return fail("series twice")
		}
		seen[name+labels] = true
		switch kinds[current] {
		case "gauge":
			if name != current {
				return fail("sample outside its family " + current)
			}
		case "counter":
			switch name {
			case current + "_total":
				total = labels
			case current + "_created":
				if labels != total {
					return fail("_created without its _total")
				}
			default:
				return fail("sample outside its counter " + current)
			}
		default:
			return fail("unexpected type")
		}
	}
	return nil
}

func TestOpenMetricsIsValid(t *testing.T) {
	for machine := range machines {
		content := string(render(t, machine, expfmt.FmtOpenMetrics_1_0_0))
		if err := checkOpenMetrics(content); err != nil {
			t.Errorf("%s: %v", machine, err)
		}
		if !strings.Contains(content, "_created") {
			t.Errorf("%s: no _created lines", machine)
		}
	}
	for _, broken := range []string{
		"# HELP a b\n# TYPE a gauge\na 1\n",
		"# HELP a b\n# TYPE a gauge\na 1\na 1\n# EOF\n",
		"# HELP a b\n# TYPE a counter\na 1\n# EOF\n",
		"# HELP a b\n# TYPE a gauge\na{x=\"\n\"} 1\n# EOF\n",
	} {
		if checkOpenMetrics(broken) == nil {
			t.Errorf("the check lets pass %q", broken)
		}
	}
}

func TestCreatedLinesCanBeLeftOut(t *testing.T) {
	var store snapshot.Store
	store.Publish(sharedA100())
	content, err := NewHandler(&store, Options{MaxWorkloads: 10, OmitCreatedLines: true}).Render(expfmt.FmtOpenMetrics_1_0_0, false)
	if err != nil || strings.Contains(string(content), "_created") {
		t.Errorf("created lines in spite of OmitCreatedLines, error %v", err)
	}
}

// TestTable holds the table to the rules of design §5.
func TestTable(t *testing.T) {
	forbidden := []string{"instance", "job", "pod", "container", "namespace", "pid", "command", "type", "owner"}
	seen := map[string]bool{}
	for _, f := range Families() {
		if seen[f.Name] {
			t.Errorf("%s is defined twice", f.Name)
		}
		seen[f.Name] = true
		if !strings.HasPrefix(f.Name, "gpu_") || f.Help == "" || f.Source == "" || f.Unit == "" {
			t.Errorf("%s lacks prefix, help, source or unit", f.Name)
		}
		if strings.HasSuffix(f.Name, "_total") != (f.Type == Counter) {
			t.Errorf("%s: _total belongs on counters, on all of them and on nothing else", f.Name)
		}
		if strings.HasPrefix(f.Name, "gpu_mig_") != slices.Contains(f.Labels, "parent_uuid") {
			t.Errorf("%s: MIG families, and they alone, have parent_uuid", f.Name)
		}
		for _, label := range f.Labels {
			if slices.Contains(forbidden, label) {
				t.Errorf("%s has label %s", f.Name, label)
			}
		}
		name := strings.TrimSuffix(f.Name, "_total")
		suffix := map[Unit]string{
			Bytes: "_bytes", ByteSeconds: "_byte_seconds", Celsius: "_celsius", Hertz: "_hertz", Joules: "_joules",
			Ratio: "_ratio", Seconds: "_seconds", UnixSeconds: "_timestamp_seconds", Watts: "_watts",
		}[f.Unit]
		if !strings.HasSuffix(name, suffix) {
			t.Errorf("%s is in %s and should end in %s", f.Name, f.Unit, suffix)
		}
	}
	var listed int
	for _, section := range groups {
		for _, f := range Families() {
			if f.Group == section.group {
				listed++
			}
		}
	}
	if listed != len(seen) {
		t.Errorf("%d families of %d are in a section of the document", listed, len(seen))
	}
}

// TestEveryFamilyIsShown: a family no simulated machine has is not tested.
func TestEveryFamilyIsShown(t *testing.T) {
	shown := map[string]bool{"gpu_exporter_build_info": true}
	for machine, build := range machines {
		for _, family := range gather(newView(build(), newFolder(goldenLimit(machine)))) {
			shown[family.GetName()] = true
		}
	}
	for _, f := range Families() {
		if !shown[f.Name] {
			t.Errorf("no machine shows %s", f.Name)
		}
	}
}

func TestRuntimeMetricsDoNotClash(t *testing.T) {
	own, err := NewRuntimeRegistry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range own {
		for _, f := range Families() {
			if f.Name == family.GetName() && f.read != nil {
				t.Errorf("%s comes from two places", f.Name)
			}
		}
	}
	if !slices.ContainsFunc(own, func(f *dto.MetricFamily) bool { return f.GetName() == "gpu_exporter_build_info" }) {
		t.Error("no gpu_exporter_build_info")
	}
}

func TestDocumentationIsFresh(t *testing.T) {
	var out bytes.Buffer
	if err := WriteDocumentation(&out); err != nil {
		t.Fatal(err)
	}
	compareGolden(t, filepath.Join("..", "..", "docs", "metrics.md"), out.Bytes())
}

// TestExamplesAreQueries has promtool parse every example and checks that they
// speak of families that exist.
func TestExamplesAreQueries(t *testing.T) {
	names := map[string]bool{}
	for _, f := range Families() {
		names[f.Name] = true
	}
	word := regexp.MustCompile(`\bgpu_[a-z_]+`)
	var rules strings.Builder
	rules.WriteString("groups:\n- name: examples\n  rules:\n")
	count := 0
	for _, section := range groups {
		for _, example := range section.examples {
			for _, name := range word.FindAllString(example.Query, -1) {
				if !names[name] && name != "gpu_instance" {
					t.Errorf("%s: no family %s", example.Query, name)
				}
			}
			count++
			rules.WriteString("  - record: example_" + strconv.Itoa(count) + "\n    expr: " + strconv.Quote(example.Query) + "\n")
		}
	}
	path := filepath.Join(t.TempDir(), "rules.yml")
	if err := os.WriteFile(path, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(promtool(t), "check", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("promtool check rules: %v\n%s", err, out)
	}
}
