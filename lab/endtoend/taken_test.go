package endtoend

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"gpuledger/exporter/suspects"
	"gpuledger/exporter/who"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// holdDevice starts a process under uid that has the device open: a descriptor
// of its node, for which no driver is needed.
func holdDevice(t *testing.T, uid, major, minor uint32) worker {
	t.Helper()
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root, to make a device node")
	}
	// Not the driver's name: in a container it may have any.
	path := filepath.Join(t.TempDir(), "card")
	if err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(major, minor))); errors.Is(err, unix.EPERM) {
		labtest.Missing(t, "CAP_MKNOD")
	} else if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	command := exec.Command("sleep", "3600")
	command.ExtraFiles = []*os.File{file}
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	end := func() {
		if !ended {
			ended = true
			_ = command.Process.Kill()
			_ = command.Wait()
		}
	}
	t.Cleanup(end)
	return worker{pid: uint32(command.Process.Pid), end: end}
}

// gwhoAs runs gwho under uid with arguments and returns what it prints.
func (n *node) gwhoAs(uid uint32, arguments ...string) string {
	n.t.Helper()
	var output, problems bytes.Buffer
	command := exec.Command(filepath.Join(programs, "gwho"), arguments...)
	command.Env = append(os.Environ(), "GPULAB_SCENARIO="+n.scenarioPath)
	command.Stdout, command.Stderr = &output, &problems
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	if err := command.Run(); err != nil && command.ProcessState.ExitCode() != 3 {
		n.t.Fatalf("gwho %v: %v\n%s%s", arguments, err, &output, &problems)
	}
	return output.String()
}

const (
	takenUID   = 4721
	ownUID     = 4722
	nvidia     = 195
	takenMinor = 231
	emptyMinor = 232
	ownMinor   = 233
)

// takenNode has three cards with memory that no listed process explains: a
// process of one user has the first open, nobody the second, and another user
// the third.
func takenNode(t *testing.T) (*node, worker, worker) {
	t.Helper()
	stranger, own := holdDevice(t, takenUID, nvidia, takenMinor), holdDevice(t, ownUID, nvidia, ownMinor)
	card := func(minor int64) lab.GPU {
		return lab.GPU{Name: "NVIDIA A100-SXM4-80GB", Values: lab.Values{lab.MemoryUsedMiB: 20000, lab.MinorNumber: minor}}
	}
	return newNode(t, "gpu-taken", lab.Scenario{GPUs: []lab.GPU{card(takenMinor), card(emptyMinor), card(ownMinor)}}), stranger, own
}

func suspectsOf(a who.Answer, card int) []who.Suspect {
	return slices.DeleteFunc(slices.Clone(a.Cards[card].Suspects), func(s who.Suspect) bool { return s.Strength == suspects.None })
}

