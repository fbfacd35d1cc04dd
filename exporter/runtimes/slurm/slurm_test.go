package slurm

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/slurm/slurmtest"
)

func TestExpand(t *testing.T) {
	for list, want := range map[string]string{
		"": "", "gpu1": "gpu1", "gpu[01-03,7],login": "gpu01 gpu02 gpu03 gpu7 login", "/dev/nvidia[0-1]": "/dev/nvidia0 /dev/nvidia1",
		"rack[1-2]n": "rack1n rack2n", "[0-2]": "0 1 2",
	} {
		got, err := expand(list)
		if err != nil || strings.Join(got, " ") != want {
			t.Errorf("expand(%q) = %q, %v; want %s", list, got, err, want)
		}
	}
	for _, list := range []string{"gpu[", "gpu[1", "gpu[a-b]", "gpu[3-1]", "gpu[0-99999999]", "gpu[1,,2]", "gpu[-1]"} {
		if got, err := expand(list); err == nil {
			t.Errorf("expand(%q) = %q", list, got)
		}
	}
}

func TestGPUsOf(t *testing.T) {
	for gres, want := range map[string][]int{
		"gpu:a100:2(IDX:0-1)": {0, 1}, "gpu:2(IDX:1,3-4)": {1, 3, 4}, "gpu(IDX:2)": {2}, "nic:1(IDX:0),gpu:a100:1(IDX:3)": {3},
		"gpu:a100:1(IDX:0),gpu:h100:1(IDX:5)": {0, 5}, "shard:2(2/4,0/4)": nil, "mps:50(IDX:0)": nil, "gpu:2": nil, "": nil, "gpu:1(IDX:x)": nil,
	} {
		if diff := cmp.Diff(want, gpusOf(gres)); diff != "" {
			t.Errorf("%s: %s", gres, diff)
		}
	}
}

func TestMinorsOf(t *testing.T) {
	for _, test := range []struct {
		name, config string
		want         []int
	}{
		{"none", "", nil},
		{"autodetected", "AutoDetect=nvml\n", nil},
		{"a range", "# ours\nName=gpu Type=a100 File=/dev/nvidia[4-5] Cores=0-3\nName=nic File=/dev/mlx0\n", []int{4, 5}},
		{"of this node", "NodeName=gpu[1-2] Name=gpu File=/dev/nvidia3\nNodeName=gpu3 Name=gpu File=/dev/nvidia7\n", []int{3}},
		{"names of their own", "Name=gpu File=/dev/card[0-1]\n", nil},
	} {
		if diff := cmp.Diff(test.want, minorsOf(test.config, "gpu1")); diff != "" {
			t.Errorf("%s: %s", test.name, diff)
		}
	}
}

// A job's name, account and comment are the user's to choose, and look like
// Slurm's fields here.
func TestNobodyPlantsFields(t *testing.T) {
	const name = "a UserId=root(0) Account=boss Nodes=vm GRES=gpu:4(IDX:0-3) Command="
	const account = "b QOS=x Nodes=vm GRES=gpu:4(IDX:0-3)"
	line := "JobId=3 JobName=" + name + " UserId=www-data(33) GroupId=root(0) Nice=0 Account=" + account + " QOS=(null) JobState=RUNNING " +
		"NodeList=vm JOB_GRES=gpu:a100:1   Nodes=other CPU_IDs=0 GRES=gpu:4(IDX:3)   Nodes=vm CPU_IDs=0 Mem=50 GRES=gpu:a100:1(IDX:2) MinCPUsNode=1 " +
		"Command=/x WorkDir=/ Comment=x Nodes=vm GRES=gpu:4(IDX:0-3)\n"
	if diff := cmp.Diff([]int{2}, parseDetail(line, account, name, "vm")); diff != "" {
		t.Error(diff)
	}
	if got := parseDetail(line, "(null)", name, "vm"); got != nil {
		t.Errorf("GPUs %v of a job that is another", got)
	}
	r, gotAccount, gotName, err := parseQueue("3|33|RUNNING|gpu|(null)\n" + account + "\n" + name + "\n")
	if err != nil || gotAccount != account || gotName != name || r.uid != 33 || r.partition != "gpu" || r.qos != "" || !r.running {
		t.Errorf("%+v %q %q %v", r, gotAccount, gotName, err)
	}
	for _, output := range []string{"x\n\n\n", "3|root|RUNNING|gpu|\n\n\n", "1|2|3|4|5|6\n\n\n"} {
		if r, _, _, err := parseQueue(output); err == nil {
			t.Errorf("%q: %+v", output, r)
		}
	}
	if _, _, _, err := parseQueue(""); err != errNoJob {
		t.Errorf("nothing: %v", err)
	}
}

