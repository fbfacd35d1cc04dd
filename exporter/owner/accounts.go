package owner

import (
	"context"
	"errors"
	"log/slog"
	"os/user"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"gpuledger/exporter/procfs/text"
)

// AccountStatus says what a look-up of an account is worth.
type AccountStatus uint8

const (
	// AccountUnknown is an account that does not exist.
	AccountUnknown AccountStatus = iota
	// AccountFound is an account that exists.
	AccountFound
	// AccountWaiting is one whose look-up has not come back, or failed for a
	// reason that says nothing about the account.
	AccountWaiting
)

// Accounts looks names up without ever blocking.
type Accounts struct {
	// NameOf returns the name of the account with uid.
	NameOf func(uid uint32) (string, AccountStatus)
	// UIDOf returns the uid of the account called name.
	UIDOf func(name string) (uint32, AccountStatus)
	// HomeOf returns the uid and the home directory of the account called name.
	HomeOf func(name string) (uid uint32, home string, status AccountStatus)
	// SubIDOwners returns to whom /etc/subuid lends a uid: names or numbers of
	// accounts, as they stand there.
	SubIDOwners func(uid uint32) ([]string, AccountStatus)
}

func (a Accounts) nameOf(uid uint32) (string, AccountStatus) {
	if a.NameOf == nil {
		return "", AccountUnknown
	}
	return a.NameOf(uid)
}

func (a Accounts) uidOf(name string) (uint32, AccountStatus) {
	if a.UIDOf == nil {
		return 0, AccountUnknown
	}
	return a.UIDOf(name)
}

func (a Accounts) homeOf(name string) (uint32, string, AccountStatus) {
	if a.HomeOf == nil {
		return 0, "", AccountUnknown
	}
	return a.HomeOf(name)
}

func (a Accounts) subIDOwners(uid uint32) ([]string, AccountStatus) {
	if a.SubIDOwners == nil {
		return nil, AccountUnknown
	}
	return a.SubIDOwners(uid)
}

const (
	accountLife      = 10 * time.Minute
	unknownLife      = time.Minute
	accountRetry     = 5 * time.Second
	accountPatience  = 30 * time.Second // a look-up that hangs longer is reported
	maxAccounts      = 65536
	maxAccountBytes  = 256
	maxHomeBytes     = 4096
	accountLookupers = 16 // that many look-ups may hang before the others wait
)

// HostAccounts knows the accounts of the host's name service (NSS), from
// memory. Directory services can take long or hang, so they are asked by
// goroutines of their own.
type HostAccounts struct {
	logger     *slog.Logger
	now        func() time.Time
	lookupID   func(string) (*user.User, error)
	lookupName func(string) (*user.User, error)
	generation atomic.Uint64
	wanted     chan accountKey
	subIDs     *subIDs

	mutex    sync.Mutex
	accounts map[accountKey]*account
	failing  int // accounts whose last look-up failed
}

// accountKey is a uid, or a name if name is not empty.
type accountKey struct {
	uid  uint32
	name string
}

type account struct {
	uid     uint32
	name    string
	home    string
	status  AccountStatus
	askAt   time.Time
	asking  bool
	askedAt time.Time
	failure string // why the last look-up said nothing of the account
}

// NewHostAccounts returns accounts that answer once Run runs.
func NewHostAccounts(logger *slog.Logger) *HostAccounts {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	return &HostAccounts{logger: logger, now: time.Now, lookupID: user.LookupId, lookupName: user.Lookup,
		subIDs: newSubIDs(DefaultSubUIDPath), wanted: make(chan accountKey, 1024), accounts: map[accountKey]*account{}}
}

// Accounts are the functions for Config.
func (h *HostAccounts) Accounts() Accounts {
	return Accounts{NameOf: h.nameOf, UIDOf: h.uidOf, HomeOf: h.homeOf, SubIDOwners: h.subIDs.owners}
}

// Generation grows whenever an answer may have changed.
func (h *HostAccounts) Generation() uint64 { return h.generation.Load() }

// Failure is why accounts cannot be looked up; empty while they can.
func (h *HostAccounts) Failure() string {
	h.mutex.Lock()
	defer h.mutex.Unlock()
	for _, a := range h.accounts {
		if a.failure != "" {
			return a.failure
		}
		if a.asking && h.now().Sub(a.askedAt) > accountPatience {
			return "the host's name service does not answer"
		}
	}
	return ""
}

