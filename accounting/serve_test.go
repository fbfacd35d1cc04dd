package accounting_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"gpuledger/accounting"
	"gpuledger/accounting/ledger/ledgertest"
	"gpuledger/exporter/usage"
)

var (
	start = time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	now   = time.Date(2026, 12, 5, 0, 0, 0, 0, time.UTC)
)

const token = "correct horse battery staple"

func journal(t *testing.T) (rows int, url string) {
	t.Helper()
	var text bytes.Buffer
	encoder := usage.NewEncoder(&text)
	for row := range (ledgertest.Site{Start: start, Buckets: 8, Nodes: 1, CardsPerNode: 2, HoldersPerCard: 2}).Rows() {
		if err := encoder.Encode(&row); err != nil {
			t.Fatal(err)
		}
		rows++
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "Next-Cursor, Complete-Through")
		if r.URL.Query().Get("after") == "" {
			w.Write(text.Bytes())
		}
		w.Header().Set("Next-Cursor", "end")
		w.Header().Set("Complete-Through", "2026-11-01T02:00:00Z")
	}))
	t.Cleanup(server.Close)
	return rows, server.URL
}

// serve starts the daemon and returns the base URL of its TCP listener.
func serve(t *testing.T, yaml, webConfig string, listen ...string) string {
	t.Helper()
	dir := t.TempDir()
	name := filepath.Join(dir, "c.yml")
	sum := sha256.Sum256([]byte(token))
	files := map[string]string{
		name:                          "ledger: {url: \"sqlite:ledger.db\"}\nbilling: {rates: [{name: all, price: \"2.50\"}]}\n" + yaml,
		filepath.Join(dir, "tokens"):  "# tokens\nprometheus:admin:" + hex.EncodeToString(sum[:]) + "\n",
		filepath.Join(dir, "web.yml"): webConfig,
	}
	for name, text := range files {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config, err := accounting.LoadConfig(name)
	if err != nil {
		t.Fatal(err)
	}
	options := accounting.ServeOptions{Listen: append([]string{"127.0.0.1:0"}, listen...), Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }}
	if webConfig != "" {
		options.WebConfigFile = filepath.Join(dir, "web.yml")
	}
	bound := make(chan net.Addr, 2)
	options.OnListen = func(addresses []net.Addr) { bound <- addresses[0] }
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- accounting.Serve(ctx, config, options) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	select {
	case address := <-bound:
		return "http://" + address.String()
	case err := <-done:
		done <- nil
		t.Fatal(err)
		return ""
	}
}

func get(t *testing.T, client *http.Client, url string, header ...string) (int, string) {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	response, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(body)
}

