package accounting_test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"testing"

	"golang.org/x/crypto/bcrypt"

	"gpuledger/exporter/who"
	"gpuledger/lab/labtest"
)

// otherAddress is a free address of this machine that others could reach.
func otherAddress(t *testing.T) string {
	t.Helper()
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if ip, ok := a.(*net.IPNet); ok && !ip.IP.IsLoopback() && ip.IP.To4() != nil {
			listener, err := net.Listen("tcp", ip.IP.String()+":0")
			if err != nil {
				t.Fatal(err)
			}
			defer listener.Close()
			return listener.Addr().String()
		}
	}
	labtest.Missing(t, "a network interface beside loopback")
	return ""
}

// Who holds what on all nodes is for everyone on this machine, and elsewhere for
// those who prove who they are; a site may close it.
func TestWhoMaySeeTheNodes(t *testing.T) {
	exporter := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"version":1,"node":"gpu01"}`)
	}))
	t.Cleanup(exporter.Close)
	secret, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	basic := []string{"Authorization", "Basic " + base64.StdEncoding.EncodeToString([]byte("ops:secret"))}
	bearer := []string{"Authorization", "Bearer " + token}
	both := append([]string{"X-Gpuledger-Token", token}, basic...)
	overSocket := func(socket string) *http.Client {
		return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
	}
	collect := "collect: {interval: 1h, targets: [\"" + exporter.URL + "\"]}\n"
	for name, c := range map[string]struct {
		access, users string
		loopback      int // nothing given
		elsewhere     int
		password      int // elsewhere, with basic auth
		proof         int // elsewhere, with a token and whatever else is needed
	}{
		"open":              {"access: {tokens_file: tokens}\n", "", 200, 401, 401, 200},
		"closed":            {"access: {tokens_file: tokens, open_live: false}\n", "", 401, 401, 401, 200},
		"open, passwords":   {"access: {tokens_file: tokens, open_live: true}\n", "basic_auth_users: {ops: \"" + string(secret) + "\"}\n", 401, 401, 200, 200},
		"closed, passwords": {"access: {tokens_file: tokens, open_live: false}\n", "basic_auth_users: {ops: \"" + string(secret) + "\"}\n", 401, 401, 200, 200},
	} {
		t.Run(name, func(t *testing.T) {
			address, socket := otherAddress(t), filepath.Join(t.TempDir(), "s")
			base := serve(t, collect+c.access, c.users, "unix://"+socket, address)
			elsewhere, proof := "http://"+address+who.NodesPath, bearer
			if c.users != "" {
				proof = both
			}
			expect := func(what string, want int, client *http.Client, url string, header ...string) {
				t.Helper()
				code, text := get(t, client, url, header...)
				var nodes who.Nodes
				if code == http.StatusOK && (json.Unmarshal([]byte(text), &nodes) != nil || len(nodes.Nodes) != 1 || nodes.Nodes[0].Node != "gpu01") || code != want {
					t.Errorf("%s: %d, want %d: %s", what, code, want, text)
				}
			}
			expect("loopback", c.loopback, http.DefaultClient, base+who.NodesPath)
			loopback, err := url.Parse(base)
			if err != nil {
				t.Fatal(err)
			}
			rebound := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", loopback.Host)
			}}}
			expect("loopback, under another's name", http.StatusUnauthorized, rebound, "http://evil.example"+who.NodesPath)
			expect("elsewhere", c.elsewhere, http.DefaultClient, elsewhere)
			expect("elsewhere, as another says", c.elsewhere, http.DefaultClient, elsewhere, "X-Forwarded-For", "127.0.0.1", "Host", "localhost")
			expect("a password", c.password, http.DefaultClient, elsewhere, basic...)
			expect("a token", c.proof, http.DefaultClient, elsewhere, proof...)
			expect("an admin's socket", http.StatusOK, overSocket(socket), "http://x"+who.NodesPath)
			expect("a parameter", http.StatusBadRequest, overSocket(socket), "http://x"+who.NodesPath+"?user=alice")
		})
	}
}
