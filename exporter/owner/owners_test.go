package owner

import (
	"slices"
	"strings"
	"testing"

	"gpuledger/exporter/meter"
)

// townspeople are the accounts of a shared server: the first person has the
// uid that images love, and there are accounts that are no people.
var townspeople = []struct {
	name string
	uid  uint32
	home string
}{
	{"root", 0, "/root"}, {"gdm", 120, "/var/lib/gdm"}, {"flux", 501, "/var/lib/flux"}, {"ollama", 997, "/usr/share/ollama"},
	{"first", 1000, "/home/first"}, {"alice", 1001, "/home/alice"}, {"bob", 1002, "/data/users/bob"},
	{`DOM\carol`, 1003, "/home/DOM/carol"}, {"bob@EXAMPLE.COM", 1004, "/home/EXAMPLE.COM/bob"}, {"Dave Smith", 1005, "/home/Dave Smith"},
	{"josé", 1006, "/home/josé"}, {"svc$", 1007, "/home/svc$"}, {"pytorch", 1008, "/home/pytorch"}, {"alice-lab", 1009, "/home/alice-lab"},
	{"dora", 170000, "/home/dora"}, {"containers", 1500, "/nonexistent"}, {"lxd", 1501, "/var/lib/lxd"}, {"nobody", 65534, "/nonexistent"},
}

const townSubUIDs = `root:1000000:1000000000
dockremap:100000:65536
alice:165536:65536
1002:231072:65536
containers:2147483647:2147483648
ghost:300000:65536
alice:400000:65536
bob:400000:65536
broken line
alice:x:65536
`

func town() Accounts {
	ids := newSubIDs("")
	ranges := parseSubIDs([]byte(townSubUIDs))
	ids.ranges.Store(&ranges)
	return Accounts{
		NameOf: func(uid uint32) (string, AccountStatus) {
			for _, a := range townspeople {
				if a.uid == uid {
					return a.name, AccountFound
				}
			}
			return "", AccountUnknown
		},
		UIDOf: func(name string) (uint32, AccountStatus) {
			for _, a := range townspeople {
				if a.name == name {
					return a.uid, AccountFound
				}
			}
			return 0, AccountUnknown
		},
		HomeOf: func(name string) (uint32, string, AccountStatus) {
			for _, a := range townspeople {
				if a.name == name {
					return a.uid, a.home, AccountFound
				}
			}
			return 0, "", AccountUnknown
		},
		SubIDOwners: ids.owners,
	}
}

func inNamespace(root int64) func(*Evidence) {
	return func(e *Evidence) { e.HostProcess, e.UserNamespace = false, &UserNamespace{RootUID: root} }
}

// dockerd says that root's engine made the container, as Docker's does.
func dockerd(e *Evidence) { e.EngineOfRoot = true }

func called(name string) func(*Evidence) {
	return func(e *Evidence) { e.Name, e.Container.Name = name, name }
}

func image(name string) func(*Evidence) { return func(e *Evidence) { e.Container.Image = name } }

func bound(owner int64, paths ...string) func(*Evidence) {
	return func(e *Evidence) {
		for _, p := range paths {
			e.Container.Binds = append(e.Container.Binds, Bind{Path: p, OwnerUID: owner})
		}
	}
}

func variables(pairs ...string) func(*Evidence) {
	return func(e *Evidence) {
		e.Environment = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			e.Environment[pairs[i]] = pairs[i+1]
		}
	}
}

func kind(kind, name string) func(*Evidence) {
	return func(e *Evidence) { e.Kind, e.Name, e.HostProcess = kind, name, false }
}

func pod(namespace string, change ...func(*Pod)) func(*Evidence) {
	return func(e *Evidence) {
		e.Kind, e.Name, e.HostProcess, e.Container = meter.KindKubernetes, namespace+"/p/c", false, nil
		e.Pod = &Pod{UID: "2fa1f2a5", Namespace: namespace, Name: "p", Labels: map[string]string{}, Annotations: map[string]string{}}
		for _, f := range change {
			f(e.Pod)
		}
	}
}

func annotated(key, value string) func(*Pod) { return func(p *Pod) { p.Annotations[key] = value } }

func slurm(uid int64) func(*Evidence) {
	return func(e *Evidence) {
		e.Kind, e.Name, e.Job = "slurm", "77", &Job{System: "slurm", ID: "77", UID: uid, Account: "vision", Partition: "a100", QOS: "urgent"}
	}
}

