package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"gpuledger/lab"
)

// Options say what Run brings up.
type Options struct {
	// State is a folder for the scenario and the workers' program; made if
	// missing. Other users must be able to enter it.
	State string
	// ScenarioFile is written and kept current; empty: State/scenario.
	ScenarioFile string
	Users        []User
	CreateUsers  bool // make those that the system doesn't know, and delete them afterwards
	GPUs         int
	MIG          bool
	DockerHost   string // e.g. unix:///var/run/docker.sock; empty: no containers
	Driver       string // version that the library answers; empty: its own
	Log          *slog.Logger
	Stderr       io.Writer // what workers and the docker client complain about
	// Ready is called once all is up, with the scenario's path.
	Ready func(scenario string)
}

// task is one workload's process while it runs.
type task struct {
	workload Workload
	cmd      *exec.Cmd
	stdin    io.Closer
	pid      int
	done     chan struct{} // closed when the process has ended
}

type server struct {
	Options
	scenario lab.Scenario
	program  string
	cgroups  cgroups
	docker   docker
	running  map[*task]bool
	ended    chan *task
	made     []string // containers that were started
	waits    sync.WaitGroup
}

// forget is how far back per-process history is kept, well past the ring.
const forget = time.Minute

// Run brings the server up, keeps the scenario current while processes come
// and go, and takes everything down when ctx ends. It ends nothing that it
// didn't start.
func Run(ctx context.Context, o Options) (err error) {
	if len(o.Users) == 0 || o.GPUs < 1 {
		return errors.New("lab: needs at least one user and one GPU")
	}
	if err := os.MkdirAll(o.State, 0o755); err != nil {
		return fmt.Errorf("lab: state folder: %w", err)
	}
	if o.ScenarioFile == "" {
		o.ScenarioFile = filepath.Join(o.State, "scenario")
	}
	if o.ScenarioFile, err = filepath.Abs(o.ScenarioFile); err != nil {
		return fmt.Errorf("lab: scenario: %w", err)
	}
	s := &server{Options: o, running: map[*task]bool{}, ended: make(chan *task),
		cgroups: cgroups{roots: hierarchies(), log: o.Log}, docker: docker{host: o.DockerHost}}
	if s.program, err = copyProgram(o.State); err != nil {
		return err
	}
	defer s.removePrograms()

	if o.CreateUsers {
		var made accounts
		defer func() { err = errors.Join(err, made.remove()) }()
		if err := made.create(ctx, o.Users); err != nil {
			return err
		}
		// The service's account is for its name alone: where the system has
		// another one, the service shows as uid:N.
		if err := made.create(ctx, []User{{Name: serviceUser, UID: serviceUID}}); err != nil {
			o.Log.Info("service runs without a name of its own", "err", err)
		}
	}
	if o.DockerHost != "" {
		if err := s.docker.load(ctx, s.program); err != nil {
			return err
		}
	}
	var plan []Workload
	s.scenario, plan = Plan(o.Users, o.GPUs, o.DockerHost != "", o.MIG)
	s.scenario.DriverVersion = o.Driver
	s.scenario.Epoch = time.Now()
	defer s.stop()
	for _, w := range plan {
		if err := s.start(ctx, w); err != nil {
			return err
		}
	}
	if err := s.write(); err != nil {
		return err
	}
	if o.Ready != nil {
		o.Ready(o.ScenarioFile)
	}
	return s.keep(ctx, plan)
}

// copyProgram puts this program where every user may execute it: the folder it
// was built in often belongs to one user only.
func copyProgram(dir string) (string, error) {
	in, err := os.Open("/proc/self/exe")
	if err != nil {
		return "", fmt.Errorf("lab: worker program: %w", err)
	}
	defer in.Close()
	out, err := os.CreateTemp(dir, "gpu-lab-worker-")
	if err != nil {
		return "", fmt.Errorf("lab: worker program: %w", err)
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(0o755)
	}
	if err = errors.Join(err, out.Close()); err != nil {
		_ = os.Remove(out.Name())
		return "", fmt.Errorf("lab: worker program: %w", err)
	}
	return out.Name(), nil
}

// programFor gives the workers' program the name of the one it stands for: who
// looks at /proc/PID/exe must find Xorg where Xorg is meant.
func (s *server) programFor(command string) (string, error) {
	path := filepath.Join(s.program+".d", filepath.Base(command))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", fmt.Errorf("lab: worker program: %w", err)
	}
	if err := os.Link(s.program, path); err != nil {
		return "", fmt.Errorf("lab: worker program: %w", err)
	}
	return path, nil
}

// removePrograms removes what copyProgram and programFor made.
func (s *server) removePrograms() {
	_ = os.Remove(s.program)
	_ = os.RemoveAll(s.program + ".d")
}

// now is the instant on the scenario's own clock.
func (s *server) now() time.Duration { return time.Since(s.scenario.Epoch) }

