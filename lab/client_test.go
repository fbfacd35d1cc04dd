package lab_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"gpuledger/lab"
	"gpuledger/lab/labtest"
)

// answers is what one client saw, by question.
type answers map[string]any

func (a answers) put(question string, value any, ret nvml.Return) {
	if ret != nvml.SUCCESS {
		value = "ret " + strconv.Itoa(int(ret))
	}
	a[question] = value
}

// clients run in processes of their own, because a process can load one NVML
// only and some of them are meant to die.
var clients = map[string]func(answers){
	"world": world, "processes": processes, "mig": mig, "accounting": accounting, "fields": fields, "samples": samples,
	"xid": xid, "init": initOnly, "missing": missing, "grow": grow, "faults": faults, "hang": hang, "overrun": overrun,
	"energy": energy, "lost": lost, "versions": versions,
}

func TestMain(m *testing.M) {
	name := os.Getenv("LAB_TEST_CLIENT")
	if name == "" {
		os.Exit(m.Run())
	}
	a := answers{}
	a["init"] = int(nvml.Init())
	if a["init"] == 0 {
		clients[name](a)
	}
	if err := json.NewEncoder(os.Stdout).Encode(a); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func clientCommand(t *testing.T, name, library, scenario string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	// The race detector would otherwise wait a second before each exit.
	cmd.Env = append(labtest.Environ(library, scenario), "LAB_TEST_CLIENT="+name, "GORACE=atexit_sleep_ms=0")
	var stdout bytes.Buffer
	cmd.Stdout = &stdout
	return cmd, &stdout
}

// ask runs a client and returns its answers.
func ask(t *testing.T, name, library, scenario string) answers {
	t.Helper()
	cmd, stdout := clientCommand(t, name, library, scenario)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("client %s: %v\n%s", name, err, stderr.String())
	}
	a := answers{}
	if err := json.Unmarshal(stdout.Bytes(), &a); err != nil {
		t.Fatalf("client %s: %v", name, err)
	}
	return a
}

// die runs a client that must not live to answer.
func die(t *testing.T, name, library, scenario string) (code int, stderr string) {
	t.Helper()
	cmd, _ := clientCommand(t, name, library, scenario)
	var text bytes.Buffer
	cmd.Stderr = &text
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("client %s lived (%v), it was to die", name, err)
	}
	return exit.ExitCode(), text.String()
}

func handle(a answers, index int) nvml.Device {
	d, ret := nvml.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		a.put("handle", nil, ret)
	}
	return d
}

func world(a answers) {
	n, ret := nvml.DeviceGetCount()
	a.put("count", n, ret)
	version, ret := nvml.SystemGetDriverVersion()
	a.put("driver", version, ret)
	cuda, ret := nvml.SystemGetCudaDriverVersion()
	a.put("cuda", cuda, ret)
	for i := range n {
		d := handle(a, i)
		key := func(s string) string { return fmt.Sprintf("%d %s", i, s) }
		uuid, ret := d.GetUUID()
		a.put(key("uuid"), uuid, ret)
		name, ret := d.GetName()
		a.put(key("name"), name, ret)
		temp, ret := d.GetTemperature(nvml.TEMPERATURE_GPU)
		a.put(key("temp"), temp, ret)
		power, ret := d.GetPowerUsage()
		a.put(key("power"), power, ret)
		fan, ret := d.GetFanSpeed()
		a.put(key("fan"), fan, ret)
		limit, ret := d.GetEnforcedPowerLimit()
		a.put(key("limit"), limit, ret)
		util, ret := d.GetUtilizationRates()
		a.put(key("util"), util.Gpu, ret)
		v1, ret := d.GetMemoryInfo()
		a.put(key("v1 used"), v1.Used>>20, ret)
		v2, ret := d.GetMemoryInfo_v2()
		a.put(key("v2 used"), v2.Used>>20, ret)
		a.put(key("v2 reserved"), v2.Reserved>>20, ret)
		a.put(key("free"), v2.Free>>20, ret)
		pci, ret := d.GetPciInfo()
		a.put(key("bus"), pci.Bus, ret)
		reasons, ret := d.GetCurrentClocksEventReasons()
		a.put(key("reasons"), reasons, ret)
		slow, ret := d.GetTemperatureThreshold(nvml.TEMPERATURE_THRESHOLD_SLOWDOWN)
		a.put(key("slowdown"), slow, ret)
		_, ret = d.GetTotalEnergyConsumption()
		a.put(key("energy"), true, ret)
		ecc, ret := d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
		a.put(key("ecc"), ecc, ret)
	}
}

