// Package holders joins a card's PIDs with who is behind them: PID → /proc →
// cgroup → workload → user.
package holders

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/cgroup"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
	"gpuledger/exporter/procfs"
	"gpuledger/exporter/runtimes"
	"gpuledger/exporter/runtimes/slurm"
	"gpuledger/exporter/snapshot"
)

const (
	// rereadWithin is how soon a change of cgroup or uid is seen.
	rereadWithin = 10 * time.Second
	// readWholeWithin is how soon any other change is: of the program, say.
	readWholeWithin = time.Minute
	// rememberedFor is how long a process that no card lists any more can be
	// asked about: intervals wait up to 10 s for their names.
	rememberedFor = time.Minute
	// lookupPatience is how long a process's first intervals wait for a name
	// or owner; after that the best answer stands and is replaced when a better
	// one comes.
	lookupPatience = 10 * time.Second
	// maxCommandLine bounds what is kept of a command line, in bytes.
	maxCommandLine = 1024
	// startSlackUS is how much later than a reading a listed process may seem
	// to have started. Start times are floored to ticks of 10 ms, so it is only
	// for the clocks not being read at one instant.
	startSlackUS = 1_000
)

// Options of a Table.
type Options struct {
	FS       *procfs.FS
	Owner    owner.Config // Accounts is set by New if Accounts below is given
	Accounts *owner.HostAccounts
	// Engines are asked for the names of containers.
	Engines []*runtimes.Directory
	// Personal are asked about containers in people's own slices; may be nil.
	Personal *runtimes.Personal
	// Granters know which GPUs schedulers and engines gave to whom.
	Granters []runtimes.Granter
	// Slurm knows of jobs; it is among Granters, too. Nil where none is asked.
	Slurm *slurm.Watcher
	// GatherAll also gathers evidence that no step needs any more once another
	// has named the user.
	GatherAll bool
	Logger    *slog.Logger     // nil for none
	Now       func() time.Time // nil for the wall clock
}

// Table is what is known of the processes on this node's cards. Run may run
// beside it; everything else belongs to one goroutine.
type Table struct {
	options Options
	owner   owner.Config
	logger  *slog.Logger
	now     func() time.Time
	runners []runtimes.Runner // of the granters

	processes              map[meter.ProcessKey]*process
	current                map[uint32]*process // newest process of each PID
	turn                   []*process          // living ones, that read longest ago first
	turnAt                 time.Time
	polled                 []unix.PollFd
	pollees                []*process
	asked                  []meter.ProcessKey
	askedFrom              int
	listed                 map[uint32]int64 // PIDs of the pass at hand: monotonic time at which their reading ended
	gone                   map[uint32]bool  // listed, but not in /proc, at the last pass
	hidden                 map[uint32]bool
	goneCount, hiddenCount int64
	unreadable             string // why processes cannot be read; empty while they can
	grants                 grants
	gatherer               *gatherer
}

// process is one process that a card listed.
type process struct {
	key         meter.ProcessKey
	handle      *procfs.Handle // nil once it has ended
	facts       procfs.Process
	chain       cgroup.Chain
	commandLine string
	startedAt   time.Time
	startUS     int64 // CLOCK_MONOTONIC
	firstSeen   time.Time
	lastListed  time.Time
	readAt      time.Time
	readWholeAt time.Time
	zombie      bool
	// mpsServer says that root's MPS daemon started it.
	mpsServer bool
	// before had the PID before this process, if a card may still mean it.
	before *process

	// granted says that it stands for a grant, and known that a real process of
	// the workload was read for it.
	granted, known bool
	// pod and podContainer are the names that a grant came with.
	pod          *runtimes.Pod
	podContainer string

	resolved   bool
	generation uint64
	answer     meter.Attribution
	verdict    owner.Answer
	evidence   owner.Evidence
	detail     snapshot.Detail
}

// New returns an empty table.
func New(options Options) *Table {
	t := &Table{
		options: options, owner: options.Owner, logger: options.Logger, now: options.Now,
		processes: map[meter.ProcessKey]*process{}, current: map[uint32]*process{},
		listed: map[uint32]int64{}, gone: map[uint32]bool{}, hidden: map[uint32]bool{},
		grants: newGrants(),
	}
	if t.logger == nil {
		t.logger = slog.New(slog.DiscardHandler)
	}
	if t.now == nil {
		t.now = time.Now
	}
	for _, granter := range options.Granters {
		if runner, ok := granter.(runtimes.Runner); ok {
			t.runners = append(t.runners, runner)
		}
	}
	if options.Accounts != nil {
		t.owner.Accounts = options.Accounts.Accounts()
	}
	t.gatherer = newGatherer(options.FS, t.owner.EnvironmentKeys, t.now)
	return t
}

// Run asks runtimes and the host's accounts for names until ctx ends.
func (t *Table) Run(ctx context.Context) {
	var group sync.WaitGroup
	group.Go(func() { t.gatherer.run(ctx) })
	if t.options.Accounts != nil {
		// Both return ctx's error only.
		group.Go(func() { _ = t.options.Accounts.Run(ctx) })
	}
	for _, engine := range t.options.Engines {
		group.Go(func() { _ = engine.Run(ctx) })
	}
	for _, granter := range t.runners {
		group.Go(func() { _ = granter.Run(ctx) })
	}
	if t.options.Personal != nil {
		group.Go(func() { _ = t.options.Personal.Run(ctx) })
	}
	group.Wait()
}

