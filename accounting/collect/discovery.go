package collect

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"
)

const maxSDFileBytes = 10 << 20

// discover returns the targets of all files that match the patterns, in
// Prometheus's file_sd format. Files with errors are left out and named in the
// error; good comes back beside it.
func discover(patterns []string) (targets []string, err error) {
	for _, pattern := range patterns {
		files, globErr := filepath.Glob(pattern)
		if globErr != nil {
			err = errors.Join(err, fmt.Errorf("collect.file_sd %q: %w", pattern, globErr))
			continue
		}
		for _, name := range files {
			found, fileErr := readSDFile(name)
			if fileErr != nil {
				err = errors.Join(err, fmt.Errorf("target file %s: %w", name, fileErr))
				continue
			}
			targets = append(targets, found...)
		}
	}
	slices.Sort(targets)
	return slices.Compact(targets), err
}

// readSDFile reads one file_sd file, YAML or JSON. A target is an address
// HOST:PORT, for which the label __scheme__ counts, or a whole URL. Other
// labels are Prometheus's business.
func readSDFile(name string) ([]string, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var groups []struct {
		Targets []string          `yaml:"targets"`
		Labels  map[string]string `yaml:"labels"`
	}
	if err := yaml.NewDecoder(io.LimitReader(file, maxSDFileBytes)).Decode(&groups); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	var targets []string
	for _, group := range groups {
		scheme := group.Labels["__scheme__"]
		if scheme == "" {
			scheme = "http"
		}
		for _, target := range group.Targets {
			if !strings.Contains(target, "://") {
				target = scheme + "://" + target
			}
			parsed, err := ParseTarget(target)
			if err != nil {
				return nil, err
			}
			targets = append(targets, parsed)
		}
	}
	return targets, nil
}
