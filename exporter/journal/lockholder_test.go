package journal

import (
	"os"
	"path/filepath"
	"testing"
)

func TestLockHolder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	holder := func() int {
		t.Helper()
		pid, err := LockHolder(path)
		if err != nil {
			t.Fatal(err)
		}
		return pid
	}
	if pid := holder(); pid != 0 {
		t.Errorf("a lock that is not there is held by %d", pid)
	}
	file, err := takeLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if pid := holder(); pid != os.Getpid() {
		t.Errorf("held by %d, want %d", pid, os.Getpid())
	}
	file.Close()
	if pid := holder(); pid != 0 {
		t.Errorf("a lock let go of is held by %d", pid)
	}
}

func TestLockHolderInText(t *testing.T) {
	const text = "1: POSIX  ADVISORY  WRITE 5 00:1b:77 0 EOF\n2: FLOCK  ADVISORY  WRITE 708 00:1b:77 0 EOF\n2: -> FLOCK  ADVISORY  WRITE 709 00:1b:77 0 EOF\nrubbish\n3: FLOCK ADVISORY READ 9 103:05:5 0 EOF\n"
	if pid := lockHolder(text, 0x1b, 77); pid != 708 {
		t.Errorf("held by %d, want 708", pid)
	}
	if pid := lockHolder(text, 0x1b, 78); pid != 0 {
		t.Errorf("held by %d, want nobody", pid)
	}
}
