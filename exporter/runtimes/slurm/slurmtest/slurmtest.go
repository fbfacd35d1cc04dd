// Package slurmtest runs a real Slurm for a test: munged, slurmctld and slurmd
// on private ports and in private folders.
package slurmtest

import (
	"bytes"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// User is an account that every Debian has, for jobs to run as: Slurm takes no
// uid without one.
const User = "www-data"

// Cluster is one node with its controller.
type Cluster struct {
	// Config is the path of slurm.conf, and GresConf of gres.conf.
	Config, GresConf string
	Node             string
	UID              uint32 // of User

	t      testing.TB
	folder string
	jobs   []string
	ctld   *daemon
	node   *daemon
}

type daemon struct {
	*exec.Cmd
	output *bytes.Buffer
}

// Start runs a cluster until the test ends, whose node has GPUs with these
// device files. It needs root and Debian's packages slurmctld, slurmd and munge;
// without them the test is skipped, or fails if CI is true.
func Start(t testing.TB, minors ...int) *Cluster {
	t.Helper()
	if os.Geteuid() != 0 {
		missing(t, "root")
	}
	for _, program := range []string{"munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue"} {
		if _, err := exec.LookPath(program); err != nil {
			missing(t, program)
		}
	}
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err != nil {
		missing(t, "cgroup v1 (freezer)")
	}
	account, err := user.Lookup(User)
	if err != nil {
		missing(t, "the account "+User)
	}
	uid, err := strconv.ParseUint(account.Uid, 10, 32)
	check(t, err)
	folder, err := os.MkdirTemp("", "slurmtest") // of a path that sockets can have
	check(t, err)
	check(t, os.Chmod(folder, 0o755))
	host, err := os.Hostname()
	check(t, err)
	host, _, _ = strings.Cut(host, ".")
	c := &Cluster{
		Config: filepath.Join(folder, "slurm.conf"), GresConf: filepath.Join(folder, "gres.conf"), Node: host, UID: uint32(uid), t: t, folder: folder,
	}
	t.Cleanup(func() {
		c.end()
		if t.Failed() {
			for _, log := range []string{"ctld.log", "slurmd.log"} {
				text, _ := os.ReadFile(filepath.Join(folder, log)) // it may not be there
				t.Logf("%s:\n%s", log, text[max(0, len(text)-2000):])
			}
		}
		_ = os.RemoveAll(folder)
	})
	c.munge()
	files := make([]string, len(minors))
	for i, minor := range minors {
		file := filepath.Join(folder, "nvidia"+strconv.Itoa(minor))
		check(t, unix.Mknod(file, unix.S_IFCHR|0o600, int(unix.Mkdev(195, uint32(minor)))))
		files[i] = fmt.Sprintf("NodeName=%s Name=gpu Type=a100 File=%s\n", host, file)
	}
	write(t, c.GresConf, strings.Join(files, ""))
	write(t, filepath.Join(folder, "cgroup.conf"), "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\nConstrainRAMSpace=yes\n")
	for _, name := range []string{"ctld", "spool"} {
		check(t, os.Mkdir(filepath.Join(folder, name), 0o755))
	}
	ctldPort, slurmdPort := freePort(t), freePort(t)
	write(t, c.Config, strings.NewReplacer("FOLDER", folder, "HOST", host, "CTLDPORT", ctldPort, "SLURMDPORT", slurmdPort, "GPUS", strconv.Itoa(len(minors)),
		"FIRST", strconv.Itoa(firstJob())).Replace(`
ClusterName=test
SlurmctldHost=HOST(127.0.0.1)
SlurmUser=root
SlurmctldPort=CTLDPORT
SlurmdPort=SLURMDPORT
AuthType=auth/munge
AuthInfo=socket=FOLDER/munge/s
CryptoType=crypto/munge
StateSaveLocation=FOLDER/ctld
SlurmdSpoolDir=FOLDER/spool
SlurmctldPidFile=FOLDER/ctld.pid
SlurmdPidFile=FOLDER/slurmd.pid
SlurmctldLogFile=FOLDER/ctld.log
SlurmdLogFile=FOLDER/slurmd.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
GresTypes=gpu
SelectType=select/cons_tres
ReturnToService=2
FirstJobId=FIRST
MpiDefault=none
SwitchType=switch/none
NodeName=HOST NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Gres=gpu:a100:GPUS
PartitionName=gpu Nodes=HOST Default=YES State=UP OverSubscribe=YES
`))
	c.StartController()
	c.StartNode()
	c.await("the node is idle", func() bool { return strings.Contains(c.try("sinfo", "-h", "-o", "%T"), "idle") })
	return c
}

func (c *Cluster) munge() {
	account, err := user.Lookup("munge")
	check(c.t, err)
	uid, err := strconv.Atoi(account.Uid)
	check(c.t, err)
	gid, err := strconv.Atoi(account.Gid)
	check(c.t, err)
	folder := filepath.Join(c.folder, "munge")
	check(c.t, os.Mkdir(folder, 0o755))
	key := make([]byte, 1024)
	_, _ = rand.Read(key) // never fails
	check(c.t, os.WriteFile(filepath.Join(folder, "key"), key, 0o400))
	for _, path := range []string{folder, filepath.Join(folder, "key")} {
		check(c.t, os.Chown(path, uid, gid))
	}
	command := exec.Command("munged", "--foreground", "--force", "--num-threads=2", "--key-file="+folder+"/key", "--socket="+folder+"/s",
		"--pid-file="+folder+"/pid", "--log-file="+folder+"/log", "--seed-file="+folder+"/seed")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	check(c.t, command.Start())
	c.t.Cleanup(func() {
		_ = command.Process.Kill() // it may have ended
		_ = command.Wait()
	})
	c.await("munged listens", func() bool {
		connection, err := net.Dial("unix", folder+"/s")
		if err != nil {
			return false
		}
		connection.Close()
		return true
	})
}

func (c *Cluster) daemon(name string, arguments ...string) *daemon {
	c.t.Helper()
	d := &daemon{exec.Command(name, arguments...), &bytes.Buffer{}}
	d.Env = c.Environ()
	d.Stdout, d.Stderr, d.WaitDelay = d.output, d.output, 2*time.Second
	check(c.t, d.Start())
	return d
}

// Environ is the environment in which Slurm's programs find this cluster.
func (c *Cluster) Environ() []string { return append(os.Environ(), "SLURM_CONF="+c.Config) }

// StartController runs slurmctld.
func (c *Cluster) StartController() { c.t.Helper(); c.ctld = c.daemon("slurmctld", "-D") }

// StartNode runs slurmd.
func (c *Cluster) StartNode() { c.t.Helper(); c.node = c.daemon("slurmd", "-D", "-N", c.Node) }

// KillController ends slurmctld at once.
func (c *Cluster) KillController() { kill(c.ctld, syscall.SIGKILL) }

// StopController lets slurmctld write its state and end.
func (c *Cluster) StopController() { kill(c.ctld, syscall.SIGTERM) }

// KillNode ends slurmd at once; jobs run on, each below its slurmstepd.
func (c *Cluster) KillNode() { kill(c.node, syscall.SIGKILL) }

func kill(d *daemon, signal syscall.Signal) {
	if d == nil || d.ProcessState != nil {
		return
	}
	_ = d.Process.Signal(signal) // it may have ended
	_ = d.Wait()
}

// Submit runs a job of User and returns its number once it runs.
func (c *Cluster) Submit(arguments ...string) string {
	c.t.Helper()
	id := strings.TrimSpace(c.Run("sbatch", append([]string{"--parsable", "--uid=" + User, "-D", "/", "-o", "/dev/null", "-n1", "--mem=50"}, arguments...)...))
	c.jobs = append(c.jobs, id)
	c.await("job "+id+" runs", func() bool { return strings.TrimSpace(c.try("squeue", "-h", "-j", id, "-o", "%T")) == "RUNNING" })
	return id
}

// Processes are the PIDs of a job's own processes with that command.
func (c *Cluster) Processes(job, command string) []uint32 {
	c.t.Helper()
	var pids []uint32
	c.await("a process of job "+job, func() bool {
		files, _ := filepath.Glob("/sys/fs/cgroup/freezer/slurm*/uid_*/job_" + job + "/step_*/cgroup.procs")
		for _, file := range files {
			text, _ := os.ReadFile(file) // it may have ended
			for _, field := range strings.Fields(string(text)) {
				name, _ := os.ReadFile("/proc/" + field + "/comm")
				if pid, err := strconv.ParseUint(field, 10, 32); err == nil && strings.TrimSpace(string(name)) == command {
					pids = append(pids, uint32(pid))
				}
			}
		}
		return len(pids) > 0
	})
	return pids
}

// Run runs one of Slurm's programs and returns its output.
func (c *Cluster) Run(name string, arguments ...string) string {
	c.t.Helper()
	command := exec.Command(name, arguments...)
	command.Env = c.Environ()
	output, err := command.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			c.t.Fatalf("%s %q: %v\n%s", name, arguments, err, exit.Stderr)
		}
		c.t.Fatalf("%s %q: %v", name, arguments, err)
	}
	return string(output)
}