func pids(list []nvml.ProcessInfo) []string {
	out := []string{}
	for _, p := range list {
		memory := strconv.FormatUint(p.UsedGpuMemory>>20, 10)
		if p.UsedGpuMemory == 1<<64-1 {
			memory = "?"
		}
		out = append(out, fmt.Sprintf("%d:%s:%d", p.Pid, memory, int32(p.GpuInstanceId)))
	}
	return out
}

func processes(a answers) {
	d := handle(a, 0)
	list, ret := d.GetComputeRunningProcesses()
	a.put("compute", pids(list), ret)
	list, ret = d.GetGraphicsRunningProcesses()
	a.put("graphics", pids(list), ret)
	list, ret = d.GetMPSComputeRunningProcesses()
	a.put("mps", pids(list), ret)
}

func mig(a answers) {
	d := handle(a, 0)
	on, _, ret := d.GetMigMode()
	a.put("mode", on, ret)
	n, ret := d.GetMaxMigDeviceCount()
	a.put("max", n, ret)
	util, ret := d.GetUtilizationRates()
	a.put("util", util, ret)
	_, ret = d.GetProcessUtilization(0)
	a.put("process util", nil, ret)
	list, ret := d.GetComputeRunningProcesses()
	a.put("card processes", pids(list), ret)
	power, ret := d.GetPowerUsage()
	a.put("power", power, ret)
	for i := range n {
		m, ret := d.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			a.put("end", i, nvml.SUCCESS)
			break
		}
		key := func(s string) string { return fmt.Sprintf("%d %s", i, s) }
		uuid, ret := m.GetUUID()
		a.put(key("uuid"), uuid, ret)
		name, ret := m.GetName()
		a.put(key("name"), name, ret)
		gi, ret := m.GetGpuInstanceId()
		a.put(key("gi"), gi, ret)
		attributes, ret := m.GetAttributes()
		a.put(key("slices"), attributes.ComputeInstanceSliceCount, ret)
		memory, ret := m.GetMemoryInfo_v2()
		a.put(key("used"), memory.Used>>20, ret)
		a.put(key("total"), memory.Total>>20, ret)
		list, ret := m.GetComputeRunningProcesses()
		a.put(key("processes"), pids(list), ret)
		_, ret = m.GetPowerUsage()
		a.put(key("power"), nil, ret)
		parent, ret := m.GetDeviceHandleFromMigDeviceHandle()
		index, _ := parent.GetIndex()
		a.put(key("parent"), index, ret)
	}
}

func accounting(a answers) {
	d := handle(a, 0)
	mode, ret := d.GetAccountingMode()
	a.put("mode", mode, ret)
	pids, ret := d.GetAccountingPids()
	a.put("pids", pids, ret)
	for _, pid := range pids {
		s, ret := d.GetAccountingStats(uint32(pid))
		a.put(fmt.Sprint(pid), fmt.Sprintf("util %d max %d time %d running %d", s.GpuUtilization, s.MaxMemoryUsage>>20, s.Time, s.IsRunning), ret)
	}
	_, ret = handle(a, 1).GetAccountingPids()
	a.put("off", nil, ret)
}

func fields(a answers) {
	values := []nvml.FieldValue{
		{FieldId: nvml.FI_DEV_MEMORY_TEMP}, {FieldId: nvml.FI_DEV_TOTAL_ENERGY_CONSUMPTION},
		{FieldId: nvml.FI_DEV_NVLINK_BANDWIDTH_C0_TOTAL}, {FieldId: nvml.FI_DEV_POWER_INSTANT},
	}
	ret := handle(a, 0).GetFieldValues(values)
	a.put("call", 0, ret)
	for i, v := range values {
		a.put(fmt.Sprint(i), *(*uint32)(unsafe.Pointer(&v.Value[0])), nvml.Return(v.NvmlReturn))
	}
}

