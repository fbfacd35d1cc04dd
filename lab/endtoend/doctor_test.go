package endtoend

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/doctor"
	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// findings are what a doctor said, by check.
type findings map[string]doctor.Finding

// examine runs gpu-exporter doctor as uid and returns its findings and exit
// code.
func (n *node) examine(uid uint32, arguments ...string) (findings, int) {
	n.t.Helper()
	output, code := n.doctor(uid, append([]string{"--json"}, arguments...)...)
	var report struct {
		OK, Warnings, Problems int
		Findings               []doctor.Finding
	}
	if err := json.Unmarshal([]byte(output), &report); err != nil {
		n.t.Fatalf("doctor --json ended with %d: %v\n%s", code, err, output)
	}
	if len(report.Findings) != report.OK+report.Warnings+report.Problems {
		n.t.Errorf("%d findings, counted are %d, %d and %d", len(report.Findings), report.OK, report.Warnings, report.Problems)
	}
	if want := min(report.Problems, 1); code != want {
		n.t.Errorf("exit code %d with %d problems", code, report.Problems)
	}
	found := findings{}
	for _, one := range report.Findings {
		if one.Level != doctor.OK && (one.Consequence == "" || one.Remedy == "") {
			n.t.Errorf("says neither what comes of it nor what to do: %+v", one)
		}
		if found[one.Check].Level != doctor.Problem {
			found[one.Check] = one
		}
	}
	return found, code
}

func (n *node) doctor(uid uint32, arguments ...string) (string, int) {
	n.t.Helper()
	if n.address == "" {
		n.address = freePort(n.t)
	}
	var output, errors bytes.Buffer
	command := exec.Command(filepath.Join(programs, "gpu-exporter"), append([]string{
		"doctor", "--socket=" + n.socket, "--state.dir=" + filepath.Join(n.dir, "state"),
		"--state.lock=" + filepath.Join(n.dir, "lock"), "--web.listen-address=" + n.address, "--nvml.library-path=" + n.library,
	}, arguments...)...)
	command.Env = append(os.Environ(), "GPULAB_SCENARIO="+n.scenarioPath)
	command.Stdout, command.Stderr = &output, &errors
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	begun := time.Now()
	_ = command.Run() // the code says it
	if took := time.Since(begun); took > 25*time.Second {
		n.t.Errorf("doctor took %v", took)
	}
	if errors.Len() > 0 && command.ProcessState.ExitCode() != 2 {
		n.t.Errorf("doctor wrote to standard error: %s", &errors)
	}
	return output.String() + errors.String(), command.ProcessState.ExitCode()
}

// want holds one finding to a level and to words.
func (f findings) want(t *testing.T, check string, level doctor.Level, words ...string) {
	t.Helper()
	one, found := f[check]
	if !found || one.Level != level {
		t.Errorf("%s is %q, want %q: %+v", check, one.Level, level, one)
	}
	for _, word := range words {
		if !strings.Contains(one.Found+one.Remedy, word) {
			t.Errorf("%s does not say %q: %+v", check, word, one)
		}
	}
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		labtest.Missing(t, "root, to run the doctor as others")
	}
}

// configFile writes a configuration.
func (n *node) configFile(text string) string {
	n.t.Helper()
	path := filepath.Join(n.dir, fmt.Sprintf("config-%d.yml", time.Now().UnixNano()))
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		n.t.Fatal(err)
	}
	return "--config.file=" + path
}

// noEngines keeps what runs on the machine of the test out of it.
const noEngines = "runtimes: {docker: []}\n"

