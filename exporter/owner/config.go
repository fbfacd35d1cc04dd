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
	Rules []Rule `yaml:"rules"`
	// OwnerLabels are the container labels that may name the user, the first
	// that does wins.
	OwnerLabels []string `yaml:"owner_labels"`
	// ProjectSources and ClassSources are tried in order; the first that is not
	// empty wins. The form is "label:KEY".
	ProjectSources []string `yaml:"project_sources"`
	ClassSources   []string `yaml:"class_sources"`
	// LauncherUIDs are service accounts whose slices hold other people's jobs
	// (flux, a CI runner): there the process's own uid counts.
	LauncherUIDs []uint32 `yaml:"launcher_uids"`
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

// Rule is one site rule. Every condition that is given has to hold; those that
// are lists hold if one entry does. A rule without a user may still set project
// and class.
type Rule struct {
	Name string `yaml:"name"`
	// Last tries the rule after all other evidence and not before it.
	Last bool `yaml:"last"`

	Kinds      []string          `yaml:"kind"`
	Workloads  []string          `yaml:"workload"`  // patterns: * is anything
	Containers []string          `yaml:"container"` // patterns of the container's name
	Images     []string          `yaml:"image"`     // patterns
	Units      []string          `yaml:"unit"`      // patterns
	Labels     map[string]string `yaml:"label"`     // key: pattern
	UIDs       []uint32          `yaml:"uid"`       // real uid of the process

	User    string `yaml:"user"`
	Project string `yaml:"project"`
	Class   string `yaml:"class"`
}

// DefaultConfig is a configuration that works on any host; accounts are the
// caller's to set.
func DefaultConfig() Config {
	return Config{
		Steps:          slices.Clone(DefaultSteps),
		OwnerLabels:    []string{"gpuledger.user", "com.gpuledger.user", "owner", "user"},
		ProjectSources: []string{"label:gpuledger.project", "label:com.gpuledger.project", "label:project"},
		ClassSources:   []string{"label:gpuledger.class", "label:com.gpuledger.class"},
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

// labelSource begins a source that is a container's label.
const labelSource = "label:"

// Validate says what in the configuration cannot be meant.
func (c Config) Validate() error {
	for i, step := range c.Steps {
		if !slices.Contains(DefaultSteps, step) {
			return fmt.Errorf("owner steps: %q is no step; known are %v", step, DefaultSteps)
		}
		if slices.Contains(c.Steps[:i], step) {
			return fmt.Errorf("owner steps: %q is listed twice", step)
		}
	}
	for i, rule := range c.Rules {
		name := rule.Name
		if name == "" {
			return fmt.Errorf("owner rules: rule %d has no name", i+1)
		}
		if slices.ContainsFunc(c.Rules[:i], func(other Rule) bool { return other.Name == name }) {
			return fmt.Errorf("owner rules: two rules are named %q", name)
		}
		if rule.User == "" && rule.Project == "" && rule.Class == "" {
			return fmt.Errorf("owner rule %q sets neither user nor project nor class", name)
		}
		for _, value := range []string{rule.User, rule.Project, rule.Class} {
			if value != text.Clean(value, maxAccountBytes) {
				return fmt.Errorf("owner rule %q: %q is longer than %d bytes or holds control characters", name, value, maxAccountBytes)
			}
		}
		if _, ok := uidNotation(rule.User); rule.User == meter.UserUnattributed || strings.HasPrefix(rule.User, uidPrefix) && !ok {
			return fmt.Errorf("owner rule %q: %q cannot be a user: give the account's name, or uid:N", name, rule.User)
		}
	}
	for _, source := range slices.Concat(c.ProjectSources, c.ClassSources) {
		if key, ok := strings.CutPrefix(source, labelSource); !ok || key == "" {
			return fmt.Errorf("owner sources: %q is not of the form label:KEY", source)
		}
	}
	return nil
}

// matches reports whether every condition that the rule gives holds.
func (r Rule) matches(e Evidence) bool {
	var container Container
	if e.Container != nil {
		container = *e.Container
	}
	if len(r.Kinds) > 0 && !slices.Contains(r.Kinds, e.Kind) ||
		!anyPattern(r.Workloads, e.Name) || !anyPattern(r.Containers, container.Name) ||
		!anyPattern(r.Images, container.Image) || !anyPattern(r.Units, e.Unit) {
		return false
	}
	for key, pattern := range r.Labels {
		if value, ok := container.Labels[key]; !ok || !wildcard(pattern, value) {
			return false
		}
	}
	return len(r.UIDs) == 0 || isUID(e.ProcessUID) && slices.Contains(r.UIDs, uint32(e.ProcessUID))
}

func anyPattern(patterns []string, s string) bool {
	return len(patterns) == 0 || s != "" && slices.ContainsFunc(patterns, func(p string) bool { return wildcard(p, s) })
}

// wildcard matches * with any run of bytes, slashes too.
func wildcard(pattern, s string) bool {
	first, rest, star := strings.Cut(pattern, "*")
	if !star {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, first)
	if !ok {
		return false
	}
	for {
		piece, after, star := strings.Cut(rest, "*")
		if !star {
			return strings.HasSuffix(s, piece)
		}
		i := strings.Index(s, piece)
		if i < 0 {
			return false
		}
		s, rest = s[i+len(piece):], after
	}
}