// samples gathers ten rings' worth of per-process records, as a poller does.
func samples(a answers) {
	d := handle(a, 0)
	list, ret := d.GetProcessUtilization(0)
	newest := uint64(0)
	for _, s := range list {
		a.put(fmt.Sprint(s.Pid), s.SmUtil, ret)
		newest = max(newest, s.TimeStamp)
	}
	a.put("ret", len(list), ret)
	_, ret = d.GetProcessUtilization(newest + 1_000_000_000)
	a.put("nothing new", nil, ret)
	valueType, ring, ret := d.GetSamples(nvml.GPU_UTILIZATION_SAMPLES, 0)
	a.put("ring", len(ring), ret)
	a["type"] = int(valueType)
	if len(ring) > 0 {
		a["ring value"] = *(*uint32)(unsafe.Pointer(&ring[0].SampleValue[0]))
	}
	_, _, ret = handle(a, 1).GetSamples(nvml.GPU_UTILIZATION_SAMPLES, 0)
	a.put("idle ring", nil, ret)
	_, ret = handle(a, 1).GetProcessUtilization(0)
	a.put("idle", nil, ret)
}

// xid says on stdout that it is registered, then counts what it is given.
func xid(a answers) {
	set, ret := nvml.EventSetCreate()
	a.put("create", 0, ret)
	d := handle(a, 0)
	a.put("register", 0, d.RegisterEvents(nvml.EventTypeXidCriticalError, set))
	fmt.Fprintln(os.Stderr, "ready")
	got := []string{}
	for range 2 {
		e, ret := set.Wait(20000)
		got = append(got, fmt.Sprintf("%d:%d", ret, e.EventData))
	}
	_, ret = set.Wait(200)
	got = append(got, fmt.Sprint(int(ret)))
	a["events"] = got
}

func initOnly(answers) {}

func missing(a answers) {
	_, ret := handle(a, 0).GetMemoryInfo_v2()
	a.put("memory", 0, ret)
}

func grow(a answers) {
	_, ret := handle(a, 0).GetProcessUtilization(0)
	a.put("ret", 0, ret)
}

func faults(a answers) {
	d := handle(a, 0)
	for i := range 3 {
		power, ret := d.GetPowerUsage()
		a.put(fmt.Sprint(i), power, ret)
	}
	start := time.Now()
	_, ret := d.GetTemperature(nvml.TEMPERATURE_GPU)
	a.put("delayed", time.Since(start) >= 30*time.Millisecond, ret)
	list, ret := d.GetComputeRunningProcesses()
	a.put("list", pids(list), ret)
}

func hang(a answers) {
	fmt.Fprintln(os.Stderr, "ready")
	power, ret := handle(a, 0).GetPowerUsage()
	a.put("power", power, ret)
}

// overrun calls the list with room for two 24-byte entries and a guard behind.
func overrun(a answers) {
	buffer := make([]nvml.ProcessInfo, 2+2)
	buffer[2].Pid = 77
	list, ret := handle(a, 0).GetComputeRunningProcesses()
	a.put("list", pids(list), ret)
}

func energy(a answers) {
	e, ret := handle(a, 0).GetTotalEnergyConsumption()
	a.put("mj", e, ret)
}

func lost(a answers) {
	n, ret := nvml.DeviceGetCount()
	a.put("count", n, ret)
	for i := range n {
		d, ret := nvml.DeviceGetHandleByIndex(i)
		a.put(fmt.Sprintf("%d handle", i), 0, ret)
		if ret == nvml.SUCCESS {
			_, ret = d.GetTemperature(nvml.TEMPERATURE_GPU)
			a.put(fmt.Sprintf("%d temp", i), 0, ret)
		}
	}
}

// versions asks for a struct of a version that there isn't, past go-nvml.
func versions(a answers) {
	l := dl.New("libnvidia-ml.so.1", dl.RTLD_LAZY|dl.RTLD_GLOBAL)
	a["open"] = l.Open() == nil
	for _, name := range []string{"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperatureV", "nvmlDeviceGetComputeRunningProcesses_v3"} {
		a[name] = nvml.Extensions().LookupSymbol(name) == nil
	}
	margin, ret := handle(a, 0).GetMarginTemperature()
	a.put("margin", margin.MarginTemperature, ret)
}

// expect compares the questions named in want.
func expect(t *testing.T, got answers, want map[string]any) {
	t.Helper()
	for q, w := range want {
		if g := fmt.Sprint(got[q]); g != fmt.Sprint(w) {
			t.Errorf("%s: %v, want %v", q, got[q], w)
		}
	}
}

func lines(s ...string) string { return strings.Join(s, "\n") + "\n" }

func text(t *testing.T, s ...string) string {
	t.Helper()
	path := labtest.Write(t, lab.Scenario{})
	if err := os.WriteFile(path, []byte(lines(s...)), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