const composeDirectory = "com.docker.compose.project.working_dir"

// Traps that are known to have named the wrong person somewhere.
const (
	trapImageUID     = "uid 1000 of an image is not the first human"
	trapRootless     = "rootless containers are their user's"
	trapLauncher     = "a launcher's slice holds other people's jobs"
	trapSudo         = "sudo is the person's who called it"
	trapCompose      = "compose's working directory"
	trapRenamed      = "python3 renamed to Xorg is no system process"
	trapLabelRoot    = "a label that names root"
	trapLabelStrange = "a label that names a stranger"
	trapImageLabel   = "a label of the image"
	trapKeepID       = "keep-id maps shift uids"
	trapSubUID       = "owners of subordinate uids"
	trapGeneric      = "generic owners are no people"
	trapLoginUnset   = "loginuid unset below a daemon"
	trapHomes        = "several homes"
	trapNamespace    = "a user namespace made inside a container"
	trapChowned      = "files that a container gave its own uid"
	trapImageName    = "a container called after its image"
	trapOddNames     = "names of directory services"
	trapPodUID       = "uids in pods"
	trapService      = "User= of a service"
)

var traps = []string{
	trapImageUID, trapRootless, trapLauncher, trapSudo, trapCompose, trapRenamed, trapLabelRoot, trapLabelStrange, trapImageLabel, trapKeepID,
	trapSubUID, trapGeneric, trapLoginUnset, trapHomes, trapNamespace, trapChowned, trapImageName, trapOddNames, trapPodUID, trapService,
}

// ownerCase is one process and whose it is.
type ownerCase struct {
	name     string
	trap     string // empty for a case that is none
	evidence Evidence
	change   func(*Config) // nil for the default configuration
	user     string
	step     Step
	review   bool
}

