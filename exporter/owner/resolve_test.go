package owner

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"gpuledger/exporter/meter"
)

// people are the accounts of the tests' host.
var people = map[string]uint32{
	"root": 0, "gdm": 120, "flux": 501, "gitlab-runner": 998, "ollama": 997, "nobody": 65534,
	"alice": 1001, "bob": 1002, `DOM\carol`: 1003, "unattributed": 1004, "uid:5": 1005,
}

const slowUID, slowName = 1099, "slow" // whose look-up has not come back

func host() Accounts {
	return Accounts{
		NameOf: func(uid uint32) (string, AccountStatus) {
			for name, u := range people {
				if u == uid {
					return name, AccountFound
				}
			}
			if uid == slowUID {
				return "", AccountWaiting
			}
			return "", AccountUnknown
		},
		UIDOf: func(name string) (uint32, AccountStatus) {
			if uid, ok := people[name]; ok {
				return uid, AccountFound
			}
			if name == slowName {
				return 0, AccountWaiting
			}
			return 0, AccountUnknown
		},
	}
}

func testConfig(change ...func(*Config)) Config {
	c := DefaultConfig()
	c.Accounts = host()
	c.Accounts.HomeOf = func(name string) (uint32, string, AccountStatus) {
		uid, status := c.Accounts.UIDOf(name)
		return uid, "/home/" + name, status
	}
	ranges := parseSubIDs([]byte("root:100000:65536\n"))
	ids := subIDs{}
	ids.ranges.Store(&ranges)
	c.Accounts.SubIDOwners = ids.owners
	for _, f := range change {
		f(&c)
	}
	return c
}

// process is a host process of uid, in no slice, that nothing else is known of.
func process(uid int64, change ...func(*Evidence)) Evidence {
	e := Evidence{
		Kind: meter.KindHost, SliceUID: -1, ProcessUID: uid, EffectiveUID: uid, LoginUID: -1, HostProcess: true,
		Command: "python3", Executable: "/usr/bin/python3.12", ExecutableUID: 0,
	}
	for _, f := range change {
		f(&e)
	}
	return e
}

func inSlice(uid int64) func(*Evidence) { return func(e *Evidence) { e.SliceUID = uid } }
func login(uid int64) func(*Evidence)   { return func(e *Evidence) { e.LoginUID = uid } }

func service(unit string) func(*Evidence) {
	return func(e *Evidence) { e.Kind, e.Name, e.Unit, e.SystemSlice = meter.KindService, unit, unit, true }
}

func program(path string, owner int64) func(*Evidence) {
	return func(e *Evidence) { e.Executable, e.ExecutableUID = path, owner }
}

// container is a Docker container's process; labels come in pairs.
func container(uid int64, change ...func(*Evidence)) Evidence {
	return process(uid, append([]func(*Evidence){func(e *Evidence) {
		e.Kind, e.Name, e.HostProcess = meter.KindDocker, "train", false
		e.Container = &Container{
			ID: strings.Repeat("a", 64), Name: "train", Image: "pytorch:2", Labels: map[string]string{},
			ImageLabels: map[string]string{}, ImageKnown: true,
		}
	}}, change...)...)
}

func label(key, value string) func(*Evidence) {
	return func(e *Evidence) { e.Container.Labels[key] = value }
}

func imageLabel(key, value string) func(*Evidence) {
	return func(e *Evidence) { e.Container.Labels[key], e.Container.ImageLabels[key] = value, value }
}

func startedAs(given, image string) func(*Evidence) {
	return func(e *Evidence) { e.Container.User, e.Container.ImageUser = given, image }
}

func imageUnknown(e *Evidence) { e.Container.ImageKnown, e.Container.ImageLabels = false, nil }

func rules(rules ...Rule) func(*Config)   { return func(c *Config) { c.Rules = rules } }
func steps(steps ...Step) func(*Config)   { return func(c *Config) { c.Steps = steps } }
func launchers(u ...uint32) func(*Config) { return func(c *Config) { c.LauncherUIDs = u } }

