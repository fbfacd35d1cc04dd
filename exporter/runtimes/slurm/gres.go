package slurm

import (
	"io"
	"os"
	"slices"
	"strings"

	"gpuledger/exporter/runtimes"
)

const maxGresBytes = 1 << 20

// minorsOf are the numbers of the device files of a node's GPUs, in the order in
// which Slurm counts them: those of the File= lines of gres.conf (gres.conf(5)).
// It is nil where there are none, because Slurm finds them itself (AutoDetect):
// then it counts them in the order of their numbers.
func minorsOf(config, node string) []int {
	var minors []int
	for line := range strings.Lines(config) {
		line, _, _ = strings.Cut(line, "#")
		fields := map[string]string{}
		for _, field := range strings.Fields(line) {
			if key, value, ok := strings.Cut(field, "="); ok {
				fields[strings.ToLower(key)] = value
			}
		}
		if fields["name"] != "gpu" || fields["file"] == "" {
			continue
		}
		if nodes := fields["nodename"]; nodes != "" {
			if names, err := expand(nodes); err != nil || !slices.Contains(names, node) {
				continue
			}
		}
		files, err := expand(fields["file"])
		if err != nil {
			return nil // slurmd would not have started with it
		}
		for _, file := range files {
			device, ok := runtimes.ParseDevice("/dev/" + file[strings.LastIndexByte(file, '/')+1:])
			if !ok || device.Minor < 0 {
				return nil // names of the site's own: no number can be told
			}
			minors = append(minors, device.Minor)
		}
	}
	return minors
}

// readGres reads the first of the files that is there.
func readGres(paths []string) string {
	for _, path := range paths {
		file, err := os.Open(path)
		if err != nil {
			continue
		}
		text, err := io.ReadAll(io.LimitReader(file, maxGresBytes))
		file.Close()
		if err == nil {
			return string(text)
		}
	}
	return ""
}
