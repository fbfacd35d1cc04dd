package exporter

import (
	"fmt"
	"io"
	"os"

	"gpuledger/exporter/owner"
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
}

// DefaultConfig is the configuration without a file.
func DefaultConfig() Config {
	return Config{
		Owner: owner.DefaultConfig(), Runtimes: RuntimesConfig{Docker: []string{DefaultDockerSocket}},
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
		return config, fmt.Errorf("%s: %w", path, err)
	}
	return config, nil
}
