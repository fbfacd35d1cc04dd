package cgroup

import (
	"slices"
	"strings"

	"gpuledger/exporter/procfs/text"
)

// maxText bounds what is read of one file; the kernel's own bound is a page or
// so per line and a dozen lines.
const maxText = 64 << 10

// line is one "hierarchy:controllers:path" of the file.
type line struct {
	path    []string
	systemd bool // the hierarchy that systemd itself keeps: 0:: or name=systemd
	chain   Chain
	score   [4]int
}

// Parse reads the whole text of a /proc/PID/cgroup. It never fails: lines that
// are not understood say nothing.
//
// On a hybrid host any single line may be the only one that knows the
// container or job, so all are read and the one with the deepest recognised
// chain is taken, not that of a fixed controller.
func Parse(content string) Chain {
	if len(content) > maxText {
		content = content[:maxText]
	}
	var lines []line
	var result Chain
	v1, v2, allRoot := false, false, true
	for raw := range strings.SplitSeq(content, "\n") {
		l, hierarchy, ok := parseLine(raw)
		if !ok {
			continue
		}
		if hierarchy == "0" {
			v2 = true
		} else {
			v1 = true
		}
		result.Relative = result.Relative || l.chain.Relative
		allRoot = allRoot && len(l.path) == 0
		lines = append(lines, l)
	}
	if len(lines) == 0 {
		return result
	}
	mode := "v1"
	if v2 && v1 {
		mode = "hybrid"
	} else if v2 {
		mode = "v2"
	}
	if result.Relative {
		mode += "-rel"
	}

	best := -1
	for i := range lines {
		l := &lines[i]
		relative, deleted := l.chain.Relative, l.chain.Deleted
		l.chain = walkPath(l.path, relative)
		l.chain.Relative, l.chain.Deleted = relative, deleted
		l.score = score(*l)
		if best < 0 || slices.Compare(l.score[:], lines[best].score[:]) > 0 {
			best = i
		}
	}
	result = lines[best].chain
	result.Mode = mode
	result.Root = allRoot
	if conflict(lines, result) {
		return Chain{Mode: mode, Relative: result.Relative, Ambiguous: true}
	}
	if !result.HasUID {
		for _, l := range lines {
			if l.systemd && l.chain.HasUID {
				result.UID, result.HasUID, result.UIDElsewhere = l.chain.UID, true, len(result.Levels) > 0
				break
			}
		}
	}
	if !result.Known() {
		result.Levels = guessContainerd(lines)
		result.guess = len(result.Levels) > 0
	}
	return result
}

func parseLine(raw string) (l line, hierarchy string, ok bool) {
	parts := strings.SplitN(strings.TrimSuffix(raw, "\r"), ":", 3)
	if len(parts) != 3 || !digits(parts[0]) {
		return l, "", false
	}
	path := parts[2]
	if !strings.HasPrefix(path, "/") && !strings.HasPrefix(path, "..") {
		return l, "", false
	}
	if path, l.chain.Deleted = strings.CutSuffix(path, " (deleted)"); path == "" {
		return l, "", false
	}
	l.systemd = parts[1] == "" || parts[1] == "name=systemd"
	leading := true
	for segment := range strings.SplitSeq(path, "/") {
		switch {
		case segment == "" || segment == ".":
		case segment == ".." && leading:
			l.chain.Relative = true
		case segment == "..":
			return l, "", false // the kernel never prints this
		default:
			leading = false
			l.path = append(l.path, text.Clean(segment, maxNameBytes)) // users choose names below their slice
		}
	}
	return l, parts[0], true
}

// score orders lines by how much they tell: containers and jobs, then a unit
// that is not everybody's init.scope, then depth, then systemd's own hierarchy.
func score(l line) [4]int {
	var s [4]int
	s[0] = len(l.chain.Levels)
	if l.chain.Unit != "" && l.chain.Unit != initScope {
		s[1] = 2
	} else if l.chain.Unit != "" || l.chain.HasUID || l.chain.Delegated {
		s[1] = 1
	}
	s[2] = len(l.path)
	if l.systemd {
		s[3] = 1
	}
	return s
}

// conflict reports whether another line names a container or job that the best
// chain does not hold. A shorter chain of the same nesting does not conflict.
func conflict(lines []line, best Chain) bool {
	for _, l := range lines {
		for _, level := range l.chain.Levels {
			if level.ID == "" {
				continue
			}
			sameKind, found := false, false
			for _, b := range best.Levels {
				if b.ID == "" || (b.Kind == LevelJob) != (level.Kind == LevelJob) {
					continue
				}
				sameKind = true
				found = found || b.ID == level.ID
			}
			if sameKind && !found {
				return true
			}
		}
	}
	return false
}

// guessContainerd recognises the shape /NAMESPACE/ID of a container that ctr
// started. It is kept apart as a guess: any tool can make such a cgroup.
func guessContainerd(lines []line) []Level {
	var path []string
	for _, l := range lines {
		if len(l.path) == 0 {
			continue
		}
		if len(l.path) != 2 || path != nil && !slices.Equal(path, l.path) {
			return nil
		}
		path = l.path
	}
	if path == nil || notContainerdNamespace[path[0]] || hasUnitSuffix(path[0]) || hasUnitSuffix(path[1]) ||
		!containerdName(path[0]) || !containerdName(path[1]) || hexOnly(path[1]) {
		return nil
	}
	return []Level{{Kind: LevelContainer, System: RuntimeContainerdGuess, ID: path[1]}}
}
