package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func configuration(_ context.Context, h *host) []Finding {
	switch {
	case h.configErr != nil:
		return []Finding{{
			Check: "configuration", Level: Problem, Found: h.configErr.Error(),
			Consequence: "the exporter does not start with it; what follows goes by the defaults",
			Remedy:      "mend the file; docs/exporter.md names every key",
		}}
	case h.ConfigFile == "":
		return []Finding{ok("configuration", "no --config.file: the defaults hold")}
	}
	return []Finding{ok("configuration", h.ConfigFile+" is valid")}
}

func privileges(_ context.Context, h *host) []Finding {
	if h.root() && h.trace {
		return []Finding{ok("privileges", "root, with CAP_SYS_PTRACE")}
	}
	one := Finding{Check: "privileges", Level: Warning, Found: fmt.Sprintf("uid %d, without CAP_SYS_PTRACE", h.uid)}
	switch {
	case h.trace:
		one.Found = fmt.Sprintf("uid %d, with CAP_SYS_PTRACE", h.uid)
		one.Consequence = "sockets of engines and the state directory may be out of reach"
	case h.root():
		one.Level, one.Found = Problem, "root, without CAP_SYS_PTRACE"
		one.Consequence = "the programs, files and reads and writes of other people's processes can't be seen: owners and suspects are missed"
	default:
		one.Consequence = "as root the exporter sees more, and so does this check: other people's programs, files, reads and writes, what hidepid hides, engines' sockets, the state directory"
	}
	one.Remedy = "sudo gpu-exporter doctor"
	if h.root() {
		one.Remedy = "add CAP_SYS_PTRACE (systemd: CapabilityBoundingSet=; containers: --cap-add SYS_PTRACE)"
	}
	return []Finding{one}
}

func processes(_ context.Context, h *host) []Finding {
	if h.fsErr != nil {
		return []Finding{{
			Check: "procfs", Level: Problem, Found: h.fsErr.Error(),
			Consequence: "the exporter does not start: it can't tell who is behind a PID",
			Remedy:      "run it on the host, or in a container with --pid=host; or --path.procfs=DIR for the host's /proc",
		}}
	}
	found := []Finding{ok("procfs", h.fs.Root()+" is of the initial PID namespace")}
	switch hides := h.fs.HidesProcesses(); {
	case hides && !h.trace:
		found = append(found, Finding{
			Check: "procfs.hidepid", Level: h.unlessRoot(Problem), Found: h.fs.Root() + " is mounted with hidepid",
			Consequence: "other people's processes can't be seen: their users and workloads are not known",
			Remedy:      "run as root with CAP_SYS_PTRACE, or: mount -o remount,hidepid=0 " + h.fs.Root(),
		})
	case hides:
		found = append(found, ok("procfs.hidepid", h.fs.Root()+" is mounted with hidepid: people see their own processes only; the exporter sees all, and shows them through gwho who holds what"))
	default:
		found = append(found, ok("procfs.hidepid", "processes are not hidden"))
	}
	return found
}

func cgroups(_ context.Context, h *host) []Finding {
	const dir = "/sys/fs/cgroup"
	var found []Finding
	if h.fs != nil && !h.fs.InitialCgroupNamespace() {
		found = append(found, Finding{
			Check: "cgroups.namespace", Level: Problem, Found: "not in the host's cgroup namespace, or it can't be told",
			Consequence: "paths of cgroups begin at our own: containers, jobs and services are not recognised",
			Remedy:      "run on the host, or in a container with --cgroupns=host",
		})
	} else if h.fs != nil {
		found = append(found, ok("cgroups.namespace", "in the host's cgroup namespace"))
	}
	mounted := func(path string) bool {
		var stat unix.Statfs_t
		return unix.Statfs(path, &stat) == nil && (stat.Type == unix.CGROUP_SUPER_MAGIC || stat.Type == unix.CGROUP2_SUPER_MAGIC)
	}
	unified := dir
	switch {
	case mounted(dir):
		found = append(found, ok("cgroups.version", "cgroup v2"))
	case mounted(dir + "/unified"):
		found = append(found, ok("cgroups.version", "cgroup v1 and v2 (hybrid)"))
		unified = ""
	case mounted(dir+"/memory") || mounted(dir+"/systemd"):
		found = append(found, ok("cgroups.version", "cgroup v1"))
		unified = ""
	default:
		return append(found, Finding{
			Check: "cgroups.version", Level: Warning, Found: "no cgroups are mounted on " + dir,
			Consequence: "what containers and services use beside their GPUs is counted by process",
			Remedy:      "in a container: -v /sys/fs/cgroup:/sys/fs/cgroup:ro",
		})
	}
	if unified == "" {
		return found
	}
	text, err := os.ReadFile(unified + "/cgroup.subtree_control")
	if err != nil {
		return found // a container's own root has it, everybody may read it
	}
	var lacking []string
	for _, controller := range []string{"memory", "io"} {
		if !slices.Contains(strings.Fields(string(text)), controller) {
			lacking = append(lacking, controller)
		}
	}
	if len(lacking) > 0 {
		found = append(found, Finding{
			Check: "cgroups.controllers", Level: Warning, Found: "not in use: " + strings.Join(lacking, ", "),
			Consequence: "what containers and services use of it is counted by process",
			Remedy:      "DefaultMemoryAccounting=yes and DefaultIOAccounting=yes in /etc/systemd/system.conf, then: systemctl daemon-reexec",
		})
	}
	return found
}

