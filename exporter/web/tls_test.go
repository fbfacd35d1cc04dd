package web

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"gpuledger/exporter/who"
)

// authority signs certificates.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	a.certificate = &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	a.key, a.certificate = a.sign(t, a.certificate)
	return a
}

func (a *authority) sign(t *testing.T, template *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	signer := a.key
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return key, certificate
}

// leaf writes a certificate and its key, and returns their paths.
func (a *authority) leaf(t *testing.T, dir, name string) (string, string) {
	t.Helper()
	key, certificate := a.sign(t, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{name}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certFile, keyFile := filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	writePEM(t, certFile, "CERTIFICATE", certificate.Raw)
	writePEM(t, keyFile, "EC PRIVATE KEY", der)
	return certFile, keyFile
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func tlsClient(ca *authority, certificates ...tls.Certificate) *http.Client {
	pool := x509.NewCertPool()
	pool.AddCert(ca.certificate)
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: certificates},
	}}
}

func TestClientCertificates(t *testing.T) {
	dir := t.TempDir()
	ca, stranger := newAuthority(t), newAuthority(t)
	ca.leaf(t, dir, "server")
	writePEM(t, filepath.Join(dir, "ca.crt"), "CERTIFICATE", ca.certificate.Raw)
	load := func(a *authority, name string) tls.Certificate {
		certificate, err := tls.LoadX509KeyPair(a.leaf(t, dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return certificate
	}
	collector, other := load(ca, "collector"), load(stranger, "other")
	for mode, c := range map[string]struct {
		config           string
		none, own, alien int // status of usage; 0 for a refused handshake
	}{
		"verified if given": {"  client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.crt\n", 401, 200, 0},
		// Asked for and not verified: whoever wants makes such a certificate.
		"any": {"  client_auth_type: RequireAnyClientCert\n", 0, 401, 401},
		"tls": {"", 401, 401, 401},
	} {
		t.Run(mode, func(t *testing.T) {
			file := filepath.Join(dir, "web.yml")
			if err := os.WriteFile(file, []byte("tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"+c.config), 0o600); err != nil {
				t.Fatal(err)
			}
			r := start(t, func(o *Options) { o.ConfigFile = file; o.ListenAddresses = []string{"127.0.0.1:0", "127.0.0.1:0"} })
			for _, address := range r.addresses {
				for client, want := range map[*http.Client]int{tlsClient(ca): c.none, tlsClient(ca, collector): c.own, tlsClient(ca, other): c.alien} {
					got, body, err := get(client, "https://"+address+UsagePath, nil)
					if err != nil {
						got = 0
					}
					if got != want {
						t.Errorf("usage: %d %s %v, want %d", got, body, err, want)
					}
				}
			}
			// The socket is no affair of the file's.
			expect(t, unixClient(r.socket), "http://exporter"+who.Path, nil, 200, "python3")
		})
	}
}

func TestBasicAuth(t *testing.T) {
	ip := nonLoopback(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "web.yml")
	if err := os.WriteFile(file, []byte("basic_auth_users:\n  prometheus: "+string(hash)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	tokens := tokensFile(t, "collector", "token")
	r := start(t, func(o *Options) {
		o.ConfigFile, o.ListenAddresses = file, []string{ip + ":0"}
		o.Access = AccessConfig{TokensFile: tokens, OpenLive: new(false)}
	})
	base := "http://" + r.addresses[0]
	basic := func(password string) http.Header {
		request := http.Request{Header: http.Header{}}
		request.SetBasicAuth("prometheus", password)
		return request.Header
	}
	both := basic("secret")
	both.Set(TokenHeader, "token")
	expect(t, tcpClient(), base+MetricsPath, nil, 401, "")
	expect(t, tcpClient(), base+MetricsPath, basic("wrong"), 401, "")
	expect(t, tcpClient(), base+MetricsPath, basic("secret"), 200, "metrics")
	expect(t, tcpClient(), base+who.Path, basic("secret"), 200, "python3")
	// Who scrapes may not for that read everybody's history.
	expect(t, tcpClient(), base+UsagePath, basic("secret"), 401, "needs a token")
	expect(t, tcpClient(), base+UsagePath, both, 200, "usage")
}