func ownerCases() []ownerCase {
	site := func(rules ...Rule) func(*Config) { return func(c *Config) { c.Rules = rules } }
	none := meter.UserUnattributed
	return []ownerCase{
		{"rule", "", container(0, called("hub-1")), site(Rule{Name: "hub", Containers: []string{"hub-*"}, User: "alice"}), "alice", StepRule, false},
		{"job", "", process(0, slurm(1001)), nil, "alice", StepScheduler, false},
		{"job whose owner is not known", "", process(1001, slurm(-1)), nil, "alice", StepProcessUID, false},
		{"rule for the last", "", container(0, called("ci-9")), site(Rule{Name: "ci", Last: true, Containers: []string{"ci-*"}, User: "ci"}), "ci", StepRuleLast, false},
		{"nobody", "", container(0), nil, none, StepNone, false},
		{"system", "", process(0, service("display-manager.service"), program("/usr/lib/xorg/Xorg", 0)), nil, "root", StepSystem, false},

		{"annotation of JupyterHub", "", process(1000, pod("jhub", annotated("hub.jupyter.org/username", "alice"))), nil, "alice", StepKubernetes, false},
		{"annotation names root", trapLabelRoot, process(0, pod("jhub", annotated("hub.jupyter.org/username", "root"))), nil, none, StepNone, false},
		{"annotation names a stranger", trapLabelStrange, process(0, pod("jhub", annotated("hub.jupyter.org/username", "eve@example.com"))), nil, none, StepNone, false},
		{"users of the cluster need no account", "", process(0, pod("jhub", annotated("hub.jupyter.org/username", "eve@example.com"))),
			func(c *Config) { c.PodUsersWithoutAccount = true }, "eve@example.com", StepKubernetes, false},
		{"nor may they be root", trapLabelRoot, process(0, pod("jhub", annotated("hub.jupyter.org/username", "root"))),
			func(c *Config) { c.PodUsersWithoutAccount = true }, none, StepNone, false},
		{"nor uid:0", trapLabelRoot, process(0, pod("jhub", annotated("hub.jupyter.org/username", "uid:0"))),
			func(c *Config) { c.PodUsersWithoutAccount = true }, none, StepNone, false},
		{"label of the pod", "", process(0, pod("lab", func(p *Pod) { p.Labels["gpuledger.user"] = "bob" })), nil, "bob", StepKubernetes, false},
		{"namespace of a team", "", process(0, pod("team-vision-dev")),
			func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"team-vision-*", "vision"}} }, "vision", StepKubernetes, false},
		{"namespace of a person", "", process(0, pod("user-bob")),
			func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"team-*", "team"}, {"user-*", "*"}} }, "bob", StepKubernetes, false},
		{"namespace that names root", trapLabelRoot, process(0, pod("user-root")),
			func(c *Config) { c.NamespaceUsers = []NamespaceUser{{"user-*", "*"}} }, none, StepNone, false},
		{"runAsUser", trapPodUID, process(1000, pod("lab")), nil, none, StepNone, false},
		{"pod with a user namespace", trapPodUID, process(2147483647, pod("lab"), inNamespace(2147483647), dockerd), nil, none, StepNone, false},
		{"image's user in a pod", trapPodUID, process(1000, pod("lab"), dockerd, inNamespace(1000)), nil, none, StepNone, false},

		{"session", "", process(1001, inSlice(1001)), nil, "alice", StepUserSlice, false},
		{"sudo in a session", trapSudo, process(0, inSlice(1001), variables("SUDO_USER", "bob")), nil, "alice", StepUserSlice, false},
		{"sudo over ssh without a session", trapSudo, process(0, login(1001)), nil, "alice", StepLoginUID, false},
		{"sudo podman", trapSudo, process(0, kind(meter.KindPodman, "x"), login(1001)), nil, "alice", StepLoginUID, false},
		{"sudo where no login is recorded", trapSudo, process(0, variables("SUDO_USER", "alice")), nil, "alice", StepEnvironment, true},
		{"SUDO_USER is root", trapSudo, process(0, variables("SUDO_USER", "root")), nil, none, StepNone, false},
		{"rootless podman", trapRootless, process(165536+999, kind(meter.KindPodman, "x"), inSlice(1001), inNamespace(1001)), nil, "alice", StepUserSlice, false},
		{"rootless podman outside every slice", trapRootless, process(165536+999, kind(meter.KindHost, ""), inNamespace(1001)), nil, "alice", StepUIDMap, false},
		{"flux", trapLauncher, process(1002, inSlice(501)), func(c *Config) { c.LauncherUIDs = []uint32{501} }, "bob", StepProcessUID, false},
		{"flux, and root's part of a job", trapLauncher, process(0, inSlice(501)), func(c *Config) { c.LauncherUIDs = []uint32{501} }, none, StepNone, false},

		{"label", "", container(0, label("owner", "alice")), nil, "alice", StepLabel, false},
		{"label names root", trapLabelRoot, container(0, label("owner", "root")), nil, none, StepNone, false},
		{"label names a system account", trapLabelRoot, container(0, label("owner", "ollama")), nil, none, StepNone, false},
		{"label names a stranger", trapLabelStrange, container(0, label("owner", "mallory")), nil, none, StepNone, false},
		{"label of the image", trapImageLabel, container(0, imageLabel("owner", "alice")), nil, none, StepNone, false},
		{"compose's label of the image", trapImageLabel, container(0, imageLabel(composeDirectory, "/home/alice/x")), nil, none, StepNone, false},

		{"image's USER 1000", trapImageUID, container(1000, startedAs("1000", "1000")), nil, none, StepNone, false},
		{"image that is not known", trapImageUID, container(1000, startedAs("1000", ""), imageUnknown), nil, none, StepNone, false},
		{"--user", "", container(1001, startedAs("1001:100", "1000")), nil, "alice", StepProcessUID, false},
		{"service of a person", trapService, process(1001, service("train.service")), nil, "alice", StepProcessUID, false},
		{"service's own account", trapService, process(997, service("ollama.service")), nil, "ollama", StepProcessUID, false},
		{"service of root", trapService, process(0, service("train.service"), login(1001)), nil, none, StepNone, false},

		{"keep-id", trapKeepID, process(1001, kind(meter.KindPodman, "x"), inNamespace(165536)), nil, "alice", StepUIDMap, false},
		{"uid 1000 of a rootless image", trapKeepID, process(166535, kind(meter.KindPodman, "x"), inNamespace(1001)), nil, "alice", StepUIDMap, false},
		{"range of a person, by name", trapSubUID, container(165536+33, inNamespace(165536), dockerd), nil, "alice", StepUIDMap, false},
		{"range of a person, by number", trapSubUID, container(231072, inNamespace(231072), dockerd), nil, "bob", StepUIDMap, false},
		{"end of a range", trapSubUID, container(231071, inNamespace(231071), dockerd), nil, "alice", StepUIDMap, false},
		{"range of an account that is gone", trapSubUID, container(300000, inNamespace(300000), dockerd), nil, none, StepNone, false},
		{"range of two people", trapSubUID, container(400000, inNamespace(400000), dockerd), nil, none, StepNone, false},
		{"account whose uid is lent to another", trapSubUID, container(170000, inNamespace(170000), dockerd), nil, none, StepNone, false},
		{"range of nobody", trapSubUID, container(600000, inNamespace(600000), dockerd), nil, none, StepNone, false},
		{"userns-remap", trapGeneric, container(101000, inNamespace(100000), dockerd), nil, none, StepNone, false},
		{"LXD", trapGeneric, process(1001000, kind(meter.KindLXC, "web"), inNamespace(1000000), dockerd), nil, none, StepNone, false},
		{"podman --userns=auto", trapGeneric, process(2147483647, kind(meter.KindPodman, "x"), inNamespace(2147483647), dockerd), nil, none, StepNone, false},
		{"a person whom the site calls generic", trapGeneric, container(165536, inNamespace(165536), dockerd), func(c *Config) { c.GenericOwners = []string{"uid:1001"} }, none, StepNone, false},
		{"not a namespace of its own", "", process(0, kind("container", "x")), nil, none, StepNone, false},
		{"root of a namespace is the host's", trapNamespace, container(1000, inNamespace(0), dockerd), nil, none, StepNone, false},
		{"image's user makes a namespace", trapNamespace, container(1000, startedAs("1000", "1000"), inNamespace(1000), dockerd), nil, none, StepNone, false},

		{"compose", trapCompose, container(0, label(composeDirectory, "/home/alice/llm/serve")), nil, "alice", StepHomePath, false},
		{"compose in a home elsewhere", trapCompose, container(0, label(composeDirectory, "/data/users/bob")), nil, "bob", StepHomePath, false},
		{"compose of a person whom dots lead to", trapCompose, container(0, label(composeDirectory, "/home/alice/../../data/users/bob/x")), nil, "bob", StepHomePath, false},
		{"compose in a shared checkout", trapCompose, container(0, label(composeDirectory, "/srv/llm/alice")), nil, none, StepNone, false},
		{"compose in /home itself", trapCompose, container(0, label(composeDirectory, "/home")), nil, none, StepNone, false},
		{"compose in root's home", trapCompose, container(0, label(composeDirectory, "/root/x")), nil, none, StepNone, false},
		{"development container", "", container(0, label("devcontainer.local_folder", "/home/Dave Smith/repo")), nil, "Dave Smith", StepHomePath, false},
		{"given a home", "", container(0, bound(1001, "/home/alice")), nil, "alice", StepHomePath, false},
		{"given somebody's files", "", container(0, bound(1002, "/srv/models"), bound(0, "/etc/localtime", "/run/docker.sock")), nil, "bob", StepHomePath, false},
		{"given files in a home that are another's", "", container(0, bound(1002, "/home/alice/shared")), nil, "alice", StepHomePath, false},
		{"files of the uid that the image runs as", trapChowned, container(1000, startedAs("1000", "1000"), bound(1000, "/srv/jovyan")), nil, none, StepNone, false},
		{"files of the real uid", trapChowned, container(1000, func(e *Evidence) { e.EffectiveUID = 0 }, bound(1000, "/srv/jovyan")), nil, none, StepNone, false},
		{"files of the effective uid", trapChowned, container(0, func(e *Evidence) { e.EffectiveUID = 1000 }, bound(1000, "/srv/jovyan")), nil, none, StepNone, false},
		{"files of an account that is gone", "", container(0, bound(4711, "/srv/old")), nil, none, StepNone, false},
		{"home of an account that the site calls generic", trapGeneric, container(0, bound(0, "/home/alice/x")), func(c *Config) { c.GenericOwners = []string{"alice"} }, none, StepNone, false},
		{"files of an account that the site calls generic", trapGeneric, container(0, bound(1001, "/srv/x")), func(c *Config) { c.GenericOwners = []string{"alice"} }, none, StepNone, false},
		{"pod that was given a home", trapPodUID, container(0, bound(0, "/home/alice/x"), kind(meter.KindKubernetes, "n/p/c")), nil, none, StepNone, false},
		{"pod whose container is called after a person", trapPodUID, container(0, called("alice-x"), kind(meter.KindKubernetes, "n/p/c")), nil, none, StepNone, false},
		{"two homes", trapHomes, container(0, bound(1001, "/home/alice/code"), bound(1002, "/data/users/bob/data")), nil, none, StepNone, false},
		{"home and another's files", trapHomes, container(0, label(composeDirectory, "/home/alice/x"), bound(1002, "/srv/bob")), nil, none, StepNone, false},
		{"one home twice", trapHomes, container(0, label(composeDirectory, "/home/alice/x"), bound(1001, "/home/alice/x", "/srv/alices")), nil, "alice", StepHomePath, false},

		{"called after a person", "", container(0, called("bob_train")), nil, "bob", StepNamePrefix, true},
		{"virtual machine called after a person", "", process(64055, kind(meter.KindVM, "alice-win10")), nil, "alice", StepNamePrefix, true},
		{"name that begins with two accounts", "", container(0, called("alice-lab-7")), nil, none, StepNone, false},
		{"whole name", "", container(0, called("alice")), nil, none, StepNone, false},
		{"called after root", trapLabelRoot, container(0, called("root-x")), nil, none, StepNone, false},
		{"called after a generic account", trapGeneric, container(0, called("containers-x")), nil, none, StepNone, false},
		{"called after its image", trapImageName, container(0, called("pytorch-1"), image("nvcr.io/nvidia/pytorch:25.01-py3")), nil, none, StepNone, false},
		{"called after its longer image", trapImageName, container(0, called("pytorch-1"), image("pytorch-cuda@sha256:00")), nil, none, StepNone, false},
		{"called after a person, image like another", "", container(0, called("alice-pytorch"), image("pytorch")), nil, "alice", StepNamePrefix, true},

		{"variable", "", container(1000, variables("NB_USER", "jovyan", "JUPYTERHUB_USER", "alice")), nil, "alice", StepEnvironment, true},
		{"variable names root", trapLabelRoot, container(0, variables("NB_USER", "root")), nil, none, StepNone, false},
		{"variable that is not on the list", "", container(0, variables("USER", "alice")), nil, none, StepNone, false},

		{"docker started from a login", trapLoginUnset, container(0, login(1001)), nil, none, StepNone, false},
		{"no login recorded", trapLoginUnset, process(0), nil, none, StepNone, false},
		{"podman without a login", trapLoginUnset, process(0, kind(meter.KindPodman, "x")), nil, none, StepNone, false},

		{"python3 called Xorg", trapRenamed, process(1001, inSlice(1001), program("/home/alice/Xorg", 1001)), nil, "alice", StepUserSlice, false},
		{"root's Xorg mounted elsewhere by alice", trapRenamed, process(1001, program("/tmp/x/Xorg", 0)), nil, "alice", StepProcessUID, false},
		{"Xorg in a user namespace", trapRenamed, process(1001, program("/usr/bin/Xorg", 0), inNamespace(1001)), nil, "alice", StepUIDMap, false},
		{"Xorg by a person in a system slice", trapRenamed, process(1001, service("x.service"), program("/usr/bin/Xorg", 0)), nil, "alice", StepProcessUID, false},
		{"python3 called Xorg in a container", trapRenamed, container(0, program("/usr/bin/Xorg", 0), label("owner", "alice")), nil, "alice", StepLabel, false},
		{"Xorg by comm", trapRenamed, process(1001, inSlice(1001), func(e *Evidence) { e.Command = "Xorg" }), nil, "alice", StepUserSlice, false},

		{"domain with a backslash", trapOddNames, process(1003, inSlice(1003)), nil, `DOM\carol`, StepUserSlice, false},
		{"address", trapOddNames, container(0, label("owner", "bob@EXAMPLE.COM")), nil, "bob@EXAMPLE.COM", StepLabel, false},
		{"space", trapOddNames, container(0, variables("NB_USER", "Dave Smith")), nil, "Dave Smith", StepEnvironment, true},
		{"accent", trapOddNames, container(0, called("josé-train")), nil, "josé", StepNamePrefix, true},
		{"dollar", trapOddNames, process(1007, inSlice(1007)), nil, "svc$", StepUserSlice, false},
		{"no account", trapOddNames, process(4711, inSlice(4711)), nil, "uid:4711", StepUserSlice, false},
	}
}