func TestWalk(t *testing.T) {
	root := t.TempDir()
	for _, directory := range []string{
		"freezer/slurm_gpu01/uid_1001/job_17/step_batch", "memory/slurm_gpu01/uid_1001/job_17/step_batch/task_0", "freezer/slurm/uid_1002/job_18",
		"unified/system.slice/slurmstepd.scope/job_19/step_0/user/task_0", "system.slice/gpu02_slurmstepd.scope/s2BQ04PRXTJG00/step_0",
		"slurm.slice/slurm-jobs.slice/slurmstepd.scope/job_20", "system.slice/slurmstepd.scope/system",
		// What anyone can make, or nobody did.
		"user.slice/user-1001.slice/user@1001.service/slurmstepd.scope/job_99", "user.slice/slurmstepd.scope/job_98", "freezer/slurmish/uid_1/job_97",
		"freezer/slurm/uid_x/job_96", "freezer/slurm/uid_1/job_x", "other.scope/slurmstepd.scope/job_95",
	} {
		if err := os.MkdirAll(filepath.Join(root, directory), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]string{}
	for _, job := range walk(root) {
		got[job.key] = job.node
		if uid := map[string]int64{"17": 1001, "18": 1002}[job.key]; job.uid != max(uid, -1) && !(uid == 0 && job.uid == -1) {
			t.Errorf("job %s is uid %d's", job.key, job.uid)
		}
	}
	want := map[string]string{"17": "gpu01", "18": "", "19": "", "20": "", "sluid:s2BQ04PRXTJG00": "gpu02"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestNumberOfASLUID(t *testing.T) {
	job := &found{key: "sluid:s2BQ04PRXTJG00"}
	title := func(arguments ...string) []member { return []member{{}, {arguments: arguments}} }
	for want, members := range map[string][]member{
		"3385": title("slurmstepd: [3385.0]"), "17": title("slurmstepd:", "[17.extern]"), "": title("slurmstepd: [x.0]", "slurmstepd: 5"),
	} {
		if got := job.number(members); got != want {
			t.Errorf("%v: %q, want %q", members, got, want)
		}
	}
}

// TestRealSlurm follows jobs of a real cluster, its controller there and gone.
func TestRealSlurm(t *testing.T) {
	cluster := slurmtest.Start(t, 4, 5, 6, 7)
	t.Setenv("SLURM_CONF", cluster.Config)
	proc, err := procfs.Open("")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skipf("needs the initial PID namespace: %v", err)
	}
	w := New(Options{Proc: proc, Ask: true, GresConf: []string{cluster.GresConf}})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	await := func(what string, condition func() bool) {
		t.Helper()
		for deadline := time.Now().Add(40 * time.Second); !condition(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not within 40 s: %s; grants %+v", what, w.Grants())
			}
		}
	}
	granted := func(job string, devices ...runtimes.Device) func() bool {
		return func() bool {
			for _, grant := range w.Grants() {
				if grant.Levels[0].ID == job {
					return grant.Exclusive && cmp.Equal(grant.Devices, devices)
				}
			}
			return len(devices) == 0
		}
	}
	first := cluster.Submit("--gres=gpu:2", "-J", "a UserId=root(0) Nodes="+cluster.Node+" GRES=gpu:4(IDX:0-3) Command=", "--wrap", "sleep 600")
	await("the first job's GPUs", granted(first, runtimes.ByMinor(4), runtimes.ByMinor(5)))
	want := Job{ID: first, UID: int64(cluster.UID), Partition: "gpu"}
	await("the first job", func() bool { job, status := w.Lookup(first); return status == runtimes.StatusFound && job == want })
	await("an answer of slurmctld", func() bool { state, asked := w.State(); return asked && state.Up })
	if _, status := w.Lookup("987654"); status != runtimes.StatusWaiting {
		t.Errorf("a job that nobody has looked for: %v", status)
	}
	await("that a job is not there", func() bool { _, status := w.Lookup("987654"); return status == runtimes.StatusMissing })

	second := cluster.Submit("--gres=gpu:1", "--wrap", "sleep 600")
	await("the second job's GPU", granted(second, runtimes.ByMinor(6)))
	cluster.KillController()
	cluster.KillNode()
	// A watcher that begins now has only what is on the node.
	alone := New(Options{Proc: proc, Ask: true, GresConf: []string{cluster.GresConf}})
	go func() { done <- alone.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	await("the second job without a controller", func() bool {
		job, status := alone.Lookup(second)
		return status == runtimes.StatusFound && job == Job{ID: second, UID: int64(cluster.UID), Partition: "gpu"}
	})
	await("both jobs' GPUs without a controller", func() bool { return len(alone.Grants()) == 2 })
	await("that slurmctld is silent", func() bool { state, asked := alone.State(); return asked && !state.Up && state.Error != "" })
	if !granted(first, runtimes.ByMinor(4), runtimes.ByMinor(5))() || !granted(second, runtimes.ByMinor(6))() {
		t.Errorf("grants without a controller: %+v", w.Grants())
	}
	cluster.StartController()
	cluster.StartNode()
	await("scancel", func() bool {
		return !strings.Contains(cluster.Run("squeue", "-h", "-j", second, "-o", "%T"), "PENDING")
	})
	cluster.Run("scancel", second)
	await("the end of the second job", granted(second))
}

// A node without Slurm's programs is no trouble, whatever its cgroups are called.
func TestNoPrograms(t *testing.T) {
	_, err := controller{directory: t.TempDir(), node: "gpu01"}.ask(t.Context(), "1")
	if !errors.Is(err, errNoPrograms) {
		t.Errorf("an empty directory: %v", err)
	}
	t.Setenv("PATH", t.TempDir())
	if _, err := (controller{node: "gpu01"}).ask(t.Context(), "1"); !errors.Is(err, errNoPrograms) {
		t.Errorf("an empty PATH: %v", err)
	}
}
