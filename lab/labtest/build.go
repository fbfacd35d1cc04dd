// Package labtest gives tests the stand-in NVML library: built once, whichever
// package asks first.
package labtest

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"gpuledger/lab"
)

// Profiles are the driver generations that the library is built for. The
// default one is 550.
var Profiles = []string{"470", "535.54", "535", "550", "580"}

// BuildLibrary builds the stand-in library and returns the path of its
// libnvidia-ml.so.1, which exports what a 550 driver does. The folder serves as
// LD_LIBRARY_PATH.
//
// Without make or a C compiler the test is skipped, or fails where CI is true.
func BuildLibrary(t testing.TB) string {
	t.Helper()
	return BuildProfile(t, "550")
}

// BuildProfile is BuildLibrary for one of Profiles: what that driver lacks is
// absent from the library.
func BuildProfile(t testing.TB, profile string) string {
	t.Helper()
	for _, tool := range []string{"make", "cc", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			Missing(t, tool)
		}
	}
	mod, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		t.Fatalf("go env GOMOD: %v", err)
	}
	source := filepath.Join(filepath.Dir(strings.TrimSpace(string(mod))), "lab", "nvml")
	build := filepath.Join(os.TempDir(), "gpuledger-lab-"+digest(t, source))
	if err := os.MkdirAll(build, 0o755); err != nil {
		t.Fatalf("lab library: %v", err)
	}
	// Packages are tested side by side: one builds, the others wait.
	lock, err := os.OpenFile(filepath.Join(build, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		t.Fatalf("lab library: %v", err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatalf("lab library: lock: %v", err)
	}
	if out, err := exec.Command("make", "-s", "-C", source, "BUILD="+build).CombinedOutput(); err != nil {
		t.Fatalf("make -C %s: %v\n%s", source, err, out)
	}
	return filepath.Join(build, profile, "libnvidia-ml.so.1")
}

// digest names a build by its sources.
func digest(t testing.TB, source string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(source, "*"))
	if err != nil {
		t.Fatalf("lab library: %v", err)
	}
	h := sha256.New()
	for _, f := range files {
		if st, err := os.Stat(f); err != nil || !st.Mode().IsRegular() {
			continue
		}
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatalf("lab library: %v", err)
		}
		h.Write([]byte(filepath.Base(f)))
		h.Write(text)
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// Write puts a scenario into a folder of the test's own and returns its path,
// the value of GPULAB_SCENARIO.
func Write(t testing.TB, s lab.Scenario) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "scenario")
	if err := s.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// Environ is the environment of a process that sees the scenario through the
// library: this process's own, and two variables more.
func Environ(library, scenario string) []string {
	return append(os.Environ(), "LD_LIBRARY_PATH="+filepath.Dir(library), "GPULAB_SCENARIO="+scenario)
}

// Missing ends a test that needs something this machine doesn't have: a skip,
// or a failure where CI is true, so that a gap there is seen.
func Missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatalf("needs %s", what)
	}
	t.Skipf("needs %s", what)
}