// TestDeviceHeldByAProcessThatNVMLDoesNotList wants the process found, named
// and counted, and said where nobody is left.
func TestDeviceHeldByAProcessThatNVMLDoesNotList(t *testing.T) {
	n, stranger, _ := takenNode(t)
	// A process that has ended and is still listed explains its memory, and keeps its name.
	n.scenario.GPUs = append(n.scenario.GPUs, lab.GPU{Name: "NVIDIA A100-SXM4-80GB", Values: lab.Values{lab.MemoryUsedMiB: 1000}})
	dead := work(t, takenUID) // reaped at the end of the test
	n.scenario.Processes = []lab.Process{{GPU: 3, PID: dead.pid, MemoryBytes: 1000 << 20}}
	n.write()
	n.start()
	if err := unix.Kill(int(dead.pid), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}

	var answer who.Answer
	await(t, "the suspect's name", func() bool {
		answer, _ = n.gwho()
		found := suspectsOf(answer, 0)
		return len(found) == 1 && !found[0].Pending && answer.Cards[1].SuspectsVerdict != who.SuspectsLooking
	})
	s := suspectsOf(answer, 0)[0]
	if s.PID != stranger.pid || s.User != fmt.Sprintf("uid:%d", takenUID) || s.UID == nil || *s.UID != takenUID || s.Command != "sleep" ||
		s.Reason != suspects.ReasonDeviceOpen || s.Strength != suspects.Strong || s.StartedAt == nil || s.CommandLine == nil || *s.CommandLine != "sleep 3600" {
		t.Errorf("suspect %+v", s)
	}
	if c := answer.Cards[0]; c.SuspectsVerdict != who.SuspectsFound || c.Devices[0].Free || len(c.Devices[0].Holders) != 0 {
		t.Errorf("card %+v: a suspect holds nothing, and the card is not free", c)
	}
	if c := answer.Cards[1]; c.SuspectsVerdict != who.SuspectsNobody || len(suspectsOf(answer, 1)) != 0 || !strings.Contains(strings.Join(c.SuspectsRemedies, "\n"), "--gpu-reset -i 1") {
		t.Errorf("card nobody has: %s %s %+v %q", c.SuspectsVerdict, c.SuspectsMessage, c.Suspects, c.SuspectsRemedies)
	}
	await(t, "the end of a listed process", func() bool { answer, _ = n.gwho(); return answer.Cards[3].Devices[0].Holders[0].Zombie })
	if c := answer.Cards[3]; c.SuspectsVerdict != "" || len(c.Devices[0].Holders) != 1 || !c.Devices[0].Holders[0].Zombie || c.Devices[0].Holders[0].User != s.User {
		t.Errorf("card of a zombie: %+v", c)
	}
	text := n.gwhoAs(ownUID, "--socket="+n.socket)
	for _, want := range []string{
		fmt.Sprintf("uid:%d  host  sleep  PID %d  has /dev/nvidia%d open, and NVML does not list it", takenUID, stranger.pid, takenMinor),
		"taken", "19.5 GiB is used by no process that NVML lists", "nvidia-smi --gpu-reset -i 1", "zombie",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("gwho says nothing of %q:\n%s", want, text)
		}
	}
	if strings.Contains(n.gwhoAs(ownUID, "--socket="+n.socket, "-v"), "sleep 3600\n") != true {
		t.Error("gwho -v hides a user's own command line")
	}
	label := fmt.Sprintf("{gpu=\"0\",uuid=\"%s\"}", answer.Cards[0].UUID)
	if got := n.metric("gpu_memory_suspects" + label); got != "1" {
		t.Errorf("gpu_memory_suspects%s is %q", label, got)
	}

	// Once NVML lists it, it is a holder and no suspect.
	n.scenario.Processes = append(n.scenario.Processes, lab.Process{GPU: 0, PID: stranger.pid, MemoryBytes: 100 << 20})
	n.write()
	await(t, "the listing", func() bool {
		answer, _ = n.gwho()
		return len(answer.Cards[0].Devices[0].Holders) == 1
	})
	if len(suspectsOf(answer, 0)) != 0 {
		t.Errorf("holder and suspect at once: %+v", answer.Cards[0].Suspects)
	}
	n.scenario.Processes = n.scenario.Processes[:1]
	n.write()
	await(t, "the suspicion again", func() bool { answer, _ = n.gwho(); return len(suspectsOf(answer, 0)) == 1 })

	stranger.end()
	await(t, "the verdict that nobody is left", func() bool {
		answer, _ = n.gwho()
		return answer.Cards[0].SuspectsVerdict == who.SuspectsNobody
	})
	n.exporter.stop(t)
	for _, row := range n.rows() {
		if row.User != "" && row.GPUUS > 0 && row.Index != 3 && row.User != s.User {
			t.Errorf("a suspect was metered: %+v", row)
		}
	}
}