func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestServe(t *testing.T) {
	rows, url := journal(t)
	socket := filepath.Join(t.TempDir(), "accounting.sock")
	base := serve(t, "collect: {interval: 1s, targets: [\""+url+"\"]}\naccess: {tokens_file: tokens}\n", "", "unix://"+socket)
	bearer := []string{"Authorization", "Bearer " + token}
	await(t, "rows", func() bool {
		_, text := get(t, http.DefaultClient, base+"/metrics")
		return strings.Contains(text, "gpu_accounting_rows_inserted_total "+jsonNumber(rows)+"\n")
	})
	t.Run("open paths", func(t *testing.T) {
		for path, want := range map[string]string{"/": "gpu-accounting", "/-/healthy": "healthy", "/-/ready": "ready", "/metrics": "gpu_accounting_target_up{target=\"" + url + "\"} 1"} {
			if code, text := get(t, http.DefaultClient, base+path); code != http.StatusOK || !strings.Contains(text, want) {
				t.Errorf("%s: %d %s", path, code, text)
			}
		}
	})
	t.Run("history and money are closed", func(t *testing.T) {
		for _, path := range []string{"/api/v1/report?month=2026-11", "/api/v1/status"} {
			for name, header := range map[string][]string{
				"nothing": nil, "wrong token": {"Authorization", "Bearer x"}, "no scheme": {"Authorization", token},
				"empty": {"Authorization", "Bearer "}, "the hash": {"Authorization", "Bearer " + hash(token)},
				"proxy header": {"X-Forwarded-User", "root"}, "remote address": {"X-Forwarded-For", "127.0.0.1"},
			} {
				if code, text := get(t, http.DefaultClient, base+path, header...); code != http.StatusUnauthorized || strings.Contains(text, "user0") {
					t.Errorf("%s with %s: %d %s", path, name, code, text)
				}
			}
		}
	})
	t.Run("report", func(t *testing.T) {
		code, text := get(t, http.DefaultClient, base+"/api/v1/report?month=2026-11", bearer...)
		if code != http.StatusOK || !strings.HasPrefix(text, "period,") || !strings.Contains(text, ",charge,") {
			t.Errorf("%d %s", code, text)
		}
		if code, text := get(t, http.DefaultClient, base+"/api/v1/report?month=2026-11&format=json", "X-Gpuledger-Token", token); code != http.StatusOK || !json.Valid([]byte(text)) {
			t.Errorf("%d %s", code, text)
		}
		if code, text := get(t, http.DefaultClient, base+"/api/v1/report?format=table", bearer...); code != http.StatusOK || !strings.Contains(text, "2026-12") {
			t.Errorf("%d %s", code, text)
		}
		for _, query := range []string{"month=2026-13", "format=xml", "mnth=2026-11"} {
			if code, text := get(t, http.DefaultClient, base+"/api/v1/report?"+query, bearer...); code != http.StatusBadRequest || !strings.Contains(text, `"error"`) {
				t.Errorf("%s: %d %s", query, code, text)
			}
		}
	})
	t.Run("status over the unix socket", func(t *testing.T) {
		client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
		code, text := get(t, client, "http://x/api/v1/status")
		var status struct {
			Targets []struct {
				URL        string
				Node       string
				LagSeconds int64 `json:"lag_seconds"`
			}
		}
		if err := json.Unmarshal([]byte(text), &status); err != nil || code != http.StatusOK {
			t.Fatalf("%d %v %s", code, err, text)
		}
		if len(status.Targets) != 1 || status.Targets[0].Node != "gpu01" || status.Targets[0].LagSeconds != int64(now.Sub(start.Add(2*time.Hour)).Seconds()) {
			t.Errorf("%s", text)
		}
	})
	t.Run("metrics are clean", func(t *testing.T) {
		promtool, err := exec.LookPath("promtool")
		if err != nil {
			if os.Getenv("CI") == "true" {
				t.Fatal("promtool is missing")
			}
			t.Skip("promtool is missing")
		}
		_, text := get(t, http.DefaultClient, base+"/metrics")
		for _, family := range []string{"build_info", "target_complete_through_timestamp_seconds", "pull_duration_seconds_bucket", "quarantined_rows", "ledger_size_bytes", "http_requests_total"} {
			if !strings.Contains(text, "\ngpu_accounting_"+family) {
				t.Errorf("%s is missing", family)
			}
		}
		check := exec.Command(promtool, "check", "metrics")
		check.Stdin = strings.NewReader(text)
		if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("promtool: %v\n%s\n%s", err, out, text)
		}
	})
}

func TestBasicAuthOfTheWebConfiguration(t *testing.T) {
	secret, err := bcrypt.GenerateFromPassword([]byte("secret"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	base := serve(t, "access: {tokens_file: tokens}\n", "basic_auth_users: {ops: \""+string(secret)+"\"}\n")
	password := "Basic " + base64.StdEncoding.EncodeToString([]byte("ops:secret"))
	if code, _ := get(t, http.DefaultClient, base+"/metrics", "Authorization", password); code != http.StatusOK {
		t.Errorf("with the password: %d", code)
	}
	if code, _ := get(t, http.DefaultClient, base+"/api/v1/status", "Authorization", password); code != http.StatusUnauthorized {
		t.Errorf("with the password and no token: %d", code)
	}
	if code, _ := get(t, http.DefaultClient, base+"/api/v1/status", "Authorization", password, "X-Gpuledger-Token", token); code != http.StatusOK {
		t.Errorf("with the password and a token: %d", code)
	}
	if code, _ := get(t, http.DefaultClient, base+"/metrics"); code != http.StatusUnauthorized {
		t.Errorf("without a password: %d", code)
	}
	if code, _ := get(t, http.DefaultClient, base+"/api/v1/status", "Authorization", "Bearer "+token); code != http.StatusUnauthorized {
		t.Errorf("with a token and no password: %d", code)
	}
}

func TestTokensFileIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tokens")
	if err := os.WriteFile(path, []byte("a:admin:"+hash(token)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := serve(t, "access: {admins: [], tokens_file: \""+path+"\"}\n", "")
	status := func() int {
		code, _ := get(t, http.DefaultClient, base+"/api/v1/status", "Authorization", "Bearer "+token)
		return code
	}
	if code := status(); code != http.StatusOK {
		t.Fatal(code)
	}
	for _, text := range []string{"b:admin:" + hash("other") + "\n", "a:admin:" + hash(token) + "\nbroken\n", ""} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if code := status(); code != http.StatusUnauthorized {
			t.Errorf("%q: %d", text, code)
		}
	}
	if err := os.WriteFile(path, []byte("a:admin:"+hash(token)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code := status(); code != http.StatusOK {
		t.Error(code)
	}
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if code := status(); code != http.StatusUnauthorized {
		t.Errorf("a file that everyone can write: %d", code)
	}
}

func hash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

func jsonNumber(n int) string {
	text, err := json.Marshal(n)
	if err != nil {
		return ""
	}
	return string(text)
}
