package holders

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/meter"
	"gpuledger/exporter/owner"
)

func TestOurselves(t *testing.T) {
	r := newRig(t)
	pid := uint32(os.Getpid())
	r.pass(pid)
	info := r.Info(r.key(pid))
	executable, _ := os.Executable()
	if r.key(pid).StartTicks == 0 || info.Evidence.Executable != executable || info.Evidence.ProcessUID != int64(os.Getuid()) ||
		!strings.Contains(info.CommandLine, filepath.Base(executable)) || info.Zombie || !info.FirstListed.Equal(r.clock) ||
		info.StartedAt.IsZero() || time.Since(info.StartedAt) > time.Hour {
		t.Errorf("read %+v", info)
	}
	if r.Gone() != 0 || r.Hidden() != 0 || !r.Collectors()["procfs"].Up {
		t.Errorf("gone %d, hidden %d, %+v", r.Gone(), r.Hidden(), r.Collectors())
	}
}

func TestProcessesOfOtherUsers(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	r := newRig(t)
	alice, nameless, root := sleeper(t, 4711), sleeper(t, 4999), sleeper(t, 0)
	r.pass(alice.pid, nameless.pid, root.pid)
	r.settle(root.pid)
	for _, test := range []struct {
		pid  uint32
		want meter.Workload
	}{
		{alice.pid, meter.Workload{User: "alice", UID: 4711, Kind: "host", AttributedBy: "process_uid"}},
		{nameless.pid, meter.Workload{User: "uid:4999", UID: 4999, Kind: "host", AttributedBy: "process_uid"}},
		{root.pid, meter.Workload{User: "unattributed", UID: -1, Kind: "host", AttributedBy: "none"}},
	} {
		if got := r.Attribute(r.key(test.pid)); got.Workload != test.want || got.Pending {
			t.Errorf("got %+v, want %+v", got, test.want)
		}
	}
}

func TestEndedProcessesKeepTheirIdentity(t *testing.T) {
	r := newRig(t)
	c := sleeper(t, uint32(os.Geteuid()))
	r.pass(c.pid)
	key, before := r.key(c.pid), r.Info(r.key(c.pid))
	workload := r.workload(c.pid)
	c.kill()
	for range 3 {
		r.pass(c.pid)
		if info := r.Info(key); !info.Zombie || r.key(c.pid) != key || r.workload(c.pid) != workload || info.CommandLine != before.CommandLine {
			t.Fatalf("a zombie is %+v", info)
		}
	}
	c.reap()
	for range 3 {
		r.pass(c.pid)
		if info := r.Info(key); info.Zombie || r.key(c.pid) != key || r.workload(c.pid) != workload {
			t.Fatalf("a listed process that has ended is %+v", info)
		}
	}
	if r.Gone() != 1 {
		t.Errorf("%d are gone, want 1 however often it is listed", r.Gone())
	}
	r.turn(c.pid)
	if r.workload(c.pid) != workload {
		t.Error("reading again took the identity away")
	}
}

func TestZombieAtFirstSight(t *testing.T) {
	r := newRig(t)
	c := sleeper(t, uint32(os.Geteuid()))
	c.kill()
	r.pass(c.pid)
	if info := r.Info(r.key(c.pid)); !info.Zombie || r.key(c.pid).StartTicks == 0 || info.Evidence.ProcessUID != int64(os.Geteuid()) {
		t.Errorf("read %+v", info)
	}
}

func TestKilledBetweenListAndRead(t *testing.T) {
	r := newRig(t)
	c := sleeper(t, uint32(os.Geteuid()))
	listed := reading(c.pid)
	c.kill()
	c.reap()
	r.refresh(listed)
	if r.Gone() != 1 || r.Hidden() != 0 {
		t.Errorf("gone %d, hidden %d, want 1 and 0", r.Gone(), r.Hidden())
	}
	if key := r.Keys(listed)[c.pid]; key != (meter.ProcessKey{PID: c.pid}) {
		t.Errorf("key %+v, want one without a start", key)
	}
	if got := r.Attribute(meter.ProcessKey{PID: c.pid}); got.Pending || !got.Workload.Unattributed() || got.Workload.UID != -1 {
		t.Errorf("got %+v", got)
	}
	r.pass(c.pid)
	if r.Gone() != 1 {
		t.Error("counted again while it was listed on")
	}
	r.pass()
	r.pass(c.pid)
	if r.Gone() != 2 {
		t.Errorf("%d are gone; listed anew, it should count anew", r.Gone())
	}
	if !r.Collectors()["procfs"].Up {
		t.Error("a process that has ended is no trouble of procfs")
	}
}

