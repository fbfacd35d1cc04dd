package cgroup

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOwn(t *testing.T) {
	id := strings.Repeat("4f", 32)
	for name, test := range map[string]struct {
		content string
		want    []Place
	}{
		"docker, v1: what controllers are not used for is left out": {
			"3:cpu,cpuacct:/docker/" + id + "\n2:memory:/\n1:name=systemd:/docker/" + id + "/init.scope",
			[]Place{{"cpu,cpuacct", "/docker/" + id}, {"name=systemd", "/docker/" + id}},
		},
		"docker, v2":      {"0::/system.slice/docker-" + id + ".scope", []Place{{"", "/system.slice/docker-" + id + ".scope"}}},
		"podman below it": {"0::/machine.slice/libpod-" + id + ".scope/container", []Place{{"", "/machine.slice/libpod-" + id + ".scope"}}},
		"container of a pod": {
			"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_0001_4002_8003_0a1b2c3d4e5f.slice/cri-containerd-" + id + ".scope",
			[]Place{{"", "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_0001_4002_8003_0a1b2c3d4e5f.slice/cri-containerd-" + id + ".scope"}},
		},
		"all steps of a job":    {"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0", []Place{{"", "/system.slice/slurmstepd.scope/job_42"}}},
		"a job on v1":           {"5:memory:/slurm/uid_1000/job_42/step_batch/task_0\n4:freezer:/slurm/uid_1000/job_42/step_batch", []Place{{"memory", "/slurm/uid_1000/job_42"}, {"freezer", "/slurm/uid_1000/job_42"}}},
		"a container in a job":  {"0::/system.slice/slurmstepd.scope/job_42/step_0/user/task_0/docker/" + id, []Place{{"", "/system.slice/slurmstepd.scope/job_42"}}},
		"a service's subgroups": {"0::/system.slice/ollama.service/runner", []Place{{"", "/system.slice/ollama.service"}}},
		"hybrid":                {"1:name=systemd:/system.slice/ollama.service\n0::/system.slice/ollama.service", []Place{{"name=systemd", "/system.slice/ollama.service"}, {"", "/system.slice/ollama.service"}}},
		"nothing of its own":    {"0::/init.scope", nil},
		"the root":              {"0::/", nil},
		"of another namespace":  {"0::/../docker-" + id + ".scope", nil},
		"no longer there":       {"0::/system.slice/ollama.service (deleted)", nil},
		"two answers":           {"2:memory:/docker/" + id + "\n1:name=systemd:/docker/" + strings.Repeat("5e", 32), nil},
	} {
		if diff := cmp.Diff(test.want, Own(test.content)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestOwnHoldsTheProcess wants each cgroup of the table to be one that the
// process is in, and to belong to the same container, job or unit.
func TestOwnHoldsTheProcess(t *testing.T) {
	found := 0
	for _, row := range table(t) {
		whole := Parse(row.content).Identity()
		for _, place := range Own(row.content) {
			found++
			if !strings.Contains(row.content, ":"+place.Controllers+":"+place.Path) {
				t.Errorf("row %s: %q is not above the process in %q", row.id, place, row.content)
			}
			own := Parse("0::" + place.Path).Identity()
			// The outermost container is the workload; what is nested is inside.
			outer := whole.ContainerID
			if whole.OuterContainerID != "" {
				outer = whole.OuterContainerID
			}
			if own.ContainerID != "" && own.ContainerID != outer || own.JobID != whole.JobID ||
				own.ContainerID == "" && own.JobID == "" && own.PodUID != whole.PodUID {
				t.Errorf("row %s: %q belongs to %+v, the process to %+v", row.id, place.Path, own, whole)
			}
		}
	}
	if found < 80 {
		t.Errorf("only %d cgroups were found in the table", found)
	}
}