func TestOwners(t *testing.T) {
	for _, test := range ownerCases() {
		t.Run(strings.ReplaceAll(test.name, "/", "_"), func(t *testing.T) {
			c := DefaultConfig()
			c.Accounts = town()
			if test.change != nil {
				test.change(&c)
			}
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
			answer := Resolve(test.evidence, c)
			if answer.User != test.user || answer.AttributedBy != test.step || answer.Review != test.review {
				t.Errorf("it is %s by %s (review %v), want %s by %s (review %v)\n%s",
					answer.User, answer.AttributedBy, answer.Review, test.user, test.step, test.review, told(Explain(test.evidence, c)))
			}
			holdVerdicts(t, test.evidence, c, answer)
		})
	}
}

func told(verdicts []Verdict) string {
	var lines []string
	for _, v := range verdicts {
		lines = append(lines, string(v.Step)+" "+v.Answer.User+": "+v.Why)
	}
	return strings.Join(lines, "\n")
}

// holdVerdicts holds what Explain says to what Resolve said.
func holdVerdicts(t interface {
	Helper()
	Errorf(string, ...any)
}, e Evidence, c Config, answer Answer) {
	t.Helper()
	verdicts := Explain(e, c)
	decides := 0
	for i, v := range verdicts {
		if v.Why == "" {
			t.Errorf("%s does not say why", v.Step)
		}
		if v.Decides {
			decides++
			if v.Answer != answer || !v.Named || v.Off || v.Step != answer.AttributedBy {
				t.Errorf("the verdict that decides is %+v, the answer %+v", v, answer)
			}
			if slices.ContainsFunc(verdicts[:i], func(v Verdict) bool { return v.Named }) {
				t.Errorf("%s decides after another that names somebody", v.Step)
			}
		}
	}
	want := 1
	if answer.AttributedBy == StepNone {
		want = 0
	}
	if decides != want {
		t.Errorf("%d verdicts decide, want %d", decides, want)
	}
	if answer.System && len(verdicts) != 1 {
		t.Errorf("%d verdicts on the system's own", len(verdicts))
	}
	if !answer.System && len(verdicts) != len(DefaultSteps) {
		t.Errorf("%d verdicts, want one for each of %d steps", len(verdicts), len(DefaultSteps))
	}
}

