// Package doctor looks at what a host lets an exporter see, and says what to
// change. It changes nothing itself, takes no lock and starts no metering.
package doctor

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter"
	"gpuledger/exporter/gpu"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/procfs"
)

// Level says how bad a finding is.
type Level string

// Levels.
const (
	OK      Level = "ok"
	Warning Level = "warning" // works, and something is not seen or not as good as it could be
	Problem Level = "problem" // doesn't work, or what is shown is wrong
)

// Finding is one thing looked at.
type Finding struct {
	// Check is a stable name, such as "nvml.cards".
	Check string `json:"check"`
	Level Level  `json:"level"`
	// Found is what is so.
	Found string `json:"found"`
	// Consequence is what comes of it; empty if all is well.
	Consequence string `json:"consequence"`
	// Remedy is what to do, a command where one does it; empty if nothing has to
	// be done.
	Remedy string `json:"remedy"`
}

// Options are the flags that the exporter is run with, and how to read cards.
type Options struct {
	ConfigFile string
	ProcFS     string
	StateDir   string
	LockPath   string // empty for the default
	Socket     string
	// ListenAddresses are none where systemd passes the sockets.
	ListenAddresses []string
	// WebConfigFile may ask for TLS: what listens can't be asked who it is then.
	WebConfigFile string
	// Source reads the cards, in a child process.
	Source gpu.Source
	// Patience is how long a check may take, except that of the cards, which may
	// have to be woken; 0 for 5 s.
	Patience time.Duration
}

const (
	defaultPatience = 5 * time.Second
	cardsPatience   = 20 * time.Second
)

// host is what several checks go by.
type host struct {
	Options
	config    exporter.Config
	configErr error
	fs        *procfs.FS
	fsErr     error
	uid       int
	trace     bool // has CAP_SYS_PTRACE
	search    bool // has CAP_DAC_READ_SEARCH or CAP_DAC_OVERRIDE
	running   int  // PID of the exporter that holds the node; 0 for none
	lockErr   error
}

func (h *host) root() bool { return h.uid == 0 }

// check is one piece of the examination.
type check struct {
	name    string
	examine func(context.Context, *host) []Finding
}

// checks in the order in which they are shown.
var checks = []check{
	{"configuration", configuration},
	{"privileges", privileges},
	{"procfs", processes},
	{"cgroups", cgroups},
	{"kernel", kernel},
	{"clock", clock},
	{"nvml", cards},
	{"runtimes", runtimes},
	{"accounts", accounts},
	{"state", state},
	{"listen", listen},
	{"socket", socket},
	{"service", service},
}

// Examine makes all checks, beside each other. One that does not end in time
// is a problem itself.
func Examine(ctx context.Context, options Options) []Finding {
	if options.Patience <= 0 {
		options.Patience = defaultPatience
	}
	h := prepare(options)
	found := make([][]Finding, len(checks))
	var group sync.WaitGroup
	for i, one := range checks {
		group.Go(func() { found[i] = bounded(ctx, h, one) })
	}
	group.Wait()
	var all []Finding
	for _, some := range found {
		all = append(all, some...)
	}
	return all
}

func prepare(options Options) *host {
	h := &host{Options: options, uid: os.Geteuid()}
	h.config, h.configErr = exporter.LoadConfig(options.ConfigFile)
	if h.configErr != nil {
		h.config = exporter.DefaultConfig()
	}
	h.fs, h.fsErr = procfs.Open(options.ProcFS)
	h.trace, h.search = capabilities()
	for _, path := range journal.LockPaths(options.LockPath, options.StateDir) {
		pid, err := journal.LockHolder(path)
		if pid != 0 {
			h.running, h.lockErr = pid, nil
			break
		}
		if err != nil {
			h.lockErr = err
		}
	}
	return h
}

// capabilities are those of the two that matter that this process has.
func capabilities() (trace, search bool) {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if unix.Capget(&header, &data[0]) != nil {
		return false, false
	}
	has := func(capability int) bool { return data[capability/32].Effective&(1<<(capability%32)) != 0 }
	return has(unix.CAP_SYS_PTRACE), has(unix.CAP_DAC_READ_SEARCH) || has(unix.CAP_DAC_OVERRIDE)
}

// bounded makes one check within its time.
func bounded(ctx context.Context, h *host, one check) []Finding {
	patience := h.Patience
	if one.name == "nvml" {
		patience = max(patience, cardsPatience)
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	// One that minds ctx still has to say so.
	grace := time.NewTimer(patience + 2*time.Second)
	defer grace.Stop()
	done := make(chan []Finding, 1)
	go func() { done <- one.examine(ctx, h) }()
	select {
	case found := <-done:
		return found
	case <-grace.C:
		return []Finding{{
			Check: one.name, Level: Problem, Found: fmt.Sprintf("the check did not end within %v", patience),
			Consequence: "something that the exporter uses hangs: a disk, a mount, a name service",
			Remedy:      "dmesg | tail; ps -eo pid,stat,wchan:32,args | awk '$2 ~ /D/'",
		}}
	}
}

// Count is how many findings have the level.
func Count(findings []Finding, level Level) int {
	count := 0
	for _, one := range findings {
		if one.Level == level {
			count++
		}
	}
	return count
}

func ok(check, found string) Finding { return Finding{Check: check, Level: OK, Found: found} }

// unlessRoot is a warning for ordinary users, who see less by design, and what
// level else.
func (h *host) unlessRoot(level Level) Level {
	if h.root() {
		return level
	}
	return Warning
}
