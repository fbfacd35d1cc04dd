package containerdtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// bareNamespace is the one that ctr and nerdctl use unless told otherwise.
const bareNamespace = "default"

// RunBare starts a container that sleeps outside every pod, as nerdctl run
// --name does: with an id of its own making and the name as an annotation.
func (e *Engine) RunBare(t testing.TB, name string) Container {
	t.Helper()
	e.ctr(t, "images", "import", "--snapshotter", "native", filepath.Join(e.folder, "image.tar"))
	var random [32]byte
	_, _ = rand.Read(random[:]) // it never fails
	id := hex.EncodeToString(random[:])
	e.ctr(t, "run", "--detach", "--snapshotter", "native", "--annotation", "nerdctl/name="+name, Image, id, "/bin/sleep", "1000000")
	t.Cleanup(func() {
		e.ctr(t, "tasks", "delete", "--force", id)
		e.ctr(t, "containers", "delete", id)
	})
	for line := range strings.Lines(e.ctr(t, "tasks", "list")) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == id {
			pid, err := strconv.ParseUint(fields[1], 10, 32)
			if err != nil {
				t.Fatalf("ctr tasks list: %v", err)
			}
			return Container{ID: id, PID: uint32(pid)}
		}
	}
	t.Fatalf("ctr tasks list does not have %s", id)
	return Container{}
}

func (e *Engine) ctr(t testing.TB, arguments ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "ctr", append([]string{"--address", e.Socket, "--namespace", bareNamespace}, arguments...)...)
	output, err := command.CombinedOutput()
	if err != nil {
		t.Fatalf("ctr %s: %v\n%s", strings.Join(arguments, " "), err, output)
	}
	return string(output)
}
