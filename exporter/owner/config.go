package owner

import (
	"fmt"
	"slices"
	"strings"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs/text"
)

// Config is the site's way of naming users.
type Config struct {
	// Steps in the order to try; nil means DefaultSteps. A step that is not
	// named is switched off.
	Steps []Step `yaml:"steps"`
	// TrustedSteps are those whose answers need no review before they are
	// billed; nil means DefaultTrustedSteps.
	TrustedSteps []Step `yaml:"trusted_steps"`
	Rules        []Rule `yaml:"rules"`
	// OwnerLabels are the container labels that may name the user, the first
	// that does wins.
	OwnerLabels []string `yaml:"owner_labels"`
	// NamespaceUsers say whose a Kubernetes namespace is, the first that matches
	// wins; PodOwnerAnnotations and PodOwnerLabels may name a pod's user.
	NamespaceUsers      []NamespaceUser `yaml:"namespace_users"`
	PodOwnerAnnotations []string        `yaml:"pod_owner_annotations"`
	PodOwnerLabels      []string        `yaml:"pod_owner_labels"`
	// PodUsersWithoutAccount takes what names a pod's user as it is, where it is
	// no account of the node: many clusters' users have none there.
	PodUsersWithoutAccount bool `yaml:"pod_users_without_account"`
	// HomePathLabels are container labels that hold a directory of the host.
	HomePathLabels []string `yaml:"home_path_labels"`
	// EnvironmentKeys are the only variables that are ever looked for in a
	// process's environment.
	EnvironmentKeys []string `yaml:"environment_keys"`
	// ProjectSources and ClassSources are tried in order; the first that is not
	// empty wins. Their forms are in source.go.
	ProjectSources []string `yaml:"project_sources"`
	ClassSources   []string `yaml:"class_sources"`
	// LauncherUIDs are service accounts whose slices hold other people's jobs
	// (flux, a CI runner): there the process's own uid counts.
	LauncherUIDs []uint32 `yaml:"launcher_uids"`
	// GenericOwners are accounts that own subordinate uids, directories or
	// containers for everybody, by name or as uid:N: they are no people.
	GenericOwners []string `yaml:"generic_owners"`
	// SystemCommands are programs that are shown and never billed if they are
	// root's own and run for the system.
	SystemCommands []string `yaml:"system_commands"`
	// MinimumHumanUID is the first uid of a person (UID_MIN of login.defs).
	MinimumHumanUID uint32 `yaml:"minimum_human_uid"`
	// NobodyUIDs are uids above it that are no person.
	NobodyUIDs []uint32 `yaml:"nobody_uids"`

	// Accounts looks names up.
	Accounts Accounts `yaml:"-"`
}

// NamespaceUser says whose pods of certain namespaces are.
type NamespaceUser struct {
	Namespace string `yaml:"namespace"` // pattern: * is anything
	// User is an account, uid:N or any other name; * is the account that the
	// namespace names where its pattern has its one *.
	User string `yaml:"user"`
}

// DefaultConfig is a configuration that works on any host; accounts are the
// caller's to set.
func DefaultConfig() Config {
	return Config{
		Steps:               slices.Clone(DefaultSteps),
		TrustedSteps:        slices.Clone(DefaultTrustedSteps),
		OwnerLabels:         []string{"gpuledger.user", "com.gpuledger.user", "owner", "user"},
		PodOwnerAnnotations: []string{"hub.jupyter.org/username", "gpuledger.user"},
		PodOwnerLabels:      []string{"gpuledger.user"},
		HomePathLabels:      []string{"com.docker.compose.project.working_dir", "devcontainer.local_folder"},
		EnvironmentKeys:     []string{"JUPYTERHUB_USER", "NB_USER", "SUDO_USER"},
		ProjectSources:      []string{"slurm:account", "kubernetes:namespace", "label:gpuledger.project", "label:com.gpuledger.project", "label:project"},
		ClassSources:        []string{"slurm:qos", "kubernetes:priority_class", "label:gpuledger.class", "label:com.gpuledger.class"},
		GenericOwners:       []string{"root", "dockremap", "lxd", "incus", "containers", "kubelet"},
		SystemCommands: []string{
			"Xorg", "X", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "gdm-x-session", "sddm-greeter",
			"nvidia-cuda-mps-server", "nvidia-cuda-mps-control", "nvidia-persistenced", "nvidia-powerd",
			"nvidia-fabricmanager", "nv-fabricmanager", "nv-hostengine", "dcgm-exporter", "dcgmi", "dcgmproftester",
			"nvidia-smi", "nvtop", "gpu-exporter", "gwho",
		},
		MinimumHumanUID: 1000,
		NobodyUIDs:      []uint32{65534, 65535},
	}
}