// Close gives all descriptors back.
func (t *Table) Close() {
	for _, p := range t.processes {
		p.end()
	}
}

func (p *process) end() {
	if p.handle != nil {
		p.handle.Close()
		p.handle = nil
	}
}

// Refresh takes in the PIDs of a pass: new ones are read, ended ones noticed,
// and the others read again in turn.
func (t *Table) Refresh(_ context.Context, pass gpu.Pass) {
	now := t.now()
	clear(t.listed)
	for i := range pass.Readings {
		t.list(&pass.Readings[i])
	}
	t.noticeEnds()
	gone, hidden := map[uint32]bool{}, map[uint32]bool{}
	t.unreadable = ""
	for pid, monotonicUS := range t.listed {
		if p := t.current[pid]; p != nil && p.handle != nil {
			p.lastListed = now
			continue
		}
		switch err := t.admit(pid, monotonicUS, now); {
		case errors.Is(err, procfs.ErrGone):
			if gone[pid] = true; !t.gone[pid] {
				t.goneCount++
			}
		case errors.Is(err, procfs.ErrHidden):
			if hidden[pid] = true; !t.hidden[pid] {
				t.hiddenCount++
				t.logger.Warn("a process on a GPU is hidden from us", "pid", pid, "err", err)
			}
			t.unreadable = err.Error()
		case err != nil:
			t.unreadable = err.Error()
		}
	}
	t.gone, t.hidden = gone, hidden
	t.admitAsked(now)
	t.refreshGrants(now)
	t.reread(now)
	for key, p := range t.processes {
		if now.Sub(p.lastListed) > rememberedFor {
			p.end()
			delete(t.processes, key)
			if t.current[key.PID] == p {
				delete(t.current, key.PID)
			}
		}
	}
}

// endUS is when a reading was whole: a process that started later is not one
// that it lists.
func endUS(reading *gpu.Reading) int64 { return reading.At.MonotonicUS + max(0, reading.TookUS) }

func (t *Table) list(reading *gpu.Reading) {
	end := endUS(reading)
	add := func(processes []gpu.Process) {
		for _, process := range processes {
			t.listed[process.PID] = max(t.listed[process.PID], end)
		}
	}
	add(reading.Processes)
	for _, instance := range reading.Instances {
		add(instance.Processes)
	}
}

// noticeEnds lets go of processes that have ended, in one system call.
func (t *Table) noticeEnds() {
	t.polled, t.pollees = t.polled[:0], t.pollees[:0]
	for _, p := range t.current {
		switch {
		case p.handle == nil:
		case p.handle.PIDFD() >= 0:
			t.polled = append(t.polled, unix.PollFd{Fd: int32(p.handle.PIDFD())})
			t.pollees = append(t.pollees, p)
		default:
			// No pidfd to be had: the directory has to tell.
			if stat, err := p.handle.Stat(); errors.Is(err, procfs.ErrGone) || err == nil && stat.Zombie() {
				p.end()
			}
		}
	}
	ended, err := procfs.Ended(t.polled)
	if err != nil {
		t.logger.Error("can't tell which processes have ended", "err", err)
		return
	}
	for _, i := range ended {
		t.pollees[i].end()
	}
}

// admit reads a PID that is new, or whose process has ended. A driver may go
// on listing a process that has ended (a leaked context, a zombie): then what
// was known of it stays.
func (t *Table) admit(pid uint32, listedUS int64, now time.Time) error {
	known := t.current[pid]
	if known != nil {
		known.lastListed, known.zombie = now, false
	}
	handle, err := t.options.FS.Process(pid)
	if err != nil {
		return err
	}
	facts, err := handle.Read()
	if err != nil {
		handle.Close()
		return err
	}
	key := meter.ProcessKey{PID: pid, StartTicks: facts.StartTicks}
	if known != nil && known.key == key {
		if known.zombie = facts.Zombie(); known.zombie {
			handle.Close()
		} else {
			known.handle = handle // it lives after all
			t.takeTurn(known, now)
		}
		return nil
	}
	startUS := t.options.FS.StartMonotonicUS(facts.StartTicks)
	if startUS > listedUS+startSlackUS {
		// It started after the card listed the number: not the one meant.
		handle.Close()
		return procfs.ErrGone
	}
	p := &process{
		key: key, handle: handle, facts: facts, chain: cgroup.Parse(facts.Cgroup), zombie: facts.Zombie(),
		commandLine: commandLine(handle), startedAt: t.options.FS.StartTime(facts.StartTicks), startUS: startUS,
		firstSeen: now, lastListed: now, readWholeAt: now, before: known,
	}
	if known != nil {
		known.before = nil
	}
	p.mpsServer = t.startedByMPSDaemon(facts)
	t.processes[key], t.current[pid] = p, p
	if p.zombie {
		p.end()
	} else {
		t.takeTurn(p, now)
	}
	return nil
}