func (c *Cluster) try(name string, arguments ...string) string {
	command := exec.Command(name, arguments...)
	command.Env = c.Environ()
	output, err := command.Output()
	if err != nil {
		return ""
	}
	return string(output)
}

// end ends the daemons, then what is left of the jobs, whose numbers no other
// cluster has. Asking Slurm to would take as long as its time-outs, where one of
// the daemons is gone.
func (c *Cluster) end() {
	kill(c.node, syscall.SIGKILL)
	kill(c.ctld, syscall.SIGKILL)
	left := func() []string {
		var all []string
		for _, job := range c.jobs {
			for _, below := range []string{"/step_*/task_*", "/step_*", ""} {
				found, _ := filepath.Glob("/sys/fs/cgroup/*/slurm_" + c.Node + "/uid_*/job_" + job + below)
				all = append(all, found...)
			}
		}
		return all
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		directories := left()
		if len(directories) == 0 {
			return
		}
		for _, directory := range directories {
			text, _ := os.ReadFile(filepath.Join(directory, "cgroup.procs")) // it may be gone
			for _, field := range strings.Fields(string(text)) {
				if pid, err := strconv.Atoi(field); err == nil {
					_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
				}
			}
			_ = os.Remove(directory) // it goes once it is empty
		}
	}
	c.t.Errorf("cgroups of the jobs are left: %v", left())
}

func (c *Cluster) await(what string, done func() bool) {
	c.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			c.t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// firstJob is where a cluster begins to count, so that the cgroups of two are
// never the same.
func firstJob() int {
	var random [4]byte
	_, _ = rand.Read(random[:]) // never fails
	return 1_000_000 + int(binary.LittleEndian.Uint32(random[:])%60_000_000)
}

func freePort(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer listener.Close()
	return strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
}

func write(t testing.TB, path, text string) {
	t.Helper()
	check(t, os.WriteFile(path, []byte(text), 0o644))
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func missing(t testing.TB, what string) {
	t.Helper()
	if strict, _ := strconv.ParseBool(os.Getenv("CI")); strict {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}
