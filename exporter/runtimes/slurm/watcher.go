// Package slurm knows the Slurm jobs of a node: whose they are, what they are
// charged to, and which GPUs they were given.
//
// Which jobs there are and who runs them is read from the node's cgroups and
// processes. Account, partition, QOS and GPUs are slurmctld's to tell; while it
// does not answer, the variables that slurmstepd gave the job's processes stand
// for them.
package slurm

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/procfs/text"
	"gpuledger/exporter/runtimes"
)

// DefaultCgroupRoot is where cgroups are mounted.
const DefaultCgroupRoot = "/sys/fs/cgroup"

// DefaultGresConf are the places of gres.conf: the usual one, and where slurmd
// keeps what it got from the controller.
func DefaultGresConf() []string {
	return []string{"/etc/slurm/gres.conf", "/etc/slurm-llnl/gres.conf", "/run/slurm/conf/gres.conf", "/var/spool/slurmd/conf-cache/gres.conf"}
}

const (
	lookEvery = 3 * time.Second
	// lookForAny is how often it is looked while there is no job.
	lookForAny = 10 * time.Second
	// lookNow is how soon after a look the next may come that was asked for.
	lookNow = 250 * time.Millisecond
	// askAgain is when slurmctld is asked again after it did not answer.
	askAgain = 30 * time.Second
	// keepEnded is how long an ended job can be asked about: intervals wait up to
	// 10 s for its name.
	keepEnded = time.Minute
)

// Options of a Watcher.
type Options struct {
	Proc       *procfs.FS
	CgroupRoot string // empty for DefaultCgroupRoot
	// Ask says that slurmctld is asked, by the programs in Programs (empty for
	// PATH).
	Ask      bool
	Programs string
	// GresConf are the files of which the first that is there says which device
	// files Slurm counts.
	GresConf []string
	Logger   *slog.Logger // nil for none
	Now      func() time.Time
}

// Job is what is known of a job.
type Job struct {
	// ID is its number; empty where only its SLUID is known.
	ID string
	// UID is its owner; -1 if not known.
	UID                     int64
	Account, Partition, QOS string
}

// Watcher answers from memory what Run finds out. It is a runtimes.Granter.
type Watcher struct {
	options    Options
	generation atomic.Uint64
	wake       chan struct{}

	// Only Run's goroutine uses it.
	silentUntil time.Time // slurmctld did not answer

	mutex  sync.Mutex
	jobs   map[string]*entry // by cgroup.Level.ID
	missed map[string]int    // ids that were asked for and not found, by the looks since
	grants []runtimes.Grant
	state  runtimes.State
	asked  bool
}

type entry struct {
	job     Job
	gpus    []int
	told    bool // by slurmctld
	settled bool // there is nothing to wait for
	since   time.Time
	endedAt time.Time // zero while it has a cgroup
}

// New returns a watcher; nothing is read before Run runs.
func New(options Options) *Watcher {
	if options.CgroupRoot == "" {
		options.CgroupRoot = DefaultCgroupRoot
	}
	if options.Logger == nil {
		options.Logger = slog.New(slog.DiscardHandler)
	}
	if options.Now == nil {
		options.Now = time.Now
	}
	return &Watcher{options: options, wake: make(chan struct{}, 1), jobs: map[string]*entry{}, missed: map[string]int{}}
}

// Engine is what slurm is called among the collectors.
func (w *Watcher) Engine() string { return "slurm" }

// State is how slurmctld did at the last question; asked is false while there
// was none.
func (w *Watcher) State() (state runtimes.State, asked bool) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.state, w.asked
}

// Generation grows whenever an answer may have changed.
func (w *Watcher) Generation() uint64 { return w.generation.Load() }

// Grants are the GPUs of the jobs that are on this node.
func (w *Watcher) Grants() []runtimes.Grant {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.grants
}