// TestDoctorBesideAnExporter examines a node that works, as root and as an
// ordinary user, while its exporter runs.
func TestDoctorBesideAnExporter(t *testing.T) {
	needRoot(t)
	n := newNode(t, "well", lab.Scenario{GPUs: []lab.GPU{
		{}, {Values: lab.Values{lab.PersistenceMode: 0, lab.AccountingMode: 1}}, {Values: lab.Values{lab.AccountingMode: 0}},
	}})
	n.config = noEngines
	n.start()
	pid := fmt.Sprint(n.exporter.Process.Pid)
	config := n.configFile(noEngines)

	asRoot, code := n.examine(0, config)
	if code != 0 {
		t.Errorf("a node that works has problems: %+v", asRoot)
	}
	asRoot.want(t, "configuration", doctor.OK, "is valid")
	asRoot.want(t, "nvml", doctor.OK, "driver 550")
	asRoot.want(t, "nvml.cards", doctor.OK, "all 3 cards")
	asRoot.want(t, "nvml.persistence", doctor.Warning, "GPU 1", "nvidia-smi -pm 1")
	asRoot.want(t, "nvml.accounting", doctor.OK, "off on GPU 0, 2")
	asRoot.want(t, "procfs", doctor.OK)
	asRoot.want(t, "state.lock", doctor.OK, "PID "+pid)
	asRoot.want(t, "state.dir", doctor.OK)
	asRoot.want(t, "listen", doctor.OK, "answers on "+n.address)
	asRoot.want(t, "socket", doctor.OK, "answers on "+n.socket)
	asRoot.want(t, "service", doctor.OK, "PID "+pid)

	asUser, code := n.examine(4733, config)
	if code != 0 {
		t.Errorf("an ordinary user finds problems: %+v", asUser)
	}
	asUser.want(t, "privileges", doctor.Warning, "uid 4733", "sudo")
	asUser.want(t, "nvml.cards", doctor.OK, "all 3 cards")
	asUser.want(t, "state.lock", doctor.OK, "PID "+pid)
	asUser.want(t, "state.dir", doctor.Warning, "root")
	asUser.want(t, "listen", doctor.OK)
	asUser.want(t, "socket", doctor.OK)
	asUser.want(t, "accounts", doctor.Warning, "4733")

	text, code := n.doctor(0, config)
	for _, line := range []string{"ok       nvml ", "warning  nvml.persistence ", "  do:  systemctl enable --now nvidia-persistenced, or: nvidia-smi -pm 1\n", ", 0 problems\n"} {
		if code != 0 || !strings.Contains(text, line) {
			t.Errorf("doctor ended with %d and lacks %q:\n%s", code, line, text)
		}
	}

	// The exporter is not disturbed: the same process meters, and alone.
	if n.metric(`gpu_exporter_child_restarts_total`) != "0" {
		t.Errorf("the exporter's own reader was replaced %s times", n.metric(`gpu_exporter_child_restarts_total`))
	}
	n.exporter.stop(t)
	stopped, _ := n.examine(0, config)
	stopped.want(t, "state.lock", doctor.OK, "no gpu-exporter")
	stopped.want(t, "listen", doctor.OK, "is free")
	stopped.want(t, "socket", doctor.OK, "can be made")
	if _, found := stopped["service"]; found {
		t.Error("there is no service to look at")
	}
}