func TestHiddenProcess(t *testing.T) {
	needRoot(t)
	realProc(t)
	dir := shortDir(t)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	proc, binary := filepath.Join(dir, "proc"), filepath.Join(dir, "test")
	if err := os.Mkdir(proc, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", proc, "proc", 0, "hidepid=2"); err != nil {
		missing(t, fmt.Sprintf("to mount proc (%v)", err))
	}
	t.Cleanup(func() {
		if err := unix.Unmount(proc, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	executable, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(executable)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(binary, program, 0o755); err != nil {
		t.Fatal(err)
	}
	command := exec.Command(binary)
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}}
	command.Env = append(os.Environ(), "HOLDERS_TEST=stranger", "HOLDERS_TEST_PROC="+proc, fmt.Sprintf("HOLDERS_TEST_PID=%d", os.Getpid()))
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	var got map[string]any
	if err := json.Unmarshal(output, &got); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	for key, want := range map[string]any{"hidden": 1.0, "gone": 1.0, "keys": 0.0, "up": false, "user": "unattributed"} {
		if got[key] != want {
			t.Errorf("%s is %v, want %v", key, got[key], want)
		}
	}
}

func TestStartedAfterTheReading(t *testing.T) {
	r := newRig(t)
	early := reading()
	// A tick, so that start times can tell the two apart.
	await(t, "a tick", func() bool { return monotonicUS() > early.At.MonotonicUS+20_000 })
	c := sleeper(t, uint32(os.Geteuid()))
	early.Processes = reading(c.pid).Processes
	r.refresh(early)
	if r.Gone() != 1 || r.Keys(early)[c.pid].StartTicks != 0 {
		t.Errorf("a process that started after the reading was taken for the one listed: %+v", r.Keys(early))
	}
	slow := early
	slow.TookUS = monotonicUS() - early.At.MonotonicUS
	r.refresh(slow)
	if r.Keys(slow)[c.pid].StartTicks == 0 {
		t.Error("a process that started while the card was read was refused")
	}
	if r.Keys(early)[c.pid].StartTicks != 0 {
		t.Error("another card's earlier reading is given the newer process")
	}
}

// TestReusedNumber forces the kernel to give a number out again.
func TestReusedNumber(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	first := sleeper(t, 4711)
	r.pass(first.pid)
	old, listed := r.key(first.pid), reading(first.pid)
	r.pass() // unlisted meanwhile
	first.kill()
	first.reap()
	await(t, "a tick", func() bool { return monotonicUS() > listed.At.MonotonicUS+20_000 })
	var second *child
	for range 200 {
		if err := os.WriteFile("/proc/sys/kernel/ns_last_pid", fmt.Append(nil, first.pid-1), 0o644); err != nil {
			missing(t, fmt.Sprintf("ns_last_pid (%v)", err))
		}
		if second = sleeper(t, 4712); second.pid == first.pid {
			break
		}
		second.kill()
		second.reap()
	}
	if second.pid != first.pid {
		missing(t, "a quiet machine, where a number can be given out again")
	}
	r.refresh(listed)
	if got := r.Keys(listed)[first.pid]; got != old {
		t.Errorf("a reading from before the reuse means %+v, want %+v", got, old)
	}
	r.pass(second.pid)
	now := r.key(second.pid)
	if now == old || now.StartTicks == 0 || r.Info(now).Evidence.ProcessUID != 4712 {
		t.Errorf("the reused number is %+v: %+v", now, r.Info(now).Evidence)
	}
	if got := r.Keys(listed)[first.pid]; got != old || r.Info(old).Evidence.ProcessUID != 4711 {
		t.Errorf("the earlier reading now means %+v of uid %d", got, r.Info(old).Evidence.ProcessUID)
	}
}

func TestMoveToAnotherCgroupIsNoticed(t *testing.T) {
	r := newRig(t)
	c := sleeper(t, uint32(os.Geteuid()))
	others := make([]uint32, 7)
	for i := range others {
		others[i] = sleeper(t, uint32(os.Geteuid())).pid
	}
	all := append(others, c.pid)
	outsideSlices(t)
	r.pass(all...)
	if kind := r.workload(c.pid).Kind; kind != meter.KindHost {
		t.Fatalf("kind %s", kind)
	}
	inCgroup(t, c, "/gpuledger-test.service")
	r.turn(all...)
	if got := r.workload(c.pid); got.Kind != meter.KindService || got.Name != "gpuledger-test.service" {
		t.Errorf("after a turn it is %+v", got)
	}
	if got := r.workload(others[0]); got.Kind != meter.KindHost {
		t.Errorf("another process is %+v", got)
	}
}

func TestChangeOfUserAndProgramIsNoticed(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	r := newRig(t)
	command := exec.Command(os.Args[0])
	command.Env = append(os.Environ(), "HOLDERS_TEST=chameleon")
	input, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	output, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c := start(t, 0, command)
	lines := bufio.NewScanner(output)
	expect := func(want string) {
		t.Helper()
		if !lines.Scan() || lines.Text() != want {
			t.Fatalf("it said %q, want %q (%v)", lines.Text(), want, lines.Err())
		}
	}
	expect("ready")
	r.pass(c.pid)
	key := r.key(c.pid)
	if got := r.workload(c.pid); !got.Unattributed() {
		t.Fatalf("as root it is %+v", got)
	}
	_, _ = io.WriteString(input, "\n")
	expect("setuid")
	r.turn(c.pid)
	if got := r.workload(c.pid); got.User != "alice" || r.key(c.pid) != key {
		t.Errorf("after setuid it is %+v", got)
	}
	_, _ = io.WriteString(input, "\n")
	await(t, "exec", func() bool {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c.pid))
		return string(comm) == "sleep\n"
	})
	r.clock = r.clock.Add(readWholeWithin)
	r.pass(c.pid)
	if info := r.Info(key); info.Command != "sleep" || info.CommandLine != "sleep 3600" || filepath.Base(info.Evidence.Executable) == filepath.Base(os.Args[0]) {
		t.Errorf("after exec it is %+v", info)
	}
}