// start runs a workload's process and lists it.
func (s *server) start(ctx context.Context, w Workload) error {
	t := &task{workload: w, done: make(chan struct{})}
	if w.Container != "" {
		if err := s.docker.free(ctx, w.Container); err != nil {
			return err
		}
		s.made = append(s.made, w.Container)
		t.cmd = s.docker.run(w.Container, w)
	} else {
		program, err := s.programFor(w.Command)
		if err != nil {
			return err
		}
		t.cmd = exec.Command(program, "worker", "--name", w.Command)
		t.cmd.Args[0] = w.Command
		t.cmd.Dir = "/"
		t.cmd.Env = []string{"PATH=/usr/bin:/bin"}
		if os.Geteuid() == 0 {
			t.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: w.UID, Gid: w.UID}}
		}
	}
	t.cmd.Stderr = s.Stderr
	// The worker ends when this pipe does: with its task, or with us.
	stdin, err := t.cmd.StdinPipe()
	if err == nil {
		err = t.cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("lab: start %s: %w", w.Command, err)
	}
	t.stdin = stdin
	s.running[t] = true
	s.waits.Go(func() {
		_ = t.cmd.Wait() // how a worker ended changes nothing
		close(t.done)
		s.ended <- t
	})
	if t.pid = t.cmd.Process.Pid; w.Container != "" {
		if t.pid, err = s.docker.pid(ctx, w.Container, t.done); err != nil {
			return err
		}
	} else if w.Cgroup != "" {
		s.cgroups.place(t.pid, w.Cgroup)
	}
	s.scenario.Processes = append(s.scenario.Processes, lab.Process{
		GPU: w.GPU, PID: uint32(t.pid), Type: w.Type, MemoryBytes: uint64(w.MemoryMiB) << 20, SM: w.SM, Memory: w.Memory,
		MIG: w.GPUInstance > 0, GPUInstance: w.GPUInstance, From: s.now(),
	})
	s.sense(w.GPU)
	s.Log.Info("started", "command", w.Command, "pid", t.pid, "uid", w.UID, "gpu", w.GPU, "cgroup", w.Cgroup, "container", w.Container)
	return nil
}

// end takes a process that is gone off the lists.
func (s *server) end(t *task) {
	delete(s.running, t)
	for i := range s.scenario.Processes {
		if p := &s.scenario.Processes[i]; p.PID == uint32(t.pid) && p.To == 0 {
			p.To = s.now()
		}
	}
	s.sense(t.workload.GPU)
}

// senseLag puts a change of power into the near future, so that no client has
// read the energy counter past it before the scenario that holds it is there.
const senseLag = 200 * time.Millisecond

// sense lets a card's sensors follow what runs on it.
func (s *server) sense(gpu int) {
	sum := 0
	for _, p := range s.scenario.Processes {
		if p.GPU == gpu && p.To == 0 {
			sum += p.SM
		}
	}
	s.scenario.Changes = append(s.scenario.Changes, lab.Change{At: s.now() + senseLag, GPU: gpu, Values: load(sum)})
}

func (s *server) write() error {
	s.scenario.Forget(s.now() - forget)
	return s.scenario.WriteFile(s.ScenarioFile)
}

// keep follows the processes until ctx ends.
func (s *server) keep(ctx context.Context, plan []Workload) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	began := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case t := <-s.ended:
			s.Log.Info("ended", "command", t.workload.Command, "pid", t.pid)
			s.end(t)
		case <-tick.C:
			changed := false
			for _, w := range plan {
				if w.Every > 0 && s.turn(ctx, w, time.Since(began)) {
					changed = true
				}
			}
			if !changed {
				continue
			}
		}
		if err := s.write(); err != nil {
			return err
		}
	}
}

// turn starts or ends a workload that comes and goes. It says whether it
// started one; an end is told by the process itself.
func (s *server) turn(ctx context.Context, w Workload, up time.Duration) bool {
	var current *task
	for t := range s.running {
		if t.workload == w {
			current = t
		}
	}
	wanted := up%w.Every < w.For
	if current != nil && !wanted {
		_ = current.stdin.Close()
	}
	if current != nil || !wanted {
		return false
	}
	if err := s.start(ctx, w); err != nil {
		s.Log.Error("workload did not start", "command", w.Command, "err", err)
		return false
	}
	return true
}

// patience is how long a worker may take to end by itself.
const patience = 3 * time.Second

// stop ends every process that was started, and takes away what was made.
func (s *server) stop() {
	for t := range s.running {
		_ = t.stdin.Close()
	}
	deadline := time.After(patience)
	for killed := false; len(s.running) > 0; {
		select {
		case t := <-s.ended:
			s.end(t)
		case <-deadline:
			for t := range s.running {
				_ = t.cmd.Process.Kill()
			}
			if killed {
				s.Log.Error("workers did not end", "count", len(s.running))
				return
			}
			killed = true
			deadline = time.After(patience)
		}
	}
	s.waits.Wait()
	for _, container := range s.made {
		if err := s.docker.remove(container); err != nil {
			s.Log.Error("container stays behind", "err", err)
		}
	}
	s.cgroups.remove()
	if err := s.write(); err != nil {
		s.Log.Error("last scenario", "err", err)
	}
}
