package who

import (
	"fmt"
	"strings"
	"testing"
)

// crowd has somebody of each sort, and names that stand for several things.
func crowd() Answer {
	number := func(n int64) *int64 { return &n }
	pid := func(n uint32) *uint32 { return &n }
	return Answer{
		Missing: []Missing{{What: MissingCard, Card: new(1)}, {What: MissingRuntime}},
		Cards: []Card{
			{Index: 0, UUID: "GPU-aaaaaaaa-0000", PCIBusID: "00000000:0A:00.0", Devices: []Device{{UUID: "GPU-aaaaaaaa-0000", Holders: []Holder{
				{User: "alice", UID: number(1001), Kind: "docker", Workload: "train", ContainerID: "c0ffee00c0ffee00", ContainerName: "train", PID: pid(4001)},
				{User: "bob", UID: number(1002), Kind: "host", PID: pid(4002)},
				{User: "train", UID: number(1003), Kind: "host", PID: pid(4003)},
			}}}},
			{Index: 1, UUID: "GPU-bbbbbbbb-0000", MIG: true, Devices: []Device{
				{UUID: "MIG-11111111-0000", Holders: []Holder{
					{User: "carol", UID: number(0), Kind: "kubernetes", Workload: "vision/prep/main", PodNamespace: "vision", PodName: "prep", PID: pid(4004)},
				}},
				{UUID: "MIG-22222222-0000", Holders: []Holder{{User: "dave", UID: number(1005), Kind: "slurm", Workload: "1001", SlurmJob: "1001"}}},
			}},
			{Index: 2, UUID: "GPU-cccccccc-0000", Devices: []Device{{UUID: "GPU-cccccccc-0000", Holders: []Holder{
				{User: "ollama", UID: number(998), Kind: "service", Workload: "ollama.service", Unit: "ollama.service", PID: pid(4006)},
			}}}, Suspects: []Suspect{{PID: 4007, User: "eve", UID: number(1007), Kind: "podman", Workload: "left", ContainerID: "feedbeef0000"}}},
			{Index: 3, UUID: "GPU-dddddddd-0000", Devices: []Device{{UUID: "GPU-dddddddd-0000", Free: true, Holders: []Holder{}}}},
		},
	}
}

// who is on which card, suspects in brackets.
func onCards(a Answer) string {
	var out []string
	for _, c := range a.Cards {
		var names []string
		for _, d := range c.Devices {
			for _, h := range d.Holders {
				names = append(names, h.User)
			}
		}
		for _, s := range c.Suspects {
			names = append(names, "("+s.User+")")
		}
		out = append(out, strings.TrimRight(fmt.Sprint(c.Index, " ", strings.Join(names, " ")), " "))
	}
	return strings.Join(out, ", ")
}

func TestSelect(t *testing.T) {
	for selectors, want := range map[string]struct{ on, nothing string }{
		"":                         {"0 alice bob train, 1 carol dave, 2 ollama (eve), 3", ""},
		"alice":                    {"0 alice", ""},
		"0":                        {"0 alice bob train", ""}, // a card before root, whose uid is 0
		"user:0":                   {"1 carol", ""},
		"3":                        {"3", ""},
		"gpu:3":                    {"3", ""},
		"gpu:7":                    {"", "gpu:7"},
		"gpu:7 alice":              {"", "gpu:7"},
		"GPU-bbbbbbbb":             {"1 carol dave", ""},
		"gpu-BBBBBBBB-0000":        {"1 carol dave", ""},
		"00000000:0a:00.0":         {"0 alice bob train", ""},
		"MIG-22222222":             {"1 dave", ""},
		"MIG-2":                    {"", "MIG-2"}, // too short
		"train":                    {"0 alice train", ""},
		"docker:train":             {"0 alice", ""},
		"user:train":               {"0 train", ""},
		"podman:train":             {"", "podman:train"},
		"1001":                     {"0 alice, 1 dave", ""}, // a uid and a job
		"slurm:1001":               {"1 dave", ""},
		"c0ffee00":                 {"0 alice", ""},
		"C0FFEE00C0":               {"0 alice", ""},
		"c0ffee0":                  {"", "c0ffee0"},
		"prep":                     {"1 carol", ""},
		"vision/prep":              {"1 carol", ""},
		"kubernetes:vision/prep":   {"", "kubernetes:vision/prep"},
		"vision/prep/main":         {"1 carol", ""},
		"ollama.service":           {"2 ollama", ""},
		"service:ollama.service":   {"2 ollama", ""},
		"4002":                     {"0 bob", ""},
		"pid:4007":                 {"2 (eve)", ""},
		"left":                     {"2 (eve)", ""},
		"feedbeef":                 {"2 (eve)", ""},
		"pid:1001":                 {"", "pid:1001"},
		"alice bob":                {"0 alice bob", ""},
		"0 carol":                  {"", "carol"}, // these people on these cards
		"1 carol":                  {"1 carol", ""},
		"0 1 train carol":          {"0 alice train, 1 carol", ""},
		"alice nobody no/where":    {"0 alice", "nobody no/where"},
		"docker: user: pid: host:": {"", "docker: user: pid: host:"},
	} {
		got, nothing := Select(crowd(), strings.Fields(selectors))
		if onCards(got) != want.on || strings.Join(nothing, " ") != want.nothing {
			t.Errorf("%q: on %q, nothing %q, want %q, %q", selectors, onCards(got), nothing, want.on, want.nothing)
		}
	}
	if got, nothing := Select(crowd(), []string{""}); len(got.Cards) > 0 || len(nothing) != 1 {
		t.Errorf("an empty selector means %q", onCards(got))
	}
}

// What is not asked about is not missing: another card is, another person may be.
func TestSelectKeepsWhatIsMissing(t *testing.T) {
	for selector, want := range map[string]int{"0": 1, "1": 2, "alice": 2} {
		if got, _ := Select(crowd(), []string{selector}); len(got.Missing) != want {
			t.Errorf("%s: missing %+v, want %d", selector, got.Missing, want)
		}
	}
	whole := crowd()
	Select(whole, []string{"bob"})
	if onCards(whole) != onCards(crowd()) {
		t.Error("selecting changed the answer that it was given")
	}
}
