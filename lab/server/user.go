package server

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// User is one person of the simulated server.
type User struct {
	Name string
	UID  uint32
}

var userName = regexp.MustCompile(`^[a-z_][a-z0-9_-]{0,30}$`)

// ParseUsers reads alice:1001,bob:1002. A bare number is a user without name.
func ParseUsers(text string) ([]User, error) {
	var users []User
	for part := range strings.SplitSeq(text, ",") {
		name, id, named := strings.Cut(strings.TrimSpace(part), ":")
		if !named {
			name, id = "uid"+name, name
		}
		uid, err := strconv.ParseUint(id, 10, 31)
		if err != nil || !userName.MatchString(name) {
			return nil, fmt.Errorf("user %q: want NAME:UID, such as alice:1001", part)
		}
		if uid == 0 {
			return nil, fmt.Errorf("user %q: uid 0 is not a person", part)
		}
		users = append(users, User{Name: name, UID: uint32(uid)})
	}
	return users, nil
}

// accounts are the system users that this run made.
type accounts []string

// create makes the users that the system doesn't know, so that their names
// resolve. A name or uid that belongs to someone else is an error.
func (a *accounts) create(ctx context.Context, users []User) error {
	for _, u := range users {
		passwd, err := os.ReadFile("/etc/passwd")
		if err != nil {
			return fmt.Errorf("create users: %w", err)
		}
		known := false
		for line := range strings.Lines(string(passwd)) {
			f := strings.Split(line, ":")
			if len(f) < 3 || (f[0] != u.Name && f[2] != strconv.Itoa(int(u.UID))) {
				continue
			}
			if f[0] != u.Name || f[2] != strconv.Itoa(int(u.UID)) {
				return fmt.Errorf("create user %s:%d: the system has %s:%s; choose others with --users", u.Name, u.UID, f[0], f[2])
			}
			known = true
		}
		if known {
			continue
		}
		cmd := exec.CommandContext(ctx, "useradd", "--no-create-home", "--no-user-group", "--shell", "/usr/sbin/nologin", "--uid", strconv.Itoa(int(u.UID)), u.Name)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("useradd %s: %w: %s", u.Name, err, strings.TrimSpace(string(out)))
		}
		*a = append(*a, u.Name)
	}
	return nil
}

// remove deletes the users that create made.
func (a *accounts) remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	for _, name := range slices.Backward(*a) {
		if out, err := exec.CommandContext(ctx, "userdel", name).CombinedOutput(); err != nil {
			return fmt.Errorf("userdel %s: %w: %s", name, err, strings.TrimSpace(string(out)))
		}
	}
	*a = nil
	return nil
}
