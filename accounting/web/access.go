package web

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/user"
	"slices"
	"strconv"
	"strings"

	"github.com/gin-gonic/gin"
	"golang.org/x/sys/unix"
)

// TokenHeader carries a token where basic auth already takes the header
// Authorization.
const TokenHeader = "X-Gpuledger-Token"

// AccessOptions are the rules of Access.
type AccessOptions struct {
	Admins     []string // names of users, or uids
	TokensFile string   // empty for none; read again when it changes
	// CloseLive closes the live view of the nodes to everyone but those who
	// prove who they are.
	CloseLive bool
	// WebConfigFile is the web configuration that the TCP listeners have; empty
	// for none. Its users may see the live view.
	WebConfigFile string
	Log           *slog.Logger
}

// Access decides who may see everybody's history and money: on a unix socket
// the uids of the admins, elsewhere tokens of the role admin and client
// certificates whose common name is an admin's. No address and no header proves
// anything: every user of a server can reach its loopback. What is live is open
// to all of them.
type Access struct {
	admins        []string
	uids          []uint32
	tokens        *tokens
	openLive      bool
	webConfigFile string
	log           *slog.Logger
}

// NewAccess makes the rules.
func NewAccess(o AccessOptions) (*Access, error) {
	log := o.Log
	a := &Access{
		admins: o.Admins, uids: []uint32{uint32(os.Geteuid())}, // who can read the ledger anyway
		openLive: !o.CloseLive, webConfigFile: o.WebConfigFile, log: log,
	}
	for _, name := range o.Admins {
		id := name
		if found, err := user.Lookup(name); err == nil {
			id = found.Uid
		}
		uid, err := strconv.ParseUint(id, 10, 32)
		if err != nil {
			log.Warn("An admin has no account on this machine; the name counts for client certificates only", "admin", name)
			continue
		}
		a.uids = append(a.uids, uint32(uid))
	}
	if o.TokensFile != "" {
		a.tokens = &tokens{path: o.TokensFile, log: log}
		if err := a.tokens.load(); err != nil {
			return nil, err
		}
	}
	return a, nil
}

type peerKey struct{}

// withPeer notes who is behind a connection over a unix socket, as the kernel
// says (SO_PEERCRED in unix(7)).
func withPeer(ctx context.Context, connection net.Conn) context.Context {
	socket, ok := connection.(*net.UnixConn)
	if !ok {
		return ctx
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return ctx
	}
	var peer *unix.Ucred
	if raw.Control(func(fd uintptr) {
		peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}) != nil || err != nil {
		return ctx
	}
	return context.WithValue(ctx, peerKey{}, peer.Uid)
}

// admin reports whether a request proves that it comes from an admin, and who.
func (a *Access) admin(r *http.Request) (string, bool) {
	if uid, ok := r.Context().Value(peerKey{}).(uint32); ok && slices.Contains(a.uids, uid) && uid != overflowUID {
		return "uid " + strconv.FormatUint(uint64(uid), 10), true
	}
	// Chains are verified only where the web configuration demands certificates.
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		if name := r.TLS.VerifiedChains[0][0].Subject.CommonName; name != "" && slices.Contains(a.admins, name) {
			return name, true
		}
	}
	if a.tokens == nil {
		return "", false
	}
	token := r.Header.Get(TokenHeader)
	if token == "" {
		scheme, rest, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		if strings.EqualFold(scheme, "Bearer") {
			token = strings.TrimSpace(rest)
		}
	}
	if token == "" {
		return "", false
	}
	return a.tokens.holder(token)
}

// overflowUID is what the kernel reports for uids that have none in this user
// namespace (user_namespaces(7)): nobody in particular.
const overflowUID = 65534

// admins lets admins through, and nobody else.
func (a *Access) adminsOnly(c *gin.Context) {
	if _, ok := a.admin(c.Request); ok {
		c.Header("Cache-Control", "no-store")
		return
	}
	c.Header("WWW-Authenticate", `Bearer realm="gpu-accounting"`)
	fail(c, http.StatusUnauthorized, "history and money are not public: this needs a token of access.tokens_file (Authorization: Bearer, or "+
		TokenHeader+"), a client certificate of an admin, or the unix socket as an admin")
}