// Lookup answers at once what is known of a job by the id in its cgroup path.
func (w *Watcher) Lookup(id string) (Job, runtimes.Status) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if e := w.jobs[id]; e != nil {
		if e.settled {
			return e.job, runtimes.StatusFound
		}
		return e.job, runtimes.StatusWaiting
	}
	if w.missed[id] > 1 { // not even the look after the question has found it
		return Job{UID: -1}, runtimes.StatusMissing
	}
	if len(w.missed) < maxJobs {
		w.missed[id] += 0
	}
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return Job{UID: -1}, runtimes.StatusWaiting
}

// Run looks at the node's jobs until ctx ends.
func (w *Watcher) Run(ctx context.Context) error {
	for {
		every := lookForAny
		if w.look(ctx) > 0 {
			every = lookEvery
		}
		if !wait(ctx, lookNow) {
			return ctx.Err()
		}
		timer := time.NewTimer(every - lookNow)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		case <-w.wake:
			timer.Stop()
		}
	}
}

func wait(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// look takes in which jobs there are, then asks for those that are new. It
// returns how many there are.
func (w *Watcher) look(ctx context.Context) int {
	now := w.options.Now()
	here := walk(w.options.CgroupRoot)
	var unknown []*found
	var unknownMembers [][]member
	var grants []runtimes.Grant
	seen := map[string]bool{}
	changed := false
	var minors []int
	gresRead := false
	for _, job := range here {
		members := job.members(w.options.Proc)
		process := worker(members, job.uid)
		seen[job.key] = true
		w.mutex.Lock()
		e := w.jobs[job.key]
		if e == nil {
			e = &entry{job: Job{UID: job.uid}, since: now}
			w.jobs[job.key] = e
			changed = true
		}
		before := e.job
		e.endedAt = time.Time{}
		if e.job.ID == "" {
			e.job.ID = job.number(members)
		}
		if e.job.UID < 0 && process != nil {
			e.job.UID = int64(process.RealUID)
		}
		if !e.told && process != nil {
			w.fromEnvironment(e, *process)
		}
		if !e.told {
			unknown, unknownMembers = append(unknown, job), append(unknownMembers, members)
		}
		gpus := e.gpus
		changed = changed || e.job != before
		w.mutex.Unlock()
		if len(gpus) > 0 && !gresRead {
			minors, gresRead = minorsOf(readGres(w.options.GresConf), nodeName(job)), true
		}
		if grant, ok := grantOf(job, gpus, minors, process, e.since); ok {
			grants = append(grants, grant)
		}
	}
	w.settle(grants, seen, changed, now)
	for i, job := range unknown {
		if ctx.Err() != nil {
			break
		}
		w.ask(ctx, job, unknownMembers[i])
	}
	return len(here)
}

// settle makes what a look found the answer.
func (w *Watcher) settle(grants []runtimes.Grant, seen map[string]bool, changed bool, now time.Time) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	changed = changed || !reflect.DeepEqual(w.grants, grants)
	w.grants = grants
	for key, e := range w.jobs {
		if seen[key] {
			delete(w.missed, key)
			continue
		}
		if e.endedAt.IsZero() {
			e.endedAt, e.settled, changed = now, true, true
		}
		if now.Sub(e.endedAt) > keepEnded {
			delete(w.jobs, key)
		}
	}
	for id := range w.missed {
		changed = changed || w.missed[id] == 1 // it is missing now
		if w.missed[id]++; w.missed[id] > 20 {
			delete(w.missed, id) // asked for again, it is looked for again
		}
	}
	if changed {
		w.generation.Add(1)
	}
}

// worker is a process of the job's own: not slurmstepd, and its owner's where
// that is known.
func worker(members []member, uid int64) *member {
	for i := range members {
		m := &members[i]
		if m.Command == stepd && m.RealUID == 0 || cgroup.Parse(m.Cgroup).Monitor {
			continue
		}
		if uid < 0 && m.RealUID != 0 || int64(m.RealUID) == uid {
			return m
		}
	}
	return nil
}

// grantOf is what a job was given.
func grantOf(job *found, gpus, minors []int, process *member, since time.Time) (runtimes.Grant, bool) {
	grant := runtimes.Grant{Exclusive: true, Levels: []cgroup.Level{job.level}, UID: -1, Since: since}
	for _, n := range gpus {
		switch {
		case minors == nil:
			grant.Devices = append(grant.Devices, runtimes.ByMinor(n))
		case n < len(minors):
			grant.Devices = append(grant.Devices, runtimes.ByMinor(minors[n]))
		}
	}
	if process != nil {
		grant.PID = process.PID
	}
	return grant, len(grant.Devices) > 0
}