func launched(e *Evidence) { e.SystemLaunched = true }

func TestResolve(t *testing.T) {
	none := Answer{User: "unattributed", UID: -1, AttributedBy: StepNone}
	by := func(step Step, name string, uid int64, confidence Confidence) Answer {
		return Answer{User: name, UID: uid, AttributedBy: step, Confidence: confidence}
	}
	with := func(a Answer, change func(*Answer)) Answer { change(&a); return a }
	labelled := func(key, name string, uid int64) Answer {
		return with(by(StepLabel, name, uid, ConfidenceMedium), func(a *Answer) { a.Key = key })
	}
	system := func(name string, uid int64) Answer {
		return with(by(StepSystem, name, uid, ConfidenceHigh), func(a *Answer) { a.System = true })
	}
	ruled := func(step Step, rule, name string, uid int64) Answer {
		return with(by(step, name, uid, ConfidenceHigh), func(a *Answer) { a.Rule = rule })
	}
	disagrees := func(a Answer) Answer { a.Disagrees = true; return a }
	waiting := func(a Answer) Answer { a.Waiting = true; return a }

	for _, test := range []struct {
		name     string
		evidence Evidence
		config   Config
		want     Answer
	}{
		// Login sessions.
		{"a user's session", process(1001, inSlice(1001)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"sudo in a session", process(0, inSlice(1001)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"sudo -u bob in alice's session", process(1002, inSlice(1001)), testConfig(), disagrees(by(StepUserSlice, "alice", 1001, ConfidenceHigh))},
		{"name with a backslash", process(1003, inSlice(1003)), testConfig(), by(StepUserSlice, `DOM\carol`, 1003, ConfidenceHigh)},
		{"slice of a uid without an account", process(4711, inSlice(4711)), testConfig(), by(StepUserSlice, "uid:4711", 4711, ConfidenceHigh)},
		{"account called unattributed", process(1004, inSlice(1004)), testConfig(), by(StepUserSlice, "uid:1004", 1004, ConfidenceHigh)},
		{"account called uid:5", process(1005, inSlice(1005)), testConfig(), by(StepUserSlice, "uid:1005", 1005, ConfidenceHigh)},
		{"name still being looked up", process(slowUID, inSlice(slowUID)), testConfig(), waiting(by(StepUserSlice, "uid:1099", slowUID, ConfidenceHigh))},
		{"root logged in", process(0, inSlice(0)), testConfig(), by(StepUserSlice, "root", 0, ConfidenceHigh)},
		{"root's slice, entered by alice", process(0, inSlice(0), login(1001)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"root's slice, root ran it as alice", process(1001, inSlice(0), login(0)), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceHigh)},
		{"rootless container in a user's slice", container(100999, inSlice(1001)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},

		// Slices of service accounts.
		{"launcher's slice", process(1002, inSlice(501)), testConfig(launchers(501)), by(StepProcessUID, "bob", 1002, ConfidenceHigh)},
		{"launcher itself", process(501, inSlice(501)), testConfig(launchers(501)), by(StepProcessUID, "flux", 501, ConfidenceHigh)},
		{"root in a launcher's slice", process(0, inSlice(501)), testConfig(launchers(501)), none},
		{"container in a launcher's slice", container(1001, inSlice(501)), testConfig(launchers(501)), none},
		{"labelled container in a launcher's slice", container(0, inSlice(998), label("owner", "bob")), testConfig(launchers(998)), labelled("owner", "bob", 1002)},
		{"service account that is no launcher", process(998, inSlice(998)), testConfig(), by(StepUserSlice, "gitlab-runner", 998, ConfidenceHigh)},

		// Processes of the host outside a slice.
		{"own account of a service", process(997, service("ollama.service")), testConfig(), by(StepProcessUID, "ollama", 997, ConfidenceHigh)},
		{"service of root", process(0, service("train.service")), testConfig(), none},
		{"service with User=alice", process(1001, service("jupyter.service")), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceHigh)},
		{"cron job of alice", process(1001, func(e *Evidence) { e.Unit, e.SystemSlice = "cron.service", true }), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceHigh)},
		{"ssh without a session, then sudo", process(0, login(1001), func(e *Evidence) { e.Unit, e.SystemSlice = "ssh.service", true }), testConfig(), by(StepLoginUID, "alice", 1001, ConfidenceMedium)},
		{"root outside everything", process(0), testConfig(), none},
		{"root's login session outside everything", process(0, login(0)), testConfig(), none},
		{"service of root restarted by alice", process(0, service("x.service"), login(1001)), testConfig(), none},
		{"uid not known", process(-1), testConfig(), none},

		// Schedulers.
		{"a job", process(1002, func(e *Evidence) { e.Kind, e.Name, e.Job = "slurm", "77", &Job{UID: 1001} }), testConfig(), disagrees(by(StepScheduler, "alice", 1001, ConfidenceHigh))},
		{"a job of root", process(0, func(e *Evidence) { e.Kind, e.Name, e.Job = "slurm", "77", &Job{} }), testConfig(), none},
		{"a job comes before a label", container(0, label("owner", "bob"), func(e *Evidence) { e.Job = &Job{UID: 1001} }), testConfig(), by(StepScheduler, "alice", 1001, ConfidenceHigh)},

		// Containers: labels.
		{"owner label", container(0, label("owner", "alice")), testConfig(), labelled("owner", "alice", 1001)},
		{"first key that names somebody", container(0, label("gpuledger.user", "nobody-at-all"), label("owner", "bob")), testConfig(), labelled("owner", "bob", 1002)},
		{"order of keys", container(0, label("owner", "bob"), label("gpuledger.user", "alice")), testConfig(), labelled("gpuledger.user", "alice", 1001)},
		{"label of the image", container(0, imageLabel("owner", "alice")), testConfig(), none},
		{"given over the image's", container(0, imageLabel("owner", "alice"), label("owner", "bob")), testConfig(), labelled("owner", "bob", 1002)},
		{"label of an image that is not known", container(0, label("owner", "alice"), imageUnknown), testConfig(), none},
		{"label names root", container(0, label("owner", "root")), testConfig(), none},
		{"label names a system account", container(0, label("owner", "ollama")), testConfig(), none},
		{"label names nobody", container(0, label("owner", "nobody")), testConfig(), none},
		{"label names no account", container(0, label("owner", "mallory")), testConfig(), none},
		{"label is a number", container(0, label("owner", "1001")), testConfig(), none},
		{"label is uid:N", container(0, label("owner", "uid:1001")), testConfig(), none},
		{"label says unattributed", container(0, label("owner", "unattributed")), testConfig(), labelled("owner", "uid:1004", 1004)},
		{"label still being looked up", container(0, label("owner", slowName)), testConfig(), waiting(none)},
		{"waiting label before a process uid", container(1002, label("owner", slowName), startedAs("1002", "")), testConfig(), waiting(by(StepProcessUID, "bob", 1002, ConfidenceMedium))},
		{"label on a service", process(0, service("x.service")), testConfig(), none},

		// Containers: uid.
		{"root in a container", container(0), testConfig(), none},
		{"image's own uid", container(1001), testConfig(), none},
		{"image's USER", container(1001, startedAs("1001", "1001")), testConfig(), none},
		{"--user", container(1001, startedAs("1001", "")), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceMedium)},
		{"--user with a group", container(1001, startedAs("1001:100", "root")), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceMedium)},
		{"only the group was given", container(1001, startedAs("1001:100", "1001")), testConfig(), none},
		{"--user with a name", container(1001, startedAs("alice", "")), testConfig(), none},
		{"--user, then another uid inside", container(1002, startedAs("1001", "")), testConfig(), none},
		{"--user 0", container(0, startedAs("0", "1001")), testConfig(), none},
		{"--user of a system account", container(997, startedAs("997", "")), testConfig(), none},
		{"--user beyond 32 bits", container(0, startedAs("4294967296", "")), testConfig(), none},
		{"--user with an unknown image", container(1001, startedAs("1001", ""), imageUnknown), testConfig(), none},
		{"runAsUser of a pod", container(1001, startedAs("1001", ""), func(e *Evidence) { e.Kind = meter.KindKubernetes }), testConfig(), none},
		{"--pid=host is no host process", container(1001, func(e *Evidence) { e.HostProcess = false }), testConfig(), none},
		{"container that no engine knows", container(1001, func(e *Evidence) { e.Container = nil }), testConfig(), none},
		{"login uid in a container", container(0, login(1001)), testConfig(), none},

		// The system's own.
		{"display server", process(0, service("display-manager.service"), program("/usr/lib/xorg/Xorg", 0)), testConfig(), system("root", 0)},
		{"greeter of the display manager", process(120, inSlice(120), program("/usr/bin/gnome-shell", 0)), testConfig(), system("gdm", 120)},
		{"monitor with a dynamic uid", process(61184, service("dcgm-exporter.service"), program("/usr/bin/dcgm-exporter", 0)), testConfig(), system("uid:61184", 61184)},
		{"monitor as nobody", process(65534, service("x.service"), program("/usr/bin/dcgm-exporter", 0)), testConfig(), system("nobody", 65534)},
		{"python3 called Xorg", process(1001, inSlice(1001), program("/home/alice/Xorg", 1001)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"root's file called Xorg in a user's slice", process(1001, inSlice(1001), program("/tmp/Xorg", 0)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"root's file called Xorg from cron", process(1001, program("/tmp/Xorg", 0), func(e *Evidence) { e.Unit, e.SystemSlice = "cron.service", true }), testConfig(), by(StepProcessUID, "alice", 1001, ConfidenceHigh)},
		{"alice's file run by root", process(0, service("x.service"), program("/home/alice/Xorg", 1001)), testConfig(), none},
		{"comm says Xorg", process(0, service("x.service"), func(e *Evidence) { e.Command = "Xorg" }), testConfig(), none},
		{"executable not known", process(0, service("x.service"), program("", -1), func(e *Evidence) { e.Command = "Xorg" }), testConfig(), none},
		{"Xorg in a container", container(0, program("/usr/bin/Xorg", 0)), testConfig(), none},
		{"MPS server started by the system for alice", process(1001, program("/usr/bin/nvidia-cuda-mps-server", 0), launched), testConfig(), system("alice", 1001)},
		{"MPS server that alice started", process(1001, inSlice(1001), program("/usr/bin/nvidia-cuda-mps-server", 0)), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"MPS server in a container", container(1001, program("/usr/bin/nvidia-cuda-mps-server", 0), launched), testConfig(), none},
		{"list of the site", process(0, service("x.service"), program("/opt/beeswarm", 0)), testConfig(func(c *Config) { c.SystemCommands = []string{"beeswarm"} }), system("root", 0)},

		// Order and switching.
		{"step switched off", process(1001, inSlice(1001)), testConfig(steps(StepLabel)), none},
		{"no step at all", process(1001, inSlice(1001)), testConfig(steps([]Step{}...)), none},
		{"default steps", process(1001, inSlice(1001)), testConfig(func(c *Config) { c.Steps = nil }), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},
		{"process before slice", process(1002, inSlice(1001)), testConfig(steps(StepProcessUID, StepUserSlice)), disagrees(by(StepProcessUID, "bob", 1002, ConfidenceHigh))},
		{"label before slice", container(0, inSlice(1001), label("owner", "bob")), testConfig(steps(StepLabel, StepUserSlice)), disagrees(labelled("owner", "bob", 1002))},
		{"medium does not disagree", container(0, inSlice(1001), label("owner", "bob")), testConfig(), by(StepUserSlice, "alice", 1001, ConfidenceHigh)},

		// Rules.
		{"rule comes first", process(1001, inSlice(1001)), testConfig(rules(Rule{Name: "r", UIDs: []uint32{1001}, User: "bob"})), disagrees(ruled(StepRule, "r", "bob", 1002))},
		{"rule that agrees", process(1001, inSlice(1001)), testConfig(rules(Rule{Name: "r", User: "alice"})), ruled(StepRule, "r", "alice", 1001)},
		{"rule that agrees with a slow name", process(slowUID, inSlice(slowUID)), testConfig(rules(Rule{Name: "r", User: "uid:1099"})), ruled(StepRule, "r", "uid:1099", slowUID)},
		{"rule that agrees by uid", process(1001, inSlice(1001)), testConfig(rules(Rule{Name: "r", User: "uid:1001"})), ruled(StepRule, "r", "uid:1001", 1001)},
		{"rule for the last comes last", process(1001, inSlice(1001)), testConfig(rules(Rule{Name: "r", Last: true, User: "bob"})), disagrees(by(StepUserSlice, "alice", 1001, ConfidenceHigh))},
		{"rule for the last where nobody knows", process(0, service("x.service")), testConfig(rules(Rule{Name: "r", Last: true, Units: []string{"x.*"}, User: "bob"})), ruled(StepRuleLast, "r", "bob", 1002)},
		{"first rule that matches", container(0), testConfig(rules(Rule{Name: "a", Kinds: []string{"host"}, User: "bob"}, Rule{Name: "b", Images: []string{"pytorch*"}, User: "alice"}, Rule{Name: "c", User: "bob"})), ruled(StepRule, "b", "alice", 1001)},
		{"rule names a group of people", container(0), testConfig(rules(Rule{Name: "r", User: "hub"})), ruled(StepRule, "r", "hub", -1)},
		{"rule names root", container(0), testConfig(rules(Rule{Name: "r", User: "root"})), ruled(StepRule, "r", "root", 0)},
		{"rule names a slow account", container(0), testConfig(rules(Rule{Name: "r", User: slowName})), waiting(ruled(StepRule, "r", slowName, -1))},
		{"rules switched off", container(0), testConfig(rules(Rule{Name: "r", User: "bob"}), steps(StepLabel)), none},

		// Project and class.
		{"project of a label", container(0, label("project", "vision"), label("gpuledger.class", "urgent")), testConfig(), with(none, func(a *Answer) { a.Project, a.Class = "vision", "urgent" })},
		{"order of sources", container(0, label("project", "b"), label("gpuledger.project", "a")), testConfig(), with(none, func(a *Answer) { a.Project = "a" })},
		{"project of the image", container(0, imageLabel("project", "pytorch")), testConfig(), none},
		{"rule before sources", container(0, label("project", "b")), testConfig(rules(Rule{Name: "r", Project: "a"})), with(none, func(a *Answer) { a.Project = "a" })},
		{"last rule after sources", container(0, label("project", "b")), testConfig(rules(Rule{Name: "r", Last: true, Project: "a", Class: "c"})), with(none, func(a *Answer) { a.Project, a.Class = "b", "c" })},
		{"two rules add up", process(1001, inSlice(1001)), testConfig(rules(Rule{Name: "p", Project: "a"}, Rule{Name: "q", Project: "x", Class: "c"})), with(by(StepUserSlice, "alice", 1001, ConfidenceHigh), func(a *Answer) { a.Project, a.Class = "a", "c" })},
		{"system has no project", process(0, service("d.service"), program("/usr/bin/X", 0)), testConfig(rules(Rule{Name: "p", Project: "a", User: "bob"})), system("root", 0)},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, Resolve(test.evidence, test.config)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestRuleConditions(t *testing.T) {
	e := container(1001, label("team", "vision/lab"), func(e *Evidence) {
		e.Unit = "docker-x.scope"
		e.Pod = &Pod{Namespace: "team-a", Name: "train-0", Labels: map[string]string{"app": "x", "team": "other"}}
	})
	for _, test := range []struct {
		name string
		rule Rule
		want bool
	}{
		{"none", Rule{}, true},
		{"kind", Rule{Kinds: []string{"host", "docker"}}, true},
		{"other kind", Rule{Kinds: []string{"host"}}, false},
		{"workload", Rule{Workloads: []string{"tr*n"}}, true},
		{"workload's whole name", Rule{Workloads: []string{"trai"}}, false},
		{"container", Rule{Containers: []string{"x", "train"}}, true},
		{"image", Rule{Images: []string{"*:2"}}, true},
		{"image with two stars", Rule{Images: []string{"py*t*ch:*"}}, true},
		{"stars do not overlap", Rule{Images: []string{"pytorch:2*2"}}, false},
		{"unit", Rule{Units: []string{"docker-*"}}, true},
		{"path", Rule{Paths: []string{"/usr/bin/python*"}}, true},
		{"other path", Rule{Paths: []string{"/opt/*"}}, false},
		{"namespace", Rule{Namespaces: []string{"team-*"}}, true},
		{"other namespace", Rule{Namespaces: []string{"b"}}, false},
		{"pod", Rule{Pods: []string{"train-*"}}, true},
		{"other pod", Rule{Pods: []string{"x"}}, false},
		{"label of the pod", Rule{Labels: map[string]string{"app": "x"}}, true},
		{"label of the container before the pod's", Rule{Labels: map[string]string{"team": "other"}}, false},
		{"label", Rule{Labels: map[string]string{"team": "vision*"}}, true},
		{"label is there", Rule{Labels: map[string]string{"team": "*"}}, true},
		{"label is not", Rule{Labels: map[string]string{"other": "*"}}, false},
		{"uid", Rule{UIDs: []uint32{1001}}, true},
		{"other uid", Rule{UIDs: []uint32{0}}, false},
		{"all together", Rule{Kinds: []string{"docker"}, UIDs: []uint32{1001}, Images: []string{"pytorch:*"}}, true},
		{"all but one", Rule{Kinds: []string{"docker"}, UIDs: []uint32{1001}, Images: []string{"tensorflow:*"}}, false},
	} {
		if got := test.rule.matches(e); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
	if (Rule{Containers: []string{"*"}}).matches(process(1001)) {
		t.Error("a pattern for containers matched a process in none")
	}
	if (Rule{UIDs: []uint32{4294967295}}).matches(process(-1)) {
		t.Error("a uid that is not known matched 4294967295")
	}
}

func TestValidate(t *testing.T) {
	for _, test := range []struct {
		name, problem string
		change        func(*Config)
	}{
		{"defaults", "", func(*Config) {}},
		{"other order", "", steps(StepLabel, StepRule)},
		{"unknown step", `"magic" is no step`, steps("magic")},
		{"system cannot be ordered", `"system" is no step`, steps(StepSystem)},
		{"step twice", "listed twice", steps(StepLabel, StepLabel)},
		{"rule without a name", "rule 1 has no name", rules(Rule{User: "a"})},
		{"two of a name", "two rules", rules(Rule{Name: "a", User: "a"}, Rule{Name: "a", User: "b"})},
		{"rule without effect", "neither", rules(Rule{Name: "a"})},
		{"rule for uid:N", "", rules(Rule{Name: "a", User: "uid:4711"})},
		{"rule for uid:x", "cannot be a user", rules(Rule{Name: "a", User: "uid:x"})},
		{"rule for uid:007", "cannot be a user", rules(Rule{Name: "a", User: "uid:007"})},
		{"rule for unattributed", "cannot be a user", rules(Rule{Name: "a", User: "unattributed"})},
		{"rule with a newline", "control characters", rules(Rule{Name: "a", Project: "a\nb"})},
		{"rule with a novel", "longer", rules(Rule{Name: "a", Class: strings.Repeat("x", 1000)})},
		{"trusted step that is none", `trusted_steps[1]: "magic" is no step`, func(c *Config) { c.TrustedSteps = []Step{StepLabel, "magic"} }},
		{"nothing trusted", "", func(c *Config) { c.TrustedSteps = []Step{} }},
		{"namespace of a team", "", func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"a", "team"}} }},
		{"namespace without a user", "namespace_users[0]: both", func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"a", ""}} }},
		{"namespace that names nobody", "namespace_users[0].namespace", func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"a", "*"}} }},
		{"namespace of uid:x", "namespace_users[0].user", func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"a", "uid:x"}} }},
		{"variable with =", "environment_keys[0]", func(c *Config) { c.EnvironmentKeys = []string{"A=B"} }},
		{"slurm's sources", "", func(c *Config) { c.ClassSources = []string{"slurm:partition", "slurm:qos"} }},
		{"source that is none", "slurm:account", func(c *Config) { c.ProjectSources = []string{"slurm:user"} }},
		{"source", "label:KEY", func(c *Config) { c.ProjectSources = []string{"env:X"} }},
		{"source without a key", "label:KEY", func(c *Config) { c.ClassSources = []string{"label:"} }},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := testConfig(test.change).Validate()
			if test.problem == "" && err != nil || test.problem != "" && (err == nil || !strings.Contains(err.Error(), test.problem)) {
				t.Errorf("got %v, want %q", err, test.problem)
			}
		})
	}
}