// Each step decides a case, and each trap has one: a step or trap without is
// not tested at all.
func TestEveryStepAndTrapHasACase(t *testing.T) {
	steps, seen := map[Step]int{}, map[string]int{}
	for _, test := range ownerCases() {
		steps[test.step]++
		seen[test.trap]++
	}
	for _, step := range append(slices.Clone(DefaultSteps), StepSystem, StepNone) {
		if steps[step] == 0 {
			t.Errorf("no case is decided by step %s", step)
		}
	}
	for _, trap := range traps {
		if seen[trap] == 0 {
			t.Errorf("no case for the trap %q", trap)
		}
		delete(seen, trap)
	}
	delete(seen, "")
	for trap := range seen {
		t.Errorf("the trap %q is not listed", trap)
	}
}

// A step decides only because it is switched on: without it the same case is
// somebody else's or nobody's.
func TestEveryStepCanBeSwitchedOff(t *testing.T) {
	for _, test := range ownerCases() {
		if test.step == StepNone || test.step == StepSystem {
			continue
		}
		c := DefaultConfig()
		c.Accounts = town()
		if test.change != nil {
			test.change(&c)
		}
		c.Steps = slices.DeleteFunc(slices.Clone(DefaultSteps), func(s Step) bool { return s == test.step })
		if got := Resolve(test.evidence, c).AttributedBy; got == test.step {
			t.Errorf("%s: %s decides and is switched off", test.name, got)
		}
		c.Steps = []Step{test.step}
		if got := Resolve(test.evidence, c); got.AttributedBy != test.step || got.User != test.user {
			t.Errorf("%s: alone, %s names %s by %s", test.name, test.step, got.User, got.AttributedBy)
		}
	}
}