// TestDoctorFindsFaults puts one fault after another in its way.
func TestDoctorFindsFaults(t *testing.T) {
	needRoot(t)
	n := newNode(t, "ill", lab.Scenario{GPUs: []lab.GPU{{}}})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	socket := func(name string) (*net.UnixListener, string) {
		path := filepath.Join(n.dir, name)
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			t.Fatal(err)
		}
		l.SetUnlinkOnClose(false)
		t.Cleanup(func() { l.Close() })
		return l, path
	}
	_, hung := socket("hung.sock") // connects, and never answers
	closed, dead := socket("dead.sock")
	closed.Close()
	file := filepath.Join(n.dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	engine := func(path string) string { return n.configFile(fmt.Sprintf("runtimes: {docker: [%q]}\n", path)) }
	plain := n.configFile(noEngines)
	for name, test := range map[string]struct {
		arguments []string
		check     string
		words     []string
	}{
		"no library":            {[]string{plain, "--nvml.library-path=/nonexistent/libnvidia-ml.so.1"}, "nvml", []string{"/nonexistent"}},
		"no NVML":               {[]string{plain, "--nvml.library-path=libc.so.6"}, "nvml", []string{"nvmlInit"}},
		"not a procfs":          {[]string{plain, "--path.procfs=" + n.dir}, "procfs", []string{"--pid=host"}},
		"a wrong key":           {[]string{n.configFile("runtimes:\n  dokcer: []\n")}, "configuration", []string{":2:3", "dokcer"}},
		"no configuration":      {[]string{"--config.file=" + n.dir + "/none.yml"}, "configuration", []string{"none.yml"}},
		"state below a file":    {[]string{plain, "--state.dir=" + file + "/state"}, "state.dir", []string{"can't be written"}},
		"somebody's port":       {[]string{plain, "--web.listen-address=" + listener.Addr().String()}, "listen", []string{"in use", "ss -ltnp"}},
		"somebody's socket":     {[]string{plain, "--socket=" + hung}, "socket", []string{"no answer", "ss -lxp"}},
		"a file for a socket":   {[]string{plain, "--socket=" + file}, "socket", []string{"no socket"}},
		"an engine that died":   {[]string{engine(dead)}, "runtimes.docker", []string{"nobody listens", "systemctl restart docker"}},
		"an engine that hangs":  {[]string{engine(hung)}, "runtimes.docker", []string{"does not answer within 3s"}},
		"a file for an engine":  {[]string{engine(file)}, "runtimes.docker", []string{"is no socket"}},
		"another on the socket": {[]string{engine(strange(t, n.dir))}, "runtimes.docker", []string{"not what an engine answers"}},
	} {
		t.Run(name, func(t *testing.T) {
			found, _ := n.examine(0, test.arguments...)
			found.want(t, test.check, doctor.Problem, test.words...)
		})
	}
	n.scenario.GPUs = []lab.GPU{{}, {Values: lab.Values{lab.Lost: 1}}, {}}
	n.scenario.Hangs = []lab.Hang{{GPU: 2, Function: "nvmlDeviceGetMemoryInfo"}}
	n.write()
	lost, _ := n.examine(0, plain)
	lost.want(t, "nvml.cards", doctor.Problem, "1 of 3")
	n.scenario.GPUs, n.scenario.Hangs = []lab.GPU{{}}, nil
	n.write()
	// A socket left behind by an exporter that was killed is none.
	found, _ := n.examine(0, plain, "--socket="+dead)
	found.want(t, "socket", doctor.OK, "left from before")
	if output, code := n.doctor(0, "--bogus"); code != 2 {
		t.Errorf("a wrong flag ends with %d: %s", code, output)
	}
	if output, code := n.doctor(0, "now"); code != 2 {
		t.Errorf("an argument ends with %d: %s", code, output)
	}
	// What could have been made was not.
	for _, name := range []string{"state", "lock"} {
		if _, err := os.Stat(filepath.Join(n.dir, name)); err == nil {
			t.Errorf("the doctor made %s", name)
		}
	}
}

// strange is a socket on which something that is no engine answers.
func strange(t *testing.T, dir string) string {
	t.Helper()
	path := filepath.Join(dir, "strange.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Read(make([]byte, 4096))
			_, _ = c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"))
			c.Close()
		}
	}()
	return path
}

// TestDoctorAndHidepid examines a real procfs that hides processes.
func TestDoctorAndHidepid(t *testing.T) {
	needRoot(t)
	n := newNode(t, "hidden", lab.Scenario{GPUs: []lab.GPU{{}}})
	dir := filepath.Join(n.dir, "proc")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mount("proc", dir, "proc", 0, "hidepid=2"); err != nil {
		labtest.Missing(t, "a procfs that can be mounted with hidepid: "+err.Error())
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) })
	plain := n.configFile(noEngines)
	asRoot, _ := n.examine(0, plain, "--path.procfs="+dir)
	asRoot.want(t, "procfs.hidepid", doctor.OK, "hidepid")
	asUser, _ := n.examine(4733, plain, "--path.procfs="+dir)
	asUser.want(t, "procfs.hidepid", doctor.Warning, "mount -o remount,hidepid=0 "+dir)
}