// Whatever the evidence and the order of steps: root is named only where
// something other than a process that runs as root says so, and a label names
// none but people.
func TestResolveProperties(t *testing.T) {
	uids := []int64{-1, 0, 120, 501, 997, 999, 1000, 1001, 1002, 1003, 1004, 1005, slowUID, 4711, 61184, 65534, 65535, 100999, 1<<32 - 2, 1<<32 - 1, 1 << 32, 1<<32 + 1001}
	names := []string{"", "root", "alice", "bob", "ollama", "nobody", "gdm", "mallory", slowName, "unattributed", "uid:5", "uid:0", "0", "1001"}
	rapid.Check(t, func(t *rapid.T) {
		uid := func(name string) int64 { return rapid.SampledFrom(uids).Draw(t, name) }
		pick := func(from []string, name string) string { return rapid.SampledFrom(from).Draw(t, name) }
		labels := func(name string) map[string]string {
			return rapid.MapOf(rapid.SampledFrom([]string{"owner", "user", "gpuledger.user", "project"}), rapid.SampledFrom(names)).Draw(t, name)
		}
		e := Evidence{
			Kind: pick([]string{meter.KindHost, meter.KindService, meter.KindDocker, meter.KindKubernetes, "slurm"}, "kind"), Unit: pick([]string{"", "x.service"}, "unit"),
			SliceUID: uid("slice"), Job: &Job{UID: uid("job")}, ProcessUID: uid("process"), EffectiveUID: uid("effective"), LoginUID: uid("login"),
			HostProcess: rapid.Bool().Draw(t, "host process"), Command: pick(names, "comm"),
			Executable: pick([]string{"", "/usr/bin/Xorg", "/tmp/Xorg", "/usr/bin/python3"}, "exe"), ExecutableUID: uid("exe uid"),
			SystemSlice: rapid.Bool().Draw(t, "system slice"), SystemLaunched: rapid.Bool().Draw(t, "system launched"),
		}
		if rapid.Bool().Draw(t, "in a container") {
			e.HostProcess = false
			e.Container = &Container{
				Labels: labels("labels"), ImageLabels: labels("image labels"), ImageKnown: rapid.Bool().Draw(t, "image known"),
				User: pick([]string{"", "0", "1001", "1001:5", "root", "alice", "997"}, "user"), ImageUser: pick([]string{"", "0", "1001", "root"}, "image user"),
				Name: pick([]string{"", "alice-x", "root-x", "gdm_x", "x"}, "name"),
			}
			if rapid.Bool().Draw(t, "bind") {
				e.Container.Binds = []Bind{{Path: pick([]string{"/srv", "/home/alice/x", "/root/x", ""}, "path"), OwnerUID: uid("owner")}}
			}
		}
		if rapid.Bool().Draw(t, "in a pod") {
			e.Pod = &Pod{Namespace: pick(names, "namespace"), Annotations: map[string]string{"hub.jupyter.org/username": pick(names, "annotation")}}
		}
		if rapid.Bool().Draw(t, "in a user namespace") {
			e.UserNamespace = &UserNamespace{RootUID: uid("root of the namespace")}
		}
		e.EngineOfRoot = rapid.Bool().Draw(t, "engine of root")
		e.Environment = map[string]string{"NB_USER": pick(names, "variable")}
		c := testConfig()
		c.LauncherUIDs = []uint32{501}
		c.Steps = rapid.Permutation(DefaultSteps).Draw(t, "order")[:rapid.IntRange(0, len(DefaultSteps)).Draw(t, "steps")]
		a := Resolve(e, c)

		if (a.UID == 0 || a.User == "root" || a.User == "uid:0") && !a.System && (e.SliceUID != 0 || a.AttributedBy != StepUserSlice) {
			t.Fatalf("root without a session of root's own: %+v from %+v", a, e)
		}
		if a.AttributedBy == StepLabel {
			if !c.Human(a.UID) {
				t.Fatalf("a label named uid %d", a.UID)
			}
			value := e.Container.Labels[a.Key]
			if people[value] != uint32(a.UID) || e.Container.ImageLabels[a.Key] == value || !e.Container.ImageKnown {
				t.Fatalf("label %s=%s named %+v", a.Key, value, a)
			}
		}
		switch a.AttributedBy {
		case StepKubernetes, StepUIDMap, StepHomePath, StepNamePrefix, StepEnvironment, StepLoginUID:
			if !c.Human(a.UID) {
				t.Fatalf("%s named uid %d", a.AttributedBy, a.UID)
			}
		}
		holdVerdicts(t, e, c, a)
		if a.Review != (a.Confidence == ConfidenceLow) {
			t.Fatalf("review: %+v", a)
		}
		if a.System && (!e.HostProcess || e.ExecutableUID != 0 || c.Human(e.ProcessUID) && !e.SystemLaunched && (e.ProcessUID != 61184 || !e.SystemSlice)) {
			t.Fatalf("a person's process is exempt: %+v", e)
		}
		// 4294967295 is the kernel's word for no uid.
		if a.User == "" || a.UID < -1 || a.UID >= 1<<32-1 {
			t.Fatalf("no answer: %+v from %+v", a, e)
		}
		if (a.User == meter.UserUnattributed) != (a.AttributedBy == StepNone) || (a.AttributedBy == StepNone) != (a.UID == -1) {
			t.Fatalf("unattributed and not: %+v", a)
		}
		if strings.HasPrefix(a.User, "uid:") && a.User != "uid:"+strconv.FormatInt(a.UID, 10) {
			t.Fatalf("%+v: the name is of another uid", a)
		}
		if !a.System && a.AttributedBy != StepNone && !slices.Contains(c.Steps, a.AttributedBy) {
			t.Fatalf("%s is switched off", a.AttributedBy)
		}
		if again := Resolve(e, c); again != a {
			t.Fatalf("not a function: %+v, %+v", a, again)
		}
	})
}