// Whatever comes and goes, nothing that lives waits longer than a turn.
func TestEverythingIsReadInTurn(t *testing.T) {
	for _, interval := range []time.Duration{100 * time.Millisecond, time.Second, 3 * time.Second} {
		t.Run(interval.String(), func(t *testing.T) { readInTurn(t, interval) })
	}
}

func readInTurn(t *testing.T, interval time.Duration) {
	r := newRig(t)
	var alive []*child
	for i := range 60 {
		for range i * 7 % 5 {
			alive = append(alive, sleeper(t, uint32(os.Geteuid())))
		}
		if len(alive) > 12 {
			for _, c := range alive[i%3 : i%3+5] {
				c.kill()
				c.reap()
			}
			alive = append(alive[:i%3], alive[i%3+5:]...)
		}
		pids := make([]uint32, len(alive))
		for i, c := range alive {
			pids[i] = c.pid
		}
		r.clock = r.clock.Add(interval)
		r.pass(pids...)
		r.nobodyIsLate(interval)
		if len(r.Table.turn) > len(r.processes) {
			t.Fatalf("pass %d: %d take turns of %d known", i, len(r.Table.turn), len(r.processes))
		}
	}
}

// The last of ten would come at 12 s if passes of 3 s each read three.
func TestNobodyIsLateForCoarsePasses(t *testing.T) {
	r := newRig(t)
	pids := make([]uint32, 10)
	for i := range pids {
		pids[i] = sleeper(t, uint32(os.Geteuid())).pid
	}
	for range 20 {
		r.clock = r.clock.Add(3 * time.Second)
		r.pass(pids...)
		r.nobodyIsLate(3 * time.Second)
	}
}

// nobodyIsLate looks ahead to the next pass.
func (r *rig) nobodyIsLate(interval time.Duration) {
	r.t.Helper()
	for _, p := range r.processes {
		if age := r.clock.Add(interval).Sub(p.readAt); p.handle != nil && age > rereadWithin {
			r.t.Fatalf("by the next pass a process was last read %v ago", age)
		}
	}
}

