package holders

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/gpu"
	"gpuledger/exporter/meter"
)

func keyOf(t *testing.T, r *rig, pid uint32) meter.ProcessKey {
	t.Helper()
	h, err := r.options.FS.Process(pid)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	stat, err := h.Stat()
	if err != nil {
		t.Fatal(err)
	}
	return meter.ProcessKey{PID: pid, StartTicks: stat.StartTicks}
}

// TestAskedProcess wants a process that no card lists to be named while it is
// asked for, through its end as a zombie, and nothing counted of it.
func TestAskedProcess(t *testing.T) {
	needRoot(t)
	r := newRig(t)
	command := exec.Command("sleep", "1000")
	command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 4711, Gid: 4711}, Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	key := keyOf(t, r, uint32(command.Process.Pid))
	another := key
	another.StartTicks-- // had the number before
	refresh := func() { r.Refresh(t.Context(), gpu.Pass{Readings: []gpu.Reading{reading()}}) }

	refresh()
	if _, known := r.Lives(key); known {
		t.Fatal("it is known and nobody asked")
	}
	r.Ask([]meter.ProcessKey{key, another})
	refresh()
	if lives, known := r.Lives(key); !lives || !known {
		t.Fatalf("lives %v, known %v", lives, known)
	}
	if _, known := r.Lives(another); known {
		t.Error("a process of before is taken for the one that has its number")
	}
	if got := r.Attribute(key).Workload; got.User != "alice" || got.UID != 4711 {
		t.Errorf("whose: %+v", got)
	}
	r.clock = r.clock.Add(2 * rememberedFor)
	refresh()
	if info := r.Info(key); info.Command != "sleep" || info.Zombie {
		t.Errorf("%+v", info)
	}
	if err := command.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(20 * time.Second); !r.Info(key).Zombie; refresh() {
		if time.Now().After(deadline) {
			t.Fatal("its end is not noticed")
		}
	}
	if lives, known := r.Lives(key); !lives || !known || r.Attribute(key).Workload.User != "alice" {
		t.Errorf("a zombie: lives %v, known %v, %+v", lives, known, r.Attribute(key))
	}
	_ = command.Wait()
	refresh()
	if lives, known := r.Lives(key); lives || !known {
		t.Errorf("reaped: lives %v, known %v", lives, known)
	}
	if r.Gone() != 0 || r.Hidden() != 0 {
		t.Errorf("%d are counted as gone, %d as hidden", r.Gone(), r.Hidden())
	}
	r.Ask(nil)
	r.clock = r.clock.Add(2 * rememberedFor)
	refresh()
	if _, known := r.Lives(key); known {
		t.Error("it is kept for ever")
	}
}

// TestManyAsked wants every process to have its turn, a few at each pass.
func TestManyAsked(t *testing.T) {
	r := newRig(t)
	var keys []meter.ProcessKey
	for range 2*admitsAtOnce + 1 {
		keys = append(keys, meter.ProcessKey{PID: 1 << 30, StartTicks: 1}) // gone
	}
	command := exec.Command("sleep", "1000")
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = command.Process.Kill(); _ = command.Wait() }()
	last := keyOf(t, r, uint32(command.Process.Pid))
	r.Ask(append(keys, last))
	for pass := 1; ; pass++ {
		r.Refresh(t.Context(), gpu.Pass{})
		if lives, _ := r.Lives(last); lives {
			if pass == 1 {
				t.Error("all were read at one pass")
			}
			return
		}
		if pass > 3 {
			t.Fatal("the last has no turn")
		}
	}
}