func kernel(context.Context, *host) []Finding {
	var name unix.Utsname
	_ = unix.Uname(&name) // an empty release is shown as that
	release := unix.ByteSliceToString(name.Release[:])
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return []Finding{{
			Check: "kernel", Level: Warning, Found: fmt.Sprintf("Linux %s gives no pidfd (%v)", release, err),
			Consequence: "ends of processes are noticed by reading /proc: dearer, and no less right",
			Remedy:      "Linux 5.3 or later; in a container, a seccomp profile that allows pidfd_open",
		}}
	}
	unix.Close(fd)
	namespaces := "no user namespaces"
	if text, err := os.ReadFile("/proc/sys/user/max_user_namespaces"); err == nil && strings.TrimSpace(string(text)) != "0" {
		namespaces = "user namespaces (rootless containers)"
	}
	return []Finding{ok("kernel", "Linux "+release+", pidfd, "+namespaces)}
}

func clock(context.Context, *host) []Finding {
	var timex unix.Timex
	state, err := unix.Adjtimex(&timex)
	switch {
	case err != nil:
		return []Finding{{
			Check: "clock", Level: Warning, Found: fmt.Sprintf("whether the clock is synchronised can't be told: %v", err),
			Consequence: "none known", Remedy: "chronyc tracking, or timedatectl",
		}}
	case state == unix.TIME_ERROR || timex.Status&unix.STA_UNSYNC != 0:
		return []Finding{{
			Check: "clock", Level: Warning, Found: "the clock is not synchronised",
			Consequence: "usage is booked at a wrong time; a clock that is set ahead loses the time between, and rows in the future are refused by the ledger",
			Remedy:      "timedatectl set-ntp true, or: apt install chrony",
		}}
	}
	return []Finding{ok("clock", "synchronised, within "+time.Duration(timex.Maxerror*1000).Round(time.Millisecond).String())}
}

const (
	// mostAsked accounts are looked up.
	mostAsked = 20
	mostSeen  = 1 << 15
	// slowLookup is a name service that makes names late.
	slowLookup = time.Second
)

// accounts asks the name service about people who run something now.
func accounts(ctx context.Context, h *host) []Finding {
	uids := people(h)
	if !slices.Contains(uids, h.uid) {
		uids = append([]int{h.uid}, uids...)
	}
	uids = uids[:min(len(uids), mostAsked)]
	var nameless, failures []string
	slowest := time.Duration(0)
	for _, uid := range uids {
		begun := time.Now()
		_, err, hung := within(ctx, func() (*user.User, error) { return user.LookupId(strconv.Itoa(uid)) })
		slowest = max(slowest, time.Since(begun))
		var unknown user.UnknownUserIdError
		switch {
		case hung:
			return []Finding{{
				Check: "accounts", Level: Problem, Found: fmt.Sprintf("the name service does not answer for uid %d (waited %v)", uid, slowest.Round(time.Millisecond)),
				Consequence: "people appear as numbers until it does; readings go on",
				Remedy:      "time getent passwd " + strconv.Itoa(uid) + "; systemctl restart sssd (or nscd, nslcd)",
			}}
		case errors.As(err, &unknown):
			nameless = append(nameless, strconv.Itoa(uid))
		case err != nil:
			failures = append(failures, err.Error())
		}
	}
	found := []Finding{}
	switch {
	case len(failures) > 0:
		found = append(found, Finding{
			Check: "accounts", Level: Problem, Found: "the name service fails: " + failures[0],
			Consequence: "people appear as numbers", Remedy: "getent passwd " + strconv.Itoa(uids[0]),
		})
	case len(nameless) > 0:
		found = append(found, Finding{
			Check: "accounts", Level: Warning, Found: "no account has uid " + strings.Join(nameless, ", ") + ", which runs processes now",
			Consequence: "shown as uid:" + nameless[0],
			Remedy:      "getent passwd " + nameless[0] + "; in a container, give it the host's name service",
		})
	case slowest > slowLookup:
		found = append(found, Finding{
			Check: "accounts", Level: Warning, Found: fmt.Sprintf("the name service took %v for one account", slowest.Round(time.Millisecond)),
			Consequence: "names come late, and time up to then may stand under a number",
			Remedy:      "cache accounts: sssd, nscd",
		})
	default:
		found = append(found, ok("accounts", "the name service answers, and knows "+counted(len(uids), "user")+" of those who run something"))
	}
	if file, err := os.Open("/etc/subuid"); err == nil {
		file.Close()
		found = append(found, ok("accounts.subuid", "/etc/subuid can be read"))
	} else {
		found = append(found, Finding{
			Check: "accounts.subuid", Level: Warning, Found: err.Error(),
			Consequence: "whose a process in a user namespace is can't be told by its uid",
			Remedy:      "in a container: -v /etc/subuid:/etc/subuid:ro; without rootless containers nothing",
		})
	}
	return found
}

// within makes a call that knows nothing of ctx, and leaves it alone if it does
// not return in time.
func within[T any](ctx context.Context, call func() (T, error)) (value T, err error, hung bool) {
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	go func() {
		value, err := call()
		done <- outcome{value, err}
	}()
	select {
	case o := <-done:
		return o.value, o.err, false
	case <-ctx.Done():
		return value, ctx.Err(), true
	}
}

// people are the uids of ordinary users who run processes, sorted.
func people(h *host) []int {
	if h.fs == nil {
		return nil
	}
	pids, err := h.fs.PIDs()
	if err != nil {
		return nil
	}
	seen := map[int]bool{}
	for _, pid := range pids[:min(len(pids), mostSeen)] {
		info, err := os.Stat(filepath.Join(h.fs.Root(), strconv.Itoa(int(pid))))
		if err != nil {
			continue
		}
		if stat, is := info.Sys().(*syscall.Stat_t); is && h.config.Owner.Human(int64(stat.Uid)) {
			seen[int(stat.Uid)] = true
		}
	}
	uids := make([]int, 0, len(seen))
	for uid := range seen {
		uids = append(uids, uid)
	}
	slices.Sort(uids)
	return uids
}