func TestTrustedSteps(t *testing.T) {
	for _, step := range DefaultSteps {
		low := false
		for _, test := range ownerCases() {
			if test.step != step {
				continue
			}
			c := DefaultConfig()
			c.Accounts = town()
			if test.change != nil {
				test.change(&c)
			}
			answer := Resolve(test.evidence, c)
			low = low || answer.Confidence == ConfidenceLow
			if answer.Review != (answer.Confidence == ConfidenceLow) {
				t.Errorf("%s: confidence %s, review %v", test.name, answer.Confidence, answer.Review)
			}
			c.TrustedSteps = []Step{}
			if answer := Resolve(test.evidence, c); !answer.Review || answer.User != test.user {
				t.Errorf("%s: where no step is trusted: %+v", test.name, answer)
			}
			c.TrustedSteps = []Step{step}
			if answer := Resolve(test.evidence, c); answer.Review {
				t.Errorf("%s: %s is trusted: %+v", test.name, step, answer)
			}
		}
		if low == slices.Contains(DefaultTrustedSteps, step) {
			t.Errorf("%s: low %v, trusted %v", step, low, !low)
		}
	}
}

func TestProjectAndClassFromSchedulers(t *testing.T) {
	batch := func(e *Evidence) { e.Pod.PriorityClass = "batch" }
	for _, test := range []struct {
		name           string
		evidence       Evidence
		change         func(*Config)
		project, class string
	}{
		{"slurm", process(1001, slurm(1001)), nil, "vision", "urgent"},
		{"slurm's partition", process(1001, slurm(1001)), func(c *Config) { c.ClassSources = []string{"slurm:partition"} }, "vision", "a100"},
		{"another scheduler's account is none of Slurm's", process(1001, slurm(1001), func(e *Evidence) { e.Job.System = "pbs" }), nil, "", ""},
		{"pod", process(0, pod("lab"), batch), nil, "lab", "batch"},
		{"pod's label", process(0, pod("lab", func(p *Pod) { p.Labels["project"] = "x" })), func(c *Config) { c.ProjectSources = []string{"label:project"} }, "x", ""},
		{"scheduler before label", container(0, label("gpuledger.project", "x"), slurm(1001)), nil, "vision", "urgent"},
		{"rule before scheduler", process(1001, slurm(1001)), rules(Rule{Name: "r", Project: "p", Class: "c"}), "p", "c"},
	} {
		c := DefaultConfig()
		c.Accounts = town()
		if test.change != nil {
			test.change(&c)
		}
		if a := Resolve(test.evidence, c); a.Project != test.project || a.Class != test.class {
			t.Errorf("%s: project %q class %q, want %q and %q", test.name, a.Project, a.Class, test.project, test.class)
		}
	}
}