// TestTakenWithoutExporter wants gwho by itself to find as much as it may see:
// root everybody, a user the own processes.
func TestTakenWithoutExporter(t *testing.T) {
	n, stranger, own := takenNode(t)
	ask := func(uid uint32) who.Answer {
		var answer who.Answer
		text := n.gwhoAs(uid, "--socket=", "--nvml.library-path="+n.library, "--json")
		if err := json.Unmarshal([]byte(text), &answer); err != nil {
			t.Fatalf("%v\n%s", err, text)
		}
		if len(answer.Cards) != 3 {
			t.Fatalf("%d cards", len(answer.Cards))
		}
		return answer
	}
	root := ask(0)
	if found := suspectsOf(root, 0); len(found) != 1 || found[0].PID != stranger.pid || found[0].User != fmt.Sprintf("uid:%d", takenUID) || found[0].CommandLine == nil {
		t.Errorf("root finds %+v", root.Cards[0].Suspects)
	}
	if found := suspectsOf(root, 2); len(found) != 1 || found[0].PID != own.pid {
		t.Errorf("root finds %+v", root.Cards[2].Suspects)
	}
	if root.Cards[1].SuspectsVerdict != who.SuspectsNobody {
		t.Errorf("root: %s", root.Cards[1].SuspectsMessage)
	}
	user := ask(ownUID)
	if c := user.Cards[0]; c.SuspectsVerdict != who.SuspectsHidden || len(c.Suspects) != 0 || !strings.Contains(c.SuspectsMessage, "hidden from us: run gwho as root") {
		t.Errorf("a user finds %q %+v", c.SuspectsMessage, c.Suspects)
	}
	if found := suspectsOf(user, 2); len(found) != 1 || found[0].PID != own.pid || user.Cards[2].SuspectsVerdict != who.SuspectsFound {
		t.Errorf("a user finds %+v of the own", user.Cards[2].Suspects)
	}
}

// TestTakenBehindHidePID wants gwho to say that processes are hidden where the
// kernel does not even count them.
func TestTakenBehindHidePID(t *testing.T) {
	n, _, own := takenNode(t)
	proc := filepath.Join(n.dir, "proc")
	if err := os.Mkdir(proc, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("proc", proc, "proc", 0, "hidepid=2"); err != nil {
		labtest.Missing(t, "a mount of proc with hidepid: "+err.Error())
	}
	t.Cleanup(func() { _ = unix.Unmount(proc, unix.MNT_DETACH) })
	var answer who.Answer
	text := n.gwhoAs(ownUID, "--socket=", "--nvml.library-path="+n.library, "--path.procfs="+proc, "--json")
	if err := json.Unmarshal([]byte(text), &answer); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if c := answer.Cards[0]; c.SuspectsVerdict != who.SuspectsHidden || !strings.Contains(c.SuspectsMessage, "hidepid") {
		t.Errorf("%q %+v", c.SuspectsMessage, c.Suspects)
	}
	if found := suspectsOf(answer, 2); len(found) != 1 || found[0].PID != own.pid {
		t.Errorf("of the own: %+v", answer.Cards[2].Suspects)
	}
}

// TestInAContainerWithoutTheHostsProcesses wants the exporter to refuse, and
// gwho to say that it can't tell, each with what to do.
func TestInAContainerWithoutTheHostsProcesses(t *testing.T) {
	n, _, _ := takenNode(t)
	inside := func(program string, arguments ...string) (string, int) {
		// A PID namespace and a procfs of its own, as in a container.
		script := "mount -t proc proc /proc && exec \"$0\" \"$@\""
		command := exec.Command("sh", append([]string{"-c", script, filepath.Join(programs, program)}, arguments...)...)
		command.Env = append(os.Environ(), "GPULAB_SCENARIO="+n.scenarioPath)
		command.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS, Unshareflags: unix.CLONE_NEWNS}
		output, err := command.CombinedOutput()
		if command.ProcessState == nil {
			labtest.Missing(t, "a PID namespace: "+err.Error())
		}
		return string(output), command.ProcessState.ExitCode()
	}
	output, code := inside("gpu-exporter", "--state.dir="+filepath.Join(n.dir, "state"), "--state.lock="+filepath.Join(n.dir, "lock"), "--socket=", "--nvml.library-path="+n.library)
	if code != 1 || !strings.Contains(output, "--pid=host") {
		t.Errorf("gpu-exporter ended with %d:\n%s", code, output)
	}
	output, code = inside("gwho", "--socket=", "--nvml.library-path="+n.library)
	if code != 3 || !strings.Contains(output, "processes could not be looked at") || !strings.Contains(output, "--pid=host") {
		t.Errorf("gwho ended with %d:\n%s", code, output)
	}
}