// ask asks slurmctld about a job. While it is silent nobody waits for it.
func (w *Watcher) ask(ctx context.Context, job *found, members []member) {
	w.mutex.Lock()
	e := w.jobs[job.key]
	w.mutex.Unlock()
	number := job.number(members)
	if !w.options.Ask || number == "" || w.options.Now().Before(w.silentUntil) {
		w.update(e, func() { e.settled = true })
		return
	}
	begun := time.Now()
	r, err := controller{w.options.Programs, nodeName(job)}.ask(ctx, number)
	if ctx.Err() != nil {
		return
	}
	if errors.Is(err, errNoPrograms) {
		w.silentUntil = w.options.Now().Add(askAgain)
		w.update(e, func() { e.settled = true })
		return
	}
	state := runtimes.State{Up: err == nil || errors.Is(err, errNoJob), Duration: time.Since(begun)}
	if !state.Up {
		state.Error = err.Error()
		w.silentUntil = w.options.Now().Add(askAgain)
	}
	w.mutex.Lock()
	before, first := w.state, !w.asked
	w.state, w.asked = state, true
	w.mutex.Unlock()
	if !state.Up && (first || before.Up) {
		w.options.Logger.Warn("slurmctld can't be asked; accounts and GPUs of new jobs come from their processes", "err", err)
	} else if state.Up && !first && !before.Up {
		w.options.Logger.Info("slurmctld answers again")
	}
	w.update(e, func() {
		e.settled = true
		switch {
		case errors.Is(err, errNoJob):
			// It has ended; what its processes said before is nobody's word now.
			e.told, e.gpus = true, nil
		case err == nil:
			e.told = true
			e.job.Account, e.job.Partition, e.job.QOS, e.gpus = r.account, r.partition, r.qos, r.gpus
			if e.job.UID < 0 {
				e.job.UID = r.uid
			}
		}
	})
	select {
	case w.wake <- struct{}{}: // its GPUs are known now
	default:
	}
}

func (w *Watcher) update(e *entry, change func()) {
	w.mutex.Lock()
	before := *e
	change()
	changed := before.settled != e.settled || before.job != e.job || before.told != e.told
	w.mutex.Unlock()
	if changed {
		w.generation.Add(1)
	}
}

// nodeName is what Slurm calls this node.
func nodeName(job *found) string {
	if job.node != "" {
		return job.node
	}
	name, err := os.Hostname()
	if err != nil {
		return ""
	}
	name, _, _ = strings.Cut(name, ".")
	return name
}

// variables are those of a job's process that are looked at, and the only ones
// that are kept (sbatch(1), OUTPUT ENVIRONMENT VARIABLES).
var variables = []string{"SLURM_JOB_ID", "SLURM_JOB_ACCOUNT", "SLURM_JOB_PARTITION", "SLURM_JOB_QOS", "SLURM_JOB_GPUS"}

// fromEnvironment takes what the variables of a job's process say. The process
// is the user's and can have put anything there, so they never say who that is.
func (w *Watcher) fromEnvironment(e *entry, process member) {
	handle, err := w.options.Proc.Process(process.PID)
	if err != nil {
		return // gone
	}
	defer handle.Close()
	values, err := handle.Environment(variables)
	if err != nil || values["SLURM_JOB_ID"] != e.job.ID {
		return
	}
	e.job.Account = told(values["SLURM_JOB_ACCOUNT"])
	e.job.Partition, e.job.QOS = told(values["SLURM_JOB_PARTITION"]), told(values["SLURM_JOB_QOS"])
	e.gpus = nil
	if numbers, err := expand("[" + text.Clean(values["SLURM_JOB_GPUS"], maxNameBytes) + "]"); err == nil {
		for _, number := range numbers {
			if n, err := strconv.Atoi(number); err == nil {
				e.gpus = append(e.gpus, n)
			}
		}
	}
}