// Uses reports whether a step is switched on.
func (c Config) Uses(step Step) bool { return slices.Contains(c.steps(), step) }

// Reaches reports whether a step has a say about a process for which the
// answer was so without it.
func (c Config) Reaches(step Step, so Answer) bool {
	if so.System {
		return false
	}
	steps := c.steps()
	at := slices.Index(steps, step)
	decided := slices.Index(steps, so.AttributedBy)
	return at >= 0 && (decided < 0 || at < decided)
}

func (c Config) steps() []Step {
	if c.Steps == nil {
		return DefaultSteps
	}
	return c.Steps
}

func (c Config) trusts(step Step) bool {
	if c.TrustedSteps == nil {
		return slices.Contains(DefaultTrustedSteps, step)
	}
	return slices.Contains(c.TrustedSteps, step)
}

// ConfigError says what in the configuration cannot be meant, and where.
type ConfigError struct {
	// Path is the value's below the configuration, such as rules[1].user.
	Path    string
	Problem string
}

// Error implements error.
func (e *ConfigError) Error() string { return "owner." + e.Path + ": " + e.Problem }

func configError(path, format string, arguments ...any) error {
	return &ConfigError{Path: path, Problem: fmt.Sprintf(format, arguments...)}
}

// Validate says what in the configuration cannot be meant: a *ConfigError.
func (c Config) Validate() error {
	for _, list := range []struct {
		key   string
		steps []Step
	}{{"steps", c.Steps}, {"trusted_steps", c.TrustedSteps}} {
		for i, step := range list.steps {
			path := fmt.Sprintf("%s[%d]", list.key, i)
			if !slices.Contains(DefaultSteps, step) {
				return configError(path, "%q is no step; known are %v", step, DefaultSteps)
			}
			if slices.Contains(list.steps[:i], step) {
				return configError(path, "%q is listed twice", step)
			}
		}
	}
	for i := range c.Rules {
		if err := c.validateRule(i); err != nil {
			return err
		}
	}
	for i, each := range c.NamespaceUsers {
		path := fmt.Sprintf("namespace_users[%d]", i)
		switch {
		case each.Namespace == "" || each.User == "":
			return configError(path, "both namespace and user have to be given")
		case each.User == anyName && strings.Count(each.Namespace, "*") != 1:
			return configError(path+".namespace", "%q must have one * where the namespace names the user", each.Namespace)
		case each.User != anyName && !usable(each.User):
			return configError(path+".user", "%q cannot be a user: give the account's name, or uid:N", each.User)
		}
	}
	for _, list := range []struct {
		key     string
		sources []string
	}{{"project_sources", c.ProjectSources}, {"class_sources", c.ClassSources}} {
		for i, source := range list.sources {
			if !knownSource(source) {
				return configError(fmt.Sprintf("%s[%d]", list.key, i), "%q is none of label:KEY, %s", source, strings.Join(fixedSources(), ", "))
			}
		}
	}
	for i, key := range c.EnvironmentKeys {
		if key == "" || strings.ContainsAny(key, "=\x00") {
			return configError(fmt.Sprintf("environment_keys[%d]", i), "%q is no variable's name", key)
		}
	}
	return nil
}

func (c Config) validateRule(i int) error {
	rule := c.Rules[i]
	path := fmt.Sprintf("rules[%d]", i)
	if rule.Name == "" {
		return configError(path, "rule %d has no name", i+1)
	}
	if slices.ContainsFunc(c.Rules[:i], func(other Rule) bool { return other.Name == rule.Name }) {
		return configError(path+".name", "two rules are named %q", rule.Name)
	}
	if rule.User == "" && rule.Project == "" && rule.Class == "" {
		return configError(path, "rule %q sets neither user nor project nor class", rule.Name)
	}
	for _, value := range []struct{ key, text string }{{"user", rule.User}, {"project", rule.Project}, {"class", rule.Class}} {
		if value.text != text.Clean(value.text, maxAccountBytes) {
			return configError(path+"."+value.key, "rule %q: %q is longer than %d bytes or holds control characters", rule.Name, value.text, maxAccountBytes)
		}
	}
	if rule.User != "" && !usable(rule.User) {
		return configError(path+".user", "rule %q: %q cannot be a user: give the account's name, or uid:N", rule.Name, rule.User)
	}
	return nil
}

// usable reports names that are not ours for something else.
func usable(user string) bool {
	_, number := uidNotation(user)
	return user != meter.UserUnattributed && (number || !strings.HasPrefix(user, uidPrefix)) && user == text.Clean(user, maxAccountBytes)
}
