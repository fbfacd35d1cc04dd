package web

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"
)

// TokenHeader carries a token where basic auth already takes the header
// Authorization.
const TokenHeader = "X-Gpuledger-Token"

// tokenOf is the token a request brings.
func tokenOf(r *http.Request) (string, bool) {
	if token := r.Header.Get(TokenHeader); token != "" {
		return token, true
	}
	scheme, token, found := strings.Cut(r.Header.Get("Authorization"), " ")
	if !found || !strings.EqualFold(scheme, "Bearer") {
		return "", false
	}
	token = strings.TrimSpace(token)
	return token, token != ""
}

// tokens is a file of hashed tokens. While the file cannot be read or has an
// error, no token is known: one that was taken out must not live on because
// of a slip elsewhere.
type tokens struct {
	path   string
	logger *slog.Logger

	mu     sync.Mutex
	seen   fileState
	hashes [][sha256.Size]byte
}

// fileState tells whether a file is still the one that was read.
type fileState struct {
	modified time.Time
	size     int64
	inode    uint64
	failed   bool
}

const maxTokensFile = 1 << 20

func (t *tokens) known(token string) bool {
	hash := sha256.Sum256([]byte(token))
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.refresh(); err != nil {
		t.logger.Error("No token is accepted until the tokens file is mended", "err", err)
	}
	// Every hash is compared in full, so that time tells nothing.
	found := 0
	for i := range t.hashes {
		found |= subtle.ConstantTimeCompare(hash[:], t.hashes[i][:])
	}
	return found == 1
}

func (t *tokens) reload() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.refresh()
}

// refresh reads the file if it is another than last time. It returns an error
// once per state of the file.
func (t *tokens) refresh() error {
	var now fileState
	info, err := os.Stat(t.path)
	if err == nil {
		now = fileState{modified: info.ModTime(), size: info.Size()}
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			now.inode = stat.Ino
		}
	} else {
		now = fileState{failed: true}
	}
	if now == t.seen {
		return nil
	}
	t.seen, t.hashes = now, nil
	if err != nil {
		return err
	}
	if info.Mode().Perm()&0o002 != 0 {
		return fmt.Errorf("%s can be written by everyone: chmod o-w it", t.path)
	}
	file, err := os.Open(t.path)
	if err != nil {
		return err
	}
	defer file.Close()
	text, err := io.ReadAll(io.LimitReader(file, maxTokensFile+1))
	if err != nil {
		return fmt.Errorf("read %s: %w", t.path, err)
	}
	if len(text) > maxTokensFile {
		return fmt.Errorf("%s is larger than %d bytes: it takes one line per token", t.path, maxTokensFile)
	}
	hashes, err := parseTokens(text)
	if err != nil {
		return fmt.Errorf("%s: %w", t.path, err)
	}
	t.hashes = hashes
	return nil
}

// parseTokens reads lines "name:sha256 in hex"; empty lines and those that
// begin with # are skipped. Errors name the line, never its text.
func parseTokens(text []byte) ([][sha256.Size]byte, error) {
	var hashes [][sha256.Size]byte
	names := map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		name, digest, found := strings.Cut(line, ":")
		raw, err := hex.DecodeString(digest)
		if !found || name == "" || err != nil || len(raw) != sha256.Size {
			return nil, fmt.Errorf("line %d is not name:sha256 in hex; make one with: printf %%s \"$TOKEN\" | sha256sum", number)
		}
		if names[name] {
			return nil, fmt.Errorf("line %d: the name is there twice", number)
		}
		names[name] = true
		hashes = append(hashes, [sha256.Size]byte(raw))
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return hashes, nil
}