func TestUnlistedForAWhile(t *testing.T) {
	r := newRig(t)
	c := sleeper(t, uint32(os.Geteuid()))
	r.pass(c.pid)
	key, first := r.key(c.pid), r.clock
	r.clock = r.clock.Add(rememberedFor)
	r.pass()
	if r.Info(key).FirstListed != first {
		t.Error("forgotten before its time: an interval may still ask for it")
	}
	r.pass(c.pid)
	if r.key(c.pid) != key || r.Info(key).FirstListed != first {
		t.Error("listed again, it is taken for another")
	}
	r.clock = r.clock.Add(rememberedFor + time.Second)
	r.pass()
	if info := r.Info(key); info.Command != "" || len(r.processes) != 0 || len(r.current) != 0 {
		t.Errorf("still remembered after a minute: %+v", info)
	}
	r.pass(c.pid)
	if r.key(c.pid) != key || r.Info(key).FirstListed != r.clock {
		t.Error("it was not read anew")
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestDescriptorsComeBack(t *testing.T) {
	r := newRig(t)
	pids := make([]uint32, 50)
	for i := range pids {
		pids[i] = sleeper(t, uint32(os.Geteuid())).pid
	}
	runtime.GC()
	before := descriptors(t)
	for range 200 { // 10,000 processes come and are forgotten
		r.clock = r.clock.Add(rememberedFor + time.Second)
		r.pass(pids...)
		if len(r.processes) != len(pids) {
			t.Fatalf("%d known", len(r.processes))
		}
		r.clock = r.clock.Add(rememberedFor + time.Second)
		r.pass()
	}
	if after := descriptors(t); after > before || len(r.processes) != 0 {
		t.Errorf("%d descriptors after 10,000 forgotten processes, %d before; %d are known", after, before, len(r.processes))
	}
	for range 100 { // and these end, while listed or not, as zombies or reaped
		var all []*child
		for range 4 {
			all = append(all, sleeper(t, uint32(os.Geteuid())))
		}
		r.pass(all[0].pid, all[1].pid, all[2].pid)
		all[0].kill()
		all[1].kill()
		all[1].reap()
		all[3].kill()
		r.pass(all[0].pid, all[1].pid, all[3].pid)
		all[2].kill()
		all[2].reap()
		r.pass(all[3].pid)
		for _, c := range all {
			c.kill()
			c.reap()
		}
		r.clock = r.clock.Add(time.Second)
		r.pass()
	}
	r.clock = r.clock.Add(rememberedFor + time.Second)
	r.pass()
	runtime.GC() // os/exec keeps a pidfd of its own until the process is reaped
	if after := descriptors(t); after > before || len(r.processes) != 0 || len(r.Table.turn) > 4 {
		t.Errorf("%d descriptors after churn, %d before; %d known, %d take turns", after, before, len(r.processes), len(r.Table.turn))
	}
	r.pass(pids...)
	r.Close()
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors after Close, %d before", after, before)
	}
}

// An account whose name can't be had at first is named once it can, though
// nobody says that it can, and though nobody waits for it any more.
func TestNameThatComesLate(t *testing.T) {
	needRoot(t)
	outsideSlices(t)
	r := newRig(t)
	status := owner.AccountWaiting
	r.owner.Accounts.NameOf = func(uint32) (string, owner.AccountStatus) {
		if status == owner.AccountFound {
			return "dora", status
		}
		return "", status
	}
	c := sleeper(t, 4713)
	r.pass(c.pid)
	key := r.key(c.pid)
	if got := r.Attribute(key); !got.Pending || got.Workload.User != "uid:4713" {
		t.Errorf("while it is looked up: %+v", got)
	}
	r.clock = r.clock.Add(lookupPatience)
	r.pass(c.pid)
	if got := r.Attribute(key); got.Pending || got.Workload.User != "uid:4713" {
		t.Errorf("when the patience is over: %+v", got)
	}
	status = owner.AccountUnknown
	r.turn(c.pid)
	if got := r.Attribute(key); got.Pending || got.Workload.User != "uid:4713" {
		t.Errorf("without a name: %+v", got)
	}
	status = owner.AccountFound
	r.turn(c.pid)
	if got := r.Attribute(key); got.Pending || got.Workload.User != "dora" {
		t.Errorf("once it has a name: %+v", got)
	}
}

func BenchmarkRefresh(b *testing.B) {
	if testing.Short() {
		b.Skip("starts processes")
	}
	for _, count := range []int{200, 1600} {
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			r := newRig(b)
			pids := make([]uint32, count)
			for i := range pids {
				pids[i] = sleeper(b, uint32(os.Geteuid())).pid
			}
			r.pass(pids...)
			b.ReportAllocs()
			for b.Loop() {
				r.clock = r.clock.Add(time.Second)
				r.pass(pids...)
			}
		})
	}
}