// takeTurn puts a process that has just been read at the end of the turn.
func (t *Table) takeTurn(p *process, now time.Time) {
	p.readAt = now
	t.turn = append(t.turn, p)
}

// commandLine is kept in memory for the owner and root to see; it is empty if
// it can't be read.
func commandLine(handle *procfs.Handle) string {
	arguments, err := handle.CommandLine()
	if err != nil {
		return ""
	}
	line := ""
	for i, argument := range arguments {
		if i > 0 {
			line += " "
		}
		if line += argument; len(line) > maxCommandLine {
			return strings.ToValidUTF8(line[:maxCommandLine], "")
		}
	}
	return line
}

// reread reads some processes again, those first that were read longest ago,
// so that every one is read within rereadWithin: jobs get adopted, and a
// process can change its uids and its program. The work is spread evenly over
// the passes.
func (t *Table) reread(now time.Time) {
	elapsed := now.Sub(t.turnAt)
	if t.turnAt.IsZero() || elapsed < 0 {
		elapsed = 0
	}
	t.turnAt = now
	elapsed = min(elapsed, rereadWithin)
	even := (len(t.turn)*int(elapsed/time.Millisecond) + int(rereadWithin/time.Millisecond) - 1) / int(rereadWithin/time.Millisecond)
	// Those that would be late at the next pass are read whatever their number.
	late := now.Add(elapsed - rereadWithin)
	for remaining := len(t.turn); remaining > 0; remaining-- {
		p := t.turn[0]
		if p.handle != nil && even <= 0 && !p.readAt.Before(late) {
			return
		}
		t.turn = t.turn[1:]
		if p.handle == nil {
			continue // ended: only its name is left
		}
		even--
		t.readAgain(p, now)
		t.takeTurn(p, now)
	}
}

// readAgain takes in what has changed of a living process.
func (t *Table) readAgain(p *process, now time.Time) {
	// Names and owners, too, are asked for again: who could not be named may
	// have got an account, or a container a name, with nobody to tell us.
	p.resolved = false
	if now.Sub(p.readWholeAt) < readWholeWithin {
		content, err := p.handle.Cgroup()
		if err != nil {
			return
		}
		uid, err := p.handle.EffectiveUID()
		if err != nil || content == p.facts.Cgroup && uid == p.facts.EffectiveUID {
			return
		}
	}
	p.readWholeAt = now
	facts, err := p.handle.Read()
	if err != nil || facts.Exiting() {
		return // on cgroup v1 it has left its cgroup already; its end is noticed at the next pass
	}
	if facts.Executable != p.facts.Executable || facts.Command != p.facts.Command {
		p.commandLine = commandLine(p.handle)
		p.mpsServer = t.startedByMPSDaemon(facts)
	}
	if facts.Cgroup != p.facts.Cgroup {
		p.chain = cgroup.Parse(facts.Cgroup)
	}
	p.facts = facts
}

// Keys says which process each PID of a reading is, as of the newest Refresh.
// A PID that was never seen in /proc has start time 0.
func (t *Table) Keys(reading gpu.Reading) map[uint32]meter.ProcessKey {
	keys := make(map[uint32]meter.ProcessKey, len(reading.Processes))
	end := endUS(&reading) + startSlackUS
	add := func(processes []gpu.Process) {
		for _, process := range processes {
			p := t.current[process.PID]
			if p != nil && p.startUS > end {
				p = p.before // another card listed the number after it was given away
			}
			keys[process.PID] = meter.ProcessKey{PID: process.PID}
			if p != nil {
				keys[process.PID] = p.key
			}
		}
	}
	add(reading.Processes)
	for _, instance := range reading.Instances {
		add(instance.Processes)
	}
	return keys
}

// Gone counts PIDs that a card listed and /proc no longer had.
func (t *Table) Gone() int64 { return t.goneCount }

// Hidden counts PIDs that /proc would not show us.
func (t *Table) Hidden() int64 { return t.hiddenCount }

// Collectors says how procfs, the engines and the host's accounts did last.
func (t *Table) Collectors() map[string]snapshot.CollectorState {
	states := map[string]snapshot.CollectorState{
		"procfs": {Up: t.unreadable == "", Error: t.unreadable},
	}
	if t.options.Accounts != nil {
		failure := t.options.Accounts.Failure()
		states["accounts"] = snapshot.CollectorState{Up: failure == "", Error: failure}
	}
	reporters := make([]runtimes.Reporter, 0, len(t.options.Engines)+len(t.options.Granters))
	for _, engine := range t.options.Engines {
		reporters = append(reporters, engine)
	}
	for _, granter := range t.options.Granters {
		if reporter, ok := granter.(runtimes.Reporter); ok {
			reporters = append(reporters, reporter)
		}
	}
	for _, engine := range reporters {
		state, asked := engine.State()
		if before, ok := states[engine.Engine()]; !asked || ok && !before.Up {
			continue
		}
		states[engine.Engine()] = snapshot.CollectorState{Up: state.Up, Duration: state.Duration, Error: state.Error}
	}
	return states
}
