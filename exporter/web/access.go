package web

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"

	"github.com/goccy/go-yaml"

	"gpuledger/exporter/history"
	"gpuledger/exporter/who"
)

// AccessConfig is the section "access" of the exporter's configuration file.
type AccessConfig struct {
	// TokensFile has a line "name:sha256 in hex" for each token that may read
	// usage. It is read again when it changes.
	TokensFile string `yaml:"tokens_file"`
	// AllowedUIDs may read usage over the unix socket, beside root and the uid
	// the exporter runs as.
	AllowedUIDs []uint32 `yaml:"allowed_uids"`
	// OpenLive says that everyone on the node may see the live view and the
	// metrics; true if not given.
	OpenLive *bool `yaml:"open_live"`
}

// Everything below decides one question: may this request read this? Usage is
// for those who prove who they are; what is live is for everyone on the node.

// peer is what is known of a connection before its first byte.
type peer struct {
	unix bool
	uid  uint32
	// known is whether uid is one person's: the kernel gave it, and it is not
	// the one that stands for everybody it cannot map.
	known bool
}

type peerKey struct{}

// withPeer is the server's ConnContext.
func withPeer(ctx context.Context, c net.Conn) context.Context {
	p := peerOf(c)
	if p.known {
		ctx = who.WithViewer(ctx, who.Peer(p.uid))
	}
	return context.WithValue(ctx, peerKey{}, p)
}

type access struct {
	openLive   bool
	allowed    []uint32
	tokens     *tokens
	configFile string
	logger     *slog.Logger
}

func newAccess(o Options) (*access, error) {
	a := &access{
		openLive:   o.Access.OpenLive == nil || *o.Access.OpenLive,
		allowed:    append([]uint32{0, uint32(os.Geteuid())}, o.Access.AllowedUIDs...),
		configFile: o.ConfigFile,
		logger:     o.Logger,
	}
	if o.Access.TokensFile != "" {
		a.tokens = &tokens{path: o.Access.TokensFile, logger: o.Logger}
		if err := a.tokens.reload(); err != nil {
			return nil, fmt.Errorf("access.tokens_file: %w", err)
		}
	}
	return a, nil
}

// forUsage lets through those who may read everybody's usage.
func (a *access) forUsage(next http.Handler) http.Handler {
	return a.guard(next, func(r *http.Request) bool { return false },
		"usage is not public: it needs a token (Authorization: Bearer, or X-Gpuledger-Token), a client certificate, "+
			"or the unix socket as root, as the exporter's user or as one of access.allowed_uids")
}

// forMetrics lets everybody through while live is open.
func (a *access) forMetrics(next http.Handler) http.Handler {
	return a.guard(next, func(r *http.Request) bool { return a.openLive || a.passedConfigFile(r) },
		"access.open_live is false on this node: metrics need what usage needs (a token, a client certificate or an allowed uid), "+
			"or a user of the web configuration file")
}

// forWho lets everybody on the node through while live is open. From elsewhere
// names of people are for those who prove who they are.
func (a *access) forWho(next http.Handler) http.Handler {
	open := next
	if !a.openLive {
		next = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set(who.ClosedHeader, who.ClosedValue)
			open.ServeHTTP(w, r)
		})
	}
	return a.guard(next, func(r *http.Request) bool { return a.openLive && onNode(r) || a.passedConfigFile(r) },
		"who holds what is open on the node itself only, and nowhere if access.open_live is false: otherwise it needs a token, "+
			"a client certificate, an allowed uid, or a user of the web configuration file")
}

// forHistory lets through whoever the kernel names, while live is open, and
// those who may read everybody's usage. Over TCP, loopback too, nobody is named:
// there it takes proof.
func (a *access) forHistory(next http.Handler) http.Handler {
	known := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, _ := r.Context().Value(peerKey{}).(peer)
		all, _ := a.proven(r)
		next.ServeHTTP(w, r.WithContext(history.WithReader(r.Context(), history.Reader{UID: p.uid, Known: p.known, All: all})))
	})
	return a.guard(known, func(r *http.Request) bool {
		p, _ := r.Context().Value(peerKey{}).(peer)
		return p.known && a.openLive
	}, "history is for people whom the node knows: ask over the unix socket (not while access.open_live is false), "+
		"or with what usage needs (a token, a client certificate or an allowed uid)")
}

func (a *access) guard(next http.Handler, open func(*http.Request) bool, message string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		proven, tried := a.proven(r)
		if proven || open(r) {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Cache-Control", "no-store")
		// Over the unix socket the kernel has said who this is: asking again
		// would not help. Elsewhere a token would.
		status, text := http.StatusUnauthorized, message
		if p, _ := r.Context().Value(peerKey{}).(peer); p.unix && !tried {
			status = http.StatusForbidden
		} else {
			w.Header().Set("WWW-Authenticate", `Bearer realm="gpu-exporter"`)
		}
		if tried {
			text = "this token is not known here; " + message
		}
		who.WriteFailure(w, status, text)
	})
}

// proven reports whether the request may read usage, and whether it brought a
// token that did not help.
func (a *access) proven(r *http.Request) (ok, tried bool) {
	if p, _ := r.Context().Value(peerKey{}).(peer); p.known && slices.Contains(a.allowed, p.uid) {
		return true, false
	}
	// VerifiedChains is empty unless the web configuration demanded a
	// certificate and it was signed by its client CA.
	if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
		return true, false
	}
	token, given := tokenOf(r)
	if !given {
		return false, false
	}
	if a.tokens != nil && a.tokens.known(token) {
		return true, false
	}
	return false, true
}

// passedConfigFile reports whether the web configuration file has made sure
// who this is. It has refused bad passwords before this is asked.
func (a *access) passedConfigFile(r *http.Request) bool {
	p, _ := r.Context().Value(peerKey{}).(peer)
	if a.configFile == "" || p.unix {
		return false // the file is not for the unix socket
	}
	if _, _, given := r.BasicAuth(); !given {
		return false
	}
	// The file is read for every request there, too: without users in it,
	// anything passes for a password.
	text, err := os.ReadFile(a.configFile)
	if err != nil {
		return false
	}
	var file struct {
		Users map[string]string `yaml:"basic_auth_users"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		a.logger.Error("Cannot read users of the web configuration file", "file", a.configFile, "err", err)
		return false
	}
	name, _, _ := r.BasicAuth()
	_, ok := file.Users[name]
	return ok
}

// onNode reports whether the request came over the unix socket or to a
// loopback address, which only programs on this machine can reach. A browser is
// such a program, so the name it was told to ask counts as well.
func onNode(r *http.Request) bool {
	if p, _ := r.Context().Value(peerKey{}).(peer); p.unix {
		return true
	}
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	address, err := netip.ParseAddrPort(local.String())
	return err == nil && address.Addr().Unmap().IsLoopback() && who.LocalHost(r.Host)
}