// What an environment holds is shown to nobody, unless it is somebody's name.
func TestVerdictsKeepTheEnvironmentToThemselves(t *testing.T) {
	c := DefaultConfig()
	c.Accounts = town()
	for _, e := range []Evidence{
		container(0, variables("NB_USER", "hunter2")), process(0, variables("SUDO_USER", "hunter2", "NB_USER", "alice")),
	} {
		if text := told(Explain(e, c)); strings.Contains(text, "hunter2") {
			t.Errorf("a verdict shows what a variable holds:\n%s", text)
		}
	}
}

// A step that cannot tell yet keeps the answer open.
func TestWaitingSteps(t *testing.T) {
	slow := Accounts{
		NameOf:      func(uint32) (string, AccountStatus) { return "", AccountWaiting },
		UIDOf:       func(string) (uint32, AccountStatus) { return 0, AccountWaiting },
		HomeOf:      func(string) (uint32, string, AccountStatus) { return 0, "", AccountWaiting },
		SubIDOwners: func(uint32) ([]string, AccountStatus) { return nil, AccountWaiting },
	}
	for name, e := range map[string]Evidence{
		"annotation": process(0, pod("x", annotated("hub.jupyter.org/username", "alice"))),
		"label":      container(0, label("owner", "alice")),
		"map":        container(165536, inNamespace(165536)),
		"directory":  container(0, label(composeDirectory, "/home/alice")),
		"files":      container(0, bound(1001, "/srv")),
		"name":       container(0, called("alice-x")),
		"variable":   container(0, variables("NB_USER", "alice")),
	} {
		c := DefaultConfig()
		c.Accounts = slow
		if a := Resolve(e, c); !a.Waiting || a.AttributedBy != StepNone {
			t.Errorf("%s: %+v, want nobody yet", name, a)
		}
	}
	if name := imageName("localhost:5000/a/b:tag@sha256:00"); name != "b" {
		t.Errorf("image name %q", name)
	}
}
