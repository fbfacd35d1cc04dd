package owner

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/user"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// nameService is a stand-in for the host's: what it says can be changed, and it
// can be made to fail or hang.
type nameService struct {
	*HostAccounts
	t     *testing.T
	log   *lockedBuffer
	skip  atomic.Int64 // added to the clock
	asked atomic.Int64

	mutex    sync.Mutex
	accounts map[string]string // uid: name
	err      error
	hang     map[string]chan struct{} // look-ups that wait until it is closed
}

type lockedBuffer struct {
	mutex sync.Mutex
	bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.Buffer.Write(p)
}

func (b *lockedBuffer) text() string {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.Buffer.String()
}

func newNameService(t *testing.T) *nameService {
	log := &lockedBuffer{}
	n := &nameService{
		HostAccounts: NewHostAccounts(slog.New(slog.NewTextHandler(log, nil))), t: t, log: log,
		accounts: map[string]string{"1001": "alice"}, hang: map[string]chan struct{}{},
	}
	n.now = func() time.Time { return time.Now().Add(time.Duration(n.skip.Load())) }
	n.lookupID = func(uid string) (*user.User, error) {
		name, err := n.find(uid, func(u, _ string) bool { return u == uid })
		if err != nil || name == nil {
			number, _ := strconv.Atoi(uid)
			return nil, orUnknown(err, user.UnknownUserIdError(number))
		}
		return name, nil
	}
	n.lookupName = func(name string) (*user.User, error) {
		found, err := n.find(name, func(_, other string) bool { return other == name })
		if err != nil || found == nil {
			return nil, orUnknown(err, user.UnknownUserError(name))
		}
		return found, nil
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = n.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return n
}

func orUnknown(err, unknown error) error {
	if err != nil {
		return err
	}
	return unknown
}

func (n *nameService) find(key string, is func(uid, name string) bool) (*user.User, error) {
	n.asked.Add(1)
	n.mutex.Lock()
	wait := n.hang[key]
	n.mutex.Unlock()
	if wait != nil {
		<-wait
	}
	n.mutex.Lock()
	defer n.mutex.Unlock()
	if n.err != nil {
		return nil, n.err
	}
	for uid, name := range n.accounts {
		if is(uid, name) {
			return &user.User{Uid: uid, Username: name, HomeDir: "/home/" + name}, nil
		}
	}
	return nil, nil
}

func (n *nameService) change(do func()) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	do()
}

// await polls until done says so.
func (n *nameService) await(what string, done func() bool) {
	n.t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !done(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			n.t.Fatalf("not within 20 s: %s", what)
		}
	}
}

func (n *nameService) awaitName(uid uint32, name string, status AccountStatus) {
	n.t.Helper()
	n.await(fmt.Sprintf("uid %d is %q (%d)", uid, name, status), func() bool {
		got, s := n.Accounts().NameOf(uid)
		return got == name && s == status
	})
}

func TestAccountsAreAnsweredFromMemory(t *testing.T) {
	n := newNameService(t)
	if _, status := n.Accounts().NameOf(1001); status != AccountWaiting {
		t.Errorf("the first answer is %d, want waiting: nobody has been asked yet", status)
	}
	n.awaitName(1001, "alice", AccountFound)
	n.await("the uid of alice", func() bool {
		uid, status := n.Accounts().UIDOf("alice")
		return uid == 1001 && status == AccountFound
	})
	asked := n.asked.Load()
	for range 1000 {
		n.Accounts().NameOf(1001)
	}
	if n.asked.Load() != asked {
		t.Error("a known account was asked for again at once")
	}
	generation := n.Generation()
	n.change(func() { n.accounts["1001"] = "alice.new" })
	n.skip.Store(int64(accountLife + time.Second))
	if name, status := n.Accounts().NameOf(1001); name != "alice" || status != AccountFound {
		t.Errorf("while it is asked again the answer is %q (%d), want what was known", name, status)
	}
	n.awaitName(1001, "alice.new", AccountFound)
	if n.Generation() == generation {
		t.Error("a rename did not raise the generation")
	}
}

// An account may be given to another person: the name stays, the uid doesn't.
func TestOneNameWithTwoUIDsOverTime(t *testing.T) {
	n := newNameService(t)
	awaitUID := func(want uint32) {
		t.Helper()
		n.await("the uid of alice", func() bool {
			uid, home, status := n.Accounts().HomeOf("alice")
			again, _ := n.Accounts().UIDOf("alice")
			return uid == want && again == want && home == "/home/alice" && status == AccountFound
		})
	}
	awaitUID(1001)
	n.awaitName(1001, "alice", AccountFound)
	generation := n.Generation()
	n.change(func() { n.accounts = map[string]string{"2001": "alice"} })
	n.skip.Store(int64(accountLife + time.Second))
	awaitUID(2001)
	n.awaitName(1001, "", AccountUnknown)
	n.awaitName(2001, "alice", AccountFound)
	if n.Generation() < generation+3 {
		t.Error("the changes did not raise the generation")
	}
}

func TestUnknownAccountIsRememberedBriefly(t *testing.T) {
	n := newNameService(t)
	n.awaitName(1002, "", AccountUnknown)
	n.change(func() { n.accounts["1002"] = "bob" })
	asked := n.asked.Load()
	n.skip.Store(int64(unknownLife / 2))
	n.Accounts().NameOf(1002)
	if n.asked.Load() != asked {
		t.Error("asked again before the unknown's life was over")
	}
	n.skip.Store(int64(unknownLife + time.Second))
	n.awaitName(1002, "bob", AccountFound)
}