func (h *HostAccounts) nameOf(uid uint32) (string, AccountStatus) {
	a := h.get(accountKey{uid: uid})
	return a.name, a.status
}

func (h *HostAccounts) uidOf(name string) (uint32, AccountStatus) {
	if name == "" || len(name) > maxAccountBytes {
		return 0, AccountUnknown
	}
	a := h.get(accountKey{name: name})
	return a.uid, a.status
}

func (h *HostAccounts) homeOf(name string) (uint32, string, AccountStatus) {
	if name == "" || len(name) > maxAccountBytes {
		return 0, "", AccountUnknown
	}
	a := h.get(accountKey{name: name})
	return a.uid, a.home, a.status
}

func (h *HostAccounts) get(key accountKey) account {
	now := h.now()
	h.mutex.Lock()
	defer h.mutex.Unlock()
	a := h.accounts[key]
	if a == nil {
		if len(h.accounts) >= maxAccounts && !h.evict() {
			return account{status: AccountWaiting}
		}
		a = &account{status: AccountWaiting, askAt: now}
		h.accounts[key] = a
	}
	if !a.asking && !now.Before(a.askAt) {
		select {
		case h.wanted <- key:
			a.asking, a.askedAt = true, now
		default:
		}
	}
	return *a
}

// evict makes room. Whoever starts containers can make up names without end:
// they may not drive out those of people.
func (h *HostAccounts) evict() bool {
	for key, a := range h.accounts {
		if !a.asking && a.failure == "" && a.status != AccountFound {
			delete(h.accounts, key)
		}
	}
	return len(h.accounts) < maxAccounts
}

// Run looks up what is wanted until ctx ends. A look-up that hangs inside the
// name service is left behind: it cannot be called back. /etc/subuid is read
// beside them.
func (h *HostAccounts) Run(ctx context.Context) error {
	go h.subIDs.run(ctx, h.logger, func() { h.generation.Add(1) })
	for range accountLookupers {
		go func() {
			for {
				select {
				case <-ctx.Done():
					return
				case key := <-h.wanted:
					h.ask(key)
				}
			}
		}()
	}
	<-ctx.Done()
	return ctx.Err()
}

func (h *HostAccounts) ask(key accountKey) {
	var found *user.User
	var err error
	if key.name != "" {
		found, err = h.lookupName(key.name)
	} else {
		found, err = h.lookupID(strconv.FormatUint(uint64(key.uid), 10))
	}
	var uid uint64
	if err == nil {
		uid, err = strconv.ParseUint(found.Uid, 10, 32)
	}
	var unknownID user.UnknownUserIdError
	var unknownName user.UnknownUserError
	unknown := errors.As(err, &unknownID) || errors.As(err, &unknownName)

	now := h.now()
	h.mutex.Lock()
	a := h.accounts[key] // one that is being asked for is never evicted
	before := *a
	failing := h.failing
	a.asking, a.failure = false, ""
	switch {
	case err == nil:
		a.uid, a.name, a.status, a.askAt = uint32(uid), text.Clean(found.Username, maxAccountBytes), AccountFound, now.Add(accountLife)
		a.home = ""
		if len(found.HomeDir) <= maxHomeBytes {
			a.home = found.HomeDir
		}
	case unknown:
		a.uid, a.name, a.home, a.status, a.askAt = 0, "", "", AccountUnknown, now.Add(unknownLife)
	default:
		// The directory is down: what was known stays, and nothing is taken for
		// unknown.
		a.failure, a.askAt = text.Clean(err.Error(), maxAccountBytes), now.Add(accountRetry)
	}
	if before.failure != "" {
		h.failing--
	}
	if a.failure != "" {
		h.failing++
	}
	failingNow := h.failing
	changed := a.status != before.status || a.name != before.name || a.uid != before.uid || a.home != before.home
	h.mutex.Unlock()
	if changed {
		h.generation.Add(1)
	}
	// One line when it begins and one when it ends, however many accounts are
	// asked for meanwhile.
	switch {
	case failing == 0 && failingNow > 0:
		h.logger.Warn("the host's name service fails; users appear as uid:N meanwhile", "err", err)
	case failing > 0 && failingNow == 0:
		h.logger.Info("the host's name service answers again")
	}
}
