package exporter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"

	"gpuledger/exporter/owner"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/cri"
	"gpuledger/exporter/runtimes/kubelet"
	"gpuledger/exporter/runtimes/slurm"
	"gpuledger/exporter/strictyaml"
	"gpuledger/exporter/suspects"
	"gpuledger/exporter/web"
)

// DefaultDockerSocket is where Docker listens unless it is told otherwise.
const DefaultDockerSocket = "/run/docker.sock"

// Config is the exporter's YAML file.
type Config struct {
	Access   web.AccessConfig `yaml:"access"`
	Owner    owner.Config     `yaml:"owner"`
	Runtimes RuntimesConfig   `yaml:"runtimes"`
	Suspects SuspectsConfig   `yaml:"suspects"`
}

// SuspectsConfig says when it is looked for who has memory that no listed
// process explains.
type SuspectsConfig struct {
	// UnexplainedMemoryMiB is from how much such memory on a card on; 0 switches
	// it off.
	UnexplainedMemoryMiB uint64 `yaml:"unexplained_memory_mib"`
}

func (c SuspectsConfig) thresholdBytes() uint64 { return min(c.UnexplainedMemoryMiB, 1<<40) << 20 }

// RuntimesConfig says where container engines are asked for names.
type RuntimesConfig struct {
	// Docker are the paths of Docker's sockets; none switches it off.
	Docker []string `yaml:"docker"`
	// CRI are the paths of the sockets of Kubernetes' engines, containerd's and
	// CRI-O's; none switches it off.
	CRI []string `yaml:"cri"`
	// Kubelet are the paths of pod-resources sockets; none switches it off, and
	// pods hold no GPU without a process.
	Kubelet []string `yaml:"kubelet"`
	// DockerData are the data roots of Docker, read while it can't be asked.
	DockerData []string `yaml:"docker_data"`
	// Podman are the paths of the sockets of root's Podman; none switches it off.
	Podman []string `yaml:"podman"`
	// PodmanRunRoot and PodmanGraphRoot are where root's Podman keeps its
	// containers; an empty one switches reading them off.
	PodmanRunRoot   string `yaml:"podman_run_root"`
	PodmanGraphRoot string `yaml:"podman_graph_root"`
	// Slurm says how the jobs of this node are found out about.
	Slurm SlurmConfig `yaml:"slurm"`
	// Personal says that people's own engines are found below /run/user.
	Personal bool `yaml:"personal"`
}

// SlurmConfig says how the Slurm jobs of a node are found out about.
type SlurmConfig struct {
	// Jobs says that the node's cgroups are looked through for jobs at all.
	Jobs bool `yaml:"jobs"`
	// Ask says that slurmctld is asked for accounts and GPUs, by squeue and
	// scontrol.
	Ask bool `yaml:"ask"`
	// Programs is the directory of these; empty for PATH.
	Programs string `yaml:"programs"`
	// GresConf are the places of gres.conf; the first that is there counts.
	GresConf []string `yaml:"gres_conf"`
}

// DefaultConfig is the configuration without a file.
func DefaultConfig() Config {
	return Config{
		Owner: owner.DefaultConfig(),
		Runtimes: RuntimesConfig{
			Docker: []string{DefaultDockerSocket}, DockerData: []string{runtimes.DefaultDockerData},
			Podman:        []string{runtimes.DefaultPodmanSocket},
			PodmanRunRoot: runtimes.DefaultPodmanRunRoot, PodmanGraphRoot: runtimes.DefaultPodmanGraphRoot,
			CRI: cri.DefaultSockets(), Kubelet: []string{kubelet.DefaultSocket},
			Slurm:    SlurmConfig{Jobs: true, Ask: true, GresConf: slurm.DefaultGresConf()},
			Personal: true,
		},
		Suspects: SuspectsConfig{UnexplainedMemoryMiB: suspects.DefaultThreshold >> 20},
	}
}

// maxConfigBytes bounds what is read of a configuration file.
const maxConfigBytes = 4 << 20

// LoadConfig reads a configuration file over the defaults. Unknown keys and
// wrong values are errors that name file, line and column. An empty path is
// the default configuration.
func LoadConfig(path string) (Config, error) {
	config := DefaultConfig()
	if path == "" {
		return config, nil
	}
	file, err := os.Open(path)
	if err != nil {
		return config, fmt.Errorf("read configuration: %w", err)
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxConfigBytes))
	if err != nil {
		return config, fmt.Errorf("read configuration: %w", err)
	}
	if err := strictyaml.Decode(text, &config); err != nil {
		return config, fmt.Errorf("%s%w", path, err)
	}
	if err := config.Owner.Validate(); err != nil {
		return config, fmt.Errorf("%s%s: %w", path, placeOf(text, err), err)
	}
	return config, nil
}

// placeOf is :LINE:COLUMN of what an error of the owner's configuration is
// about; empty if that does not stand in the text.
func placeOf(text []byte, err error) string {
	var wrong *owner.ConfigError
	if !errors.As(err, &wrong) {
		return ""
	}
	path, err := yaml.PathString("$.owner." + wrong.Path)
	if err != nil {
		return ""
	}
	node, err := path.ReadNode(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff"))))
	if err != nil || node == nil || node.GetToken() == nil {
		return ""
	}
	// The token of a mapping is its first colon: what it is about begins before.
	for {
		switch n := node.(type) {
		case *ast.MappingNode:
			if len(n.Values) == 0 {
				return position(node)
			}
			node = n.Values[0]
		case *ast.MappingValueNode:
			return position(n.Key)
		default:
			return position(node)
		}
	}
}

func position(node ast.Node) string {
	at := node.GetToken().Position
	return fmt.Sprintf(":%d:%d", at.Line, at.Column)
}
