package holders

import (
	"path/filepath"
	"strings"
	"testing"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
)

func chainOf(text string) cgroup.Chain { return cgroup.Parse(text) }

// TestPlaces holds cgroup paths, uids and the kinds and names that they make.
func TestPlaces(t *testing.T) {
	const pod = "kubepods-burstable-pod2fa1f2a5_4d4e_4a3f_8f1c_3d1b2c3d4e5f.slice"
	const rootless = "/user.slice/user-4711.slice/user@4711.service/"
	socket := filepath.Join(shortDir(t), "s")
	engine(t, socket, map[string]runtimes.Container{someID: {Name: "train", Labels: map[string]string{"owner": "bob"}}})
	r := newRig(t, socket)
	await(t, "the engine's answer", func() bool {
		_, status := r.options.Engines[0].Lookup(someID)
		return status == runtimes.StatusFound
	})
	other := strings.Repeat("e", 64)
	await(t, "the engine knows no other", func() bool {
		_, status := r.options.Engines[0].Lookup(other)
		return status == runtimes.StatusMissing
	})
	namespaced := []uint32{500, 7}
	for _, test := range []struct {
		name, cgroup string
		uid          uint32
		login        int64
		nspid        []uint32
		want         string // kind/name user by
	}{
		{"session", "0::/user.slice/user-4711.slice/session-3.scope", 4711, 4711, nil, "host/ alice user_slice"},
		{"sudo in a session", "0::/user.slice/user-4711.slice/session-3.scope", 0, 4711, nil, "host/ alice user_slice"},
		{"user's own service", "0::" + rootless + "app.slice/train.service", 4711, -1, nil, "host/ alice user_slice"},
		{"PID namespace in a session", "0::/user.slice/user-4711.slice/session-3.scope", 4711, 4711, namespaced, "host/ alice user_slice"},
		{"service", "0::/system.slice/ollama.service", 997, -1, nil, "service/ollama.service uid:997 process_uid"},
		{"service of root", "0::/system.slice/train.service", 0, -1, nil, "service/train.service unattributed none"},
		{"service in another slice", "0::/gpu.slice/train.service", 997, -1, nil, "service/train.service uid:997 process_uid"},
		{"service in a PID namespace", "0::/system.slice/train.service", 4711, -1, namespaced, "service/train.service unattributed none"},
		{"cron job", "0::/system.slice/cron.service", 4711, -1, nil, "host/ alice process_uid"},
		{"cron itself", "0::/system.slice/cron.service", 0, -1, nil, "service/cron.service unattributed none"},
		{"cron of a system account", "0::/system.slice/cron.service", 33, -1, nil, "service/cron.service uid:33 process_uid"},
		{"ssh without a session", "0::/system.slice/ssh.service", 4711, -1, nil, "host/ alice process_uid"},
		{"sudo over ssh without a session", "0::/system.slice/ssh.service", 0, 4711, nil, "host/ alice login_uid"},
		{"ssh by socket", "0::/system.slice/system-sshd.slice/sshd@3-10.0.0.1:22-10.0.0.2:5555.service", 4711, -1, nil, "host/ alice process_uid"},
		{"hybrid service", "12:memory:/\n1:name=systemd:/system.slice/x.service\n0::/", 997, -1, nil, "service/x.service uid:997 process_uid"},
		{"no systemd", "0::/mine", 4711, -1, nil, "host/ alice process_uid"},

		{"docker", "0::/system.slice/docker-" + someID + ".scope", 4711, -1, namespaced, "docker/train bob label"},
		{"docker with cgroupfs", "4:memory:/docker/" + someID + "\n0::/", 0, -1, namespaced, "docker/train bob label"},
		{"docker with --pid=host", "0::/docker/" + someID, 4711, -1, nil, "docker/train bob label"},
		{"docker in another parent", "0::/mine/" + someID, 0, -1, namespaced, "docker/train bob label"},
		{"docker that the engine does not know", "0::/docker/" + other, 4711, -1, nil, "docker/eeeeeeeeeeee unattributed none"},
		{"runtime that cannot be told", "0::/mine/" + other, 4711, -1, nil, "container/eeeeeeeeeeee unattributed none"},
		{"rootless docker", "0::" + rootless + "user.slice/docker-" + other + ".scope", 104710, -1, namespaced, "docker/eeeeeeeeeeee alice user_slice"},
		{"forged name of another's container", "0::" + rootless + "docker-" + someID + ".scope", 4711, -1, nil, "docker/7951fb549ab9 alice user_slice"},
		{"docker in docker", "0::/docker/" + someID + "/docker/" + other, 0, -1, namespaced, "docker/train bob label"},
		{"two containers at once", "2:cpu:/docker/" + someID + "\n3:memory:/docker/" + other, 4711, -1, nil, "host/ unattributed none"},

		{"podman", "0::/machine.slice/libpod-" + other + ".scope", 4711, -1, nil, "podman/eeeeeeeeeeee unattributed none"},
		{"containerd", "0::/system.slice/nerdctl-" + other + ".scope", 4711, -1, nil, "containerd/eeeeeeeeeeee unattributed none"},
		{"pod by containerd", "0::/kubepods.slice/kubepods-burstable.slice/" + pod + "/cri-containerd-" + other + ".scope", 4711, -1, nil, "kubernetes/eeeeeeeeeeee unattributed none"},
		{"pod by cri-o", "0::/kubepods.slice/kubepods-burstable.slice/" + pod + "/crio-" + other + ".scope", 4711, -1, nil, "kubernetes/eeeeeeeeeeee unattributed none"},
		{"pod by an unknown runtime", "0::/kubepods/burstable/pod2fa1f2a5-4d4e-4a3f-8f1c-3d1b2c3d4e5f/" + other, 4711, -1, nil, "kubernetes/eeeeeeeeeeee unattributed none"},
		{"pod's sandbox", "0::/kubepods.slice/kubepods-burstable.slice/" + pod, 4711, -1, nil, "kubernetes/2fa1f2a5-4d4 unattributed none"},
		{"shape of a containerd id", "0::/default/redis", 4711, -1, nil, "host/ unattributed none"},

		{"virtual machine", `0::/machine.slice/machine-qemu\x2d3\x2dwin10.scope/libvirt/emulator`, 64055, -1, nil, "vm/win10 unattributed none"},
		{"lxc", "0::/lxc.payload.web/system.slice/ssh.service", 104711, -1, namespaced, "lxc/web unattributed none"},
		{"nspawn", `0::/machine.slice/machine-my\x2dbox.scope/payload`, 4711, -1, nil, "nspawn/my-box unattributed none"},

		{"slurm v1", "4:memory:/slurm/uid_4711/job_77/step_0\n0::/", 4711, -1, nil, "slurm/77 alice scheduler"},
		{"slurm v2", "0::/system.slice/slurmstepd.scope/job_77/step_0/user/task_0", 4711, -1, nil, "slurm/77 alice process_uid"},
		{"slurm's own", "0::/system.slice/slurmstepd.scope/job_77/step_0/slurm", 0, -1, nil, "slurm/77 unattributed none"},
		{"container of a job that shares the PIDs", "0::/system.slice/slurmstepd.scope/job_77/step_0/user/docker-" + other + ".scope", 4711, -1, nil, "slurm/77 unattributed none"},
		{"flux, launcher not known", "0::/user.slice/user-501.slice/user@501.service/imp-shell-0-f2Cxyz.service", 4711, -1, nil, "flux/f2Cxyz uid:501 user_slice"},
		{"job that is a user's word", "0::" + rootless + "slurmstepd.scope/job_77", 4711, -1, nil, "host/ alice user_slice"},

		{"nowhere", "0::/", 4711, -1, namespaced, "host/ unattributed none"},
	} {
		t.Run(test.name, func(t *testing.T) {
			facts := procfs.Process{RealUID: test.uid, EffectiveUID: test.uid, LoginUID: test.login, NSPID: test.nspid, ExecutableUID: -1}
			p := &process{facts: facts, chain: chainOf(test.cgroup + "\n"), firstSeen: r.clock}
			r.resolve(p)
			w := p.answer.Workload
			if got := w.Kind + "/" + w.Name + " " + w.User + " " + w.AttributedBy; got != test.want || p.answer.Pending {
				t.Errorf("got  %s (pending %v)\nwant %s", got, p.answer.Pending, test.want)
			}
		})
	}

	t.Run("launcher", func(t *testing.T) {
		r.owner.LauncherUIDs = []uint32{501}
		defer func() { r.owner.LauncherUIDs = nil }()
		p := &process{
			facts: procfs.Process{RealUID: 4711, LoginUID: -1},
			chain: chainOf("0::/user.slice/user-501.slice/user@501.service/imp-shell-0-f2Cxyz.service\n"),
		}
		if r.resolve(p); p.answer.Workload.User != "alice" || p.answer.Workload.Kind != "flux" {
			t.Errorf("got %+v", p.answer.Workload)
		}
	})
	t.Run("system", func(t *testing.T) {
		p := &process{
			facts: procfs.Process{LoginUID: -1, Executable: "/usr/bin/nvidia-persistenced", Stat: procfs.Stat{Command: "nvidia-persiste"}},
			chain: chainOf("0::/system.slice/nvidia-persistenced.service\n"),
		}
		want := meter.Workload{User: "root", UID: 0, Kind: meter.KindSystem, Name: "nvidia-persistenced", AttributedBy: "system"}
		if r.resolve(p); p.answer.Workload != want {
			t.Errorf("got %+v, want %+v", p.answer.Workload, want)
		}
	})
	t.Run("root of our own cgroup namespace", func(t *testing.T) {
		defer func(fs *procfs.FS) { r.options.FS = fs }(r.options.FS)
		for _, test := range []struct {
			fs   *procfs.FS
			want string
		}{
			{r.options.FS, "alice"},
			{&procfs.FS{}, "unattributed"}, // one that is not known to be the initial one
		} {
			if !r.options.FS.InitialCgroupNamespace() {
				missing(t, "the initial cgroup namespace")
			}
			p := &process{facts: procfs.Process{RealUID: 4711, LoginUID: -1, ExecutableUID: -1}, chain: chainOf("0::/\n")}
			r.options.FS = test.fs
			if r.resolve(p); p.answer.Workload.User != test.want {
				t.Errorf("got %+v, want %s", p.answer.Workload, test.want)
			}
		}
	})
	t.Run("zombie on cgroup v1", func(t *testing.T) {
		p := &process{
			facts: procfs.Process{RealUID: 4711, LoginUID: -1, ExecutableUID: -1, Stat: procfs.Stat{State: 'Z'}},
			chain: chainOf("4:memory:/\n1:name=systemd:/\n"),
		}
		if r.resolve(p); !p.answer.Workload.Unattributed() {
			t.Errorf("got %+v", p.answer.Workload)
		}
	})
}
