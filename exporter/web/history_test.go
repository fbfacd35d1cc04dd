package web

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"gpuledger/exporter/history"
	"gpuledger/exporter/journal"
	"gpuledger/exporter/usage"
)

// journalHistory is the history of a real journal, in which the uids 4711, 4712
// and 65534 held a card, each with a job of its own.
func journalHistory(t *testing.T) http.Handler {
	t.Helper()
	dir := t.TempDir()
	j, err := journal.Open(context.Background(), journal.Options{Dir: dir, LockPath: filepath.Join(dir, "lock"), Node: "gpu01"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := j.Close(context.Background(), journal.Batch{}); err != nil {
			t.Error(err)
		}
	})
	now := time.Now().UTC()
	bucket := now.Truncate(usage.BucketLength)
	var rows []usage.Row
	for i, uid := range []int64{4711, 4712, 65534} {
		row := usage.Row{
			Key: usage.Key{Run: "r1", Device: "GPU-0", Slices: 1, Of: 1, Bucket: bucket.Add(-time.Duration(i) * usage.BucketLength), State: usage.StateHeld,
				User: fmt.Sprint("user-of-", uid), UID: uid, Kind: "docker", Workload: fmt.Sprint("job-of-", uid), Project: "secret"},
			Node: "gpu01", Card: "GPU-0", Model: "NVIDIA H200", Amounts: usage.Amounts{GPUUS: 1e6, ShareUS: 1e6, HeldUS: 1e6, EnergyMJ: 424242},
		}
		rows = append(rows, row)
	}
	if err := j.Write(context.Background(), journal.Batch{Open: rows[:1], Final: rows[1:], InstantUS: now.UnixMicro(), OpenFrom: bucket}); err != nil {
		t.Fatal(err)
	}
	return history.Handler(j.Back, "gpu01", nil, slog.New(slog.DiscardHandler))
}

// Own rows in full, others' as who and when; everything for root, the allowed
// uids and tokens; nothing for whoever nobody has named.
func TestHistoryIsForPeopleKnown(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	r := start(t, func(o *Options) {
		o.History, o.Access.AllowedUIDs, o.Access.TokensFile = journalHistory(t), []uint32{995, 65534}, tokensFile(t, "report", "secret")
	})
	as := asUser(t, r)
	for _, c := range []struct {
		uid    uint32
		status string
		jobs   string
	}{
		{0, "200", "4711 4712 65534"},
		{995, "200", "4711 4712 65534"},
		{4711, "200", "4711"},
		{4712, "200", "4712"},
		{4713, "200", ""},
		{65534, "403", ""}, // nobody in particular, whatever is held under that number
	} {
		status, body := as(c.uid, history.Path)
		if status != c.status {
			t.Errorf("uid %d: %s %s", c.uid, status, body)
		}
		for _, owner := range []string{"4711", "4712", "65534"} {
			if got, want := strings.Contains(body, `"user-of-`+owner+`"`), c.status == "200"; got != want {
				t.Errorf("uid %d sees who held: %t", c.uid, got)
			}
			if got, want := strings.Contains(body, "job-of-"+owner), strings.Contains(" "+c.jobs+" ", " "+owner+" "); got != want {
				t.Errorf("uid %d sees the job of %s: %t", c.uid, owner, got)
			}
		}
		if got, want := strings.Count(body, "424242"), len(strings.Fields(c.jobs)); got != want {
			t.Errorf("uid %d sees %d amounts, want %d: %s", c.uid, got, want, body)
		}
		if c.status != "200" {
			continue
		}
		var a history.Answer
		if err := json.Unmarshal([]byte(body), &a); err != nil || *a.ViewerUID != int64(c.uid) || a.All != (len(c.jobs) > 6) {
			t.Errorf("uid %d: %v, %+v", c.uid, err, a)
		}
	}
	base := "http://" + r.addresses[0] + history.Path
	expect(t, tcpClient(), base, nil, 401, "history is for people")
	expect(t, tcpClient(), base, http.Header{"X-Forwarded-User": {"root"}, "Authorization": {"Basic cm9vdDpyb290"}}, 401, "history is for people")
	expect(t, tcpClient(), base, http.Header{"Authorization": {"Bearer wrong"}}, 401, "not known here")
	expect(t, tcpClient(), base, http.Header{"Authorization": {"Bearer secret"}}, 200, "job-of-4711")
	expect(t, tcpClient(), base, http.Header{"Authorization": {"Bearer secret"}}, 200, `"viewer_uid":null`)
}

// Where live is closed to people, what was live before is, too.
func TestClosedLiveClosesHistory(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	r := start(t, func(o *Options) { o.History, o.Access.OpenLive = journalHistory(t), new(false) })
	as := asUser(t, r)
	if status, body := as(4711, history.Path); status != "403" {
		t.Errorf("a user: %s %s", status, body)
	}
	if status, body := as(0, history.Path); status != "200" {
		t.Errorf("root: %s %s", status, body)
	}
}

// asUser asks the server over its socket as another uid: this test's program,
// started again.
func asUser(t *testing.T, r *running) func(uid uint32, path string) (status, body string) {
	t.Helper()
	binary := filepath.Join(filepath.Dir(filepath.Dir(r.socket)), "client")
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(binary, self, 0o755); err != nil {
		t.Fatal(err)
	}
	return func(uid uint32, path string) (status, body string) {
		t.Helper()
		command := exec.Command(binary)
		command.Dir = "/"
		command.Env = []string{"WEB_TEST_SOCKET=" + r.socket, "WEB_TEST_PATH=" + path}
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		out, err := command.CombinedOutput()
		if err != nil {
			t.Fatalf("client as %d: %v: %s", uid, err, out)
		}
		status, body, _ = strings.Cut(string(out), "\n")
		return status, body
	}
}