func TestFailureIsNotUnknown(t *testing.T) {
	n := newNameService(t)
	n.awaitName(1001, "alice", AccountFound)
	n.change(func() { n.err = errors.New("input/output error\n") })
	for _, uid := range []uint32{2001, 2002} {
		n.await("the failure is reported", func() bool {
			_, status := n.Accounts().NameOf(uid)
			if status != AccountWaiting {
				t.Fatalf("an account that could not be asked for is %d, want waiting", status)
			}
			return strings.HasPrefix(n.Failure(), "input/output error")
		})
	}
	n.skip.Store(int64(accountLife + time.Second))
	n.await("the known one was asked for again", func() bool {
		name, status := n.Accounts().NameOf(1001)
		if name != "alice" || status != AccountFound {
			t.Fatalf("a failure made alice %q (%d)", name, status)
		}
		n.HostAccounts.mutex.Lock()
		defer n.HostAccounts.mutex.Unlock()
		return n.HostAccounts.accounts[accountKey{uid: 1001}].failure != ""
	})
	n.change(func() { n.err = nil })
	n.skip.Add(int64(accountRetry + time.Second))
	n.awaitName(1001, "alice", AccountFound)
	n.awaitName(2001, "", AccountUnknown)
	n.awaitName(2002, "", AccountUnknown)
	n.await("no failure is left", func() bool { n.Accounts().NameOf(1001); return n.Failure() == "" })
	n.await("the end is logged", func() bool { return strings.Contains(n.log.text(), "answers again") })
	if log := n.log.text(); strings.Count(log, "level=WARN") != 1 || strings.Count(log, "\n") != 2 {
		t.Errorf("the log should have one line for the beginning and one for the end:\n%s", log)
	}
}

func TestHangingLookUpIsInNobodysWay(t *testing.T) {
	n := newNameService(t)
	release := make(chan struct{})
	released := false
	t.Cleanup(func() {
		if !released {
			close(release)
		}
	})
	n.change(func() {
		for i := range accountLookupers - 1 {
			n.hang[strconv.Itoa(3000+i)] = release
		}
	})
	for i := range accountLookupers - 1 {
		if _, status := n.Accounts().NameOf(uint32(3000 + i)); status != AccountWaiting {
			t.Fatalf("status %d, want waiting", status)
		}
	}
	n.awaitName(1001, "alice", AccountFound)
	if failure := n.Failure(); failure != "" {
		t.Errorf("failure %q before the patience is over", failure)
	}
	asked := n.asked.Load()
	n.skip.Store(int64(accountPatience + time.Second))
	n.Accounts().NameOf(3000)
	if !strings.Contains(n.Failure(), "does not answer") {
		t.Errorf("a look-up that hangs is reported as %q", n.Failure())
	}
	if n.asked.Load() != asked {
		t.Error("a second look-up was queued behind one that hangs")
	}
	n.change(func() { n.accounts["3000"] = "carol" })
	released = true
	close(release)
	n.awaitName(3000, "carol", AccountFound)
	n.await("no failure is left", func() bool { return n.Failure() == "" })
}

func TestNamesWithoutEndDoNotDriveOutPeople(t *testing.T) {
	n := newNameService(t)
	n.awaitName(1001, "alice", AccountFound)
	for i := range 2 * maxAccounts {
		n.Accounts().UIDOf("made-up-" + strconv.Itoa(i))
	}
	n.HostAccounts.mutex.Lock()
	size := len(n.HostAccounts.accounts)
	n.HostAccounts.mutex.Unlock()
	if size > maxAccounts {
		t.Errorf("%d accounts are remembered, the bound is %d", size, maxAccounts)
	}
	if name, status := n.Accounts().NameOf(1001); name != "alice" || status != AccountFound {
		t.Errorf("alice became %q (%d)", name, status)
	}
}

func TestNamesFromTheDirectoryAreCleaned(t *testing.T) {
	n := newNameService(t)
	n.change(func() { n.accounts["1003"] = "a\nb\xff" })
	n.await("found", func() bool { _, status := n.Accounts().NameOf(1003); return status == AccountFound })
	if name, _ := n.Accounts().NameOf(1003); name != "a\ufffdb\ufffd" {
		t.Errorf("name %q", name)
	}
	for _, name := range []string{"", strings.Repeat("x", maxAccountBytes+1)} {
		if _, status := n.Accounts().UIDOf(name); status != AccountUnknown {
			t.Errorf("%.10q… is %d, want unknown without asking", name, status)
		}
	}
}

func TestRealNameService(t *testing.T) {
	h := NewHostAccounts(nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = h.Run(ctx) }()
	defer func() { cancel(); <-done }()
	n := &nameService{HostAccounts: h, t: t}
	n.awaitName(0, "root", AccountFound)
	n.awaitName(4_000_000_001, "", AccountUnknown)
}

// The zero Accounts knows nobody and says so.
func TestZeroAccounts(t *testing.T) {
	if name, status := (Accounts{}).nameOf(0); name != "" || status != AccountUnknown {
		t.Errorf("nameOf: %q, %d", name, status)
	}
	if uid, status := (Accounts{}).uidOf("root"); uid != 0 || status != AccountUnknown {
		t.Errorf("uidOf: %d, %d", uid, status)
	}
}
