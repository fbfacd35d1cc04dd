package web

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"

	"github.com/gin-gonic/gin"
	"github.com/goccy/go-yaml"

	"gpuledger/exporter/who"
)

// The live view follows the exporter's rules: open to everyone on this machine
// unless it is closed, and elsewhere to those who prove who they are.

// seesAll is the gin key of whether a request is told also of nodes that have
// closed their live view.
const seesAll = "sees all"

// live lets through who may see what is live.
func (a *Access) live(c *gin.Context) {
	c.Header("Cache-Control", "no-store")
	_, admin := a.admin(c.Request)
	if admin || a.openLive && onMachine(c.Request) || verified(c.Request) || a.passedWebConfig(c.Request) {
		c.Set(seesAll, admin)
		return
	}
	c.Header("WWW-Authenticate", `Bearer realm="gpu-accounting"`)
	fail(c, http.StatusUnauthorized, "who holds what is open on this machine itself only, and nowhere if access.open_live is false: otherwise it needs "+
		"a token of access.tokens_file (Authorization: Bearer, or "+TokenHeader+"), a client certificate, a user of the web configuration, or the unix socket as an admin")
}

// verified reports whether the web configuration has demanded a certificate.
func verified(r *http.Request) bool { return r.TLS != nil && len(r.TLS.VerifiedChains) > 0 }

// onMachine reports whether a request came over a unix socket or to a loopback
// address, which only programs on this machine can reach. A browser is such a
// program, so the name it was told to ask counts as well.
func onMachine(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return false
	}
	if local.Network() == "unix" {
		return true
	}
	address, err := netip.ParseAddrPort(local.String())
	return err == nil && address.Addr().Unmap().IsLoopback() && who.LocalHost(r.Host)
}

// passedWebConfig reports whether the web configuration has checked a password:
// it has refused bad ones before this is asked, but without users in it anything
// passes.
func (a *Access) passedWebConfig(r *http.Request) bool {
	name, _, given := r.BasicAuth()
	if local, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr); !given || a.webConfigFile == "" || !ok || local.Network() == "unix" {
		return false
	}
	var file struct {
		Users map[string]string `yaml:"basic_auth_users"`
	}
	text, err := os.ReadFile(a.webConfigFile) // as it is read for each request there
	if err == nil {
		err = yaml.Unmarshal(text, &file)
	}
	if err != nil {
		a.log.Error("Users of the web configuration can't be read", "file", a.webConfigFile, "err", err)
		return false
	}
	_, ok := file.Users[name]
	return ok
}

// nodes answers who holds what on all nodes.
func (o Options) nodes(c *gin.Context) {
	if len(c.Request.URL.RawQuery) > 0 {
		fail(c, http.StatusBadRequest, "there are no parameters: gwho --nodes selects from the whole answer")
		return
	}
	body, err := o.Nodes(c.Request.Context(), c.GetBool(seesAll))
	switch {
	case errors.Is(err, context.Canceled):
		c.Abort() // nobody is there to be told
	case err != nil:
		o.internal(c, err)
	default:
		c.Data(http.StatusOK, "application/json; charset=utf-8", body)
	}
}
