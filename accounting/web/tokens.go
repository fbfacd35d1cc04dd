package web

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"
)

const maxTokensFile = 1 << 20

// roleAdmin sees everything. It is the only role there is.
const roleAdmin = "admin"

// tokens is a file of hashed tokens. While it can't be read, no token is good:
// one that was taken out must not live on because of a slip in another line.
type tokens struct {
	path string
	log  *slog.Logger

	mu       sync.Mutex
	modified time.Time
	size     int64
	holders  map[[sha256.Size]byte]string
	broken   string // the error last logged
}

// holder returns the name of a token's holder.
func (t *tokens) holder(token string) (string, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.refresh(); err != nil {
		t.holders, t.modified = nil, time.Time{}
		if t.broken != err.Error() {
			t.log.Error("No token is accepted until the tokens file is mended", "err", err)
		}
		t.broken = err.Error()
		return "", false
	}
	t.broken = ""
	// What is looked up is a hash: how long that takes says nothing of a token.
	name, ok := t.holders[sha256.Sum256([]byte(token))]
	return name, ok
}

func (t *tokens) load() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.refresh()
}

func (t *tokens) refresh() error {
	file, err := os.Open(t.path)
	if err != nil {
		return fmt.Errorf("access.tokens_file: %w", err)
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return fmt.Errorf("access.tokens_file: %w", err)
	}
	if info.Mode().Perm()&0o002 != 0 {
		return fmt.Errorf("access.tokens_file %s can be written by everyone: chmod o-w it", t.path)
	}
	if info.ModTime().Equal(t.modified) && info.Size() == t.size && t.holders != nil {
		return nil
	}
	text, err := io.ReadAll(io.LimitReader(file, maxTokensFile+1))
	if err != nil {
		return fmt.Errorf("access.tokens_file: %w", err)
	}
	if len(text) > maxTokensFile {
		return fmt.Errorf("access.tokens_file %s has more than %d bytes", t.path, maxTokensFile)
	}
	holders, err := parseTokens(string(text))
	if err != nil {
		return fmt.Errorf("%s:%w", t.path, err)
	}
	t.holders, t.modified, t.size = holders, info.ModTime(), info.Size()
	return nil
}

// parseTokens reads lines NAME:ROLE:SHA256 in hex. Errors name the line and
// never its text: someone may have put a token there as it is.
func parseTokens(text string) (map[[sha256.Size]byte]string, error) {
	holders := map[[sha256.Size]byte]string{}
	number := 0
	for line := range strings.Lines(text) {
		number++
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.Split(line, ":")
		if len(parts) != 3 || parts[0] == "" {
			return nil, fmt.Errorf("%d: not NAME:ROLE:SHA256", number)
		}
		if parts[1] != roleAdmin {
			return nil, fmt.Errorf("%d: the only role so far is %q", number, roleAdmin)
		}
		digest, err := hex.DecodeString(parts[2])
		if err != nil || len(digest) != sha256.Size {
			return nil, fmt.Errorf(`%d: no SHA-256 in hex; make one with: printf %%s "$TOKEN" | sha256sum`, number)
		}
		holders[[sha256.Size]byte(digest)] = parts[0]
	}
	return holders, nil
}
