package runtimes

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Files tells of containers from what an engine leaves on disk.
type Files interface {
	// Container reads what the disk has of one container. The error is
	// ErrNoSuchContainer, ErrNoEngine, or says what can't be read.
	Container(ctx context.Context, id string) (Container, error)
}

// troubledFor is how long after an engine's last trouble the disk is asked
// first: an engine that hangs would take its time over each container.
const troubledFor = 10 * time.Second

// withFiles is an engine whose files are read while it can't be asked.
type withFiles struct {
	Source
	files Files

	mutex     sync.Mutex
	trouble   error
	troubleAt time.Time
}

// WithFiles is source, and while it can't be asked what files tell of its
// containers: beside the engine's error, so that it is asked again.
func WithFiles(source Source, files Files) Source {
	return &withFiles{Source: source, files: files}
}

func (s *withFiles) Container(ctx context.Context, id string) (Container, error) {
	s.mutex.Lock()
	trouble := s.trouble
	if time.Since(s.troubleAt) > troubledFor {
		trouble = nil
	}
	s.mutex.Unlock()
	if trouble != nil {
		if container, err := s.files.Container(ctx, id); err == nil {
			return container, trouble
		}
	}
	container, err := s.Source.Container(ctx, id)
	known := err == nil || errors.Is(err, ErrNoSuchContainer)
	s.mutex.Lock()
	if s.trouble = nil; !known {
		s.trouble, s.troubleAt = err, time.Now()
	}
	s.mutex.Unlock()
	if known {
		return container, err
	}
	if told, fileErr := s.files.Container(ctx, id); fileErr == nil {
		return told, err
	}
	return container, err
}

// readWithin reads a regular file below dir, and never what a link there
// points to outside: the directory may be a user's own.
func readWithin(dir, name string, limit int64) ([]byte, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	file, err := root.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	path := filepath.Join(dir, name)
	if info, err := file.Stat(); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("read %s: not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(file, limit+1))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	if int64(len(data)) > limit {
		return nil, fmt.Errorf("read %s: it is longer than %d bytes", path, limit)
	}
	return data, nil
}

// namesIn are the names in a directory, a bounded number of them; none if it
// is not there.
func namesIn(dir string, limit int) ([]string, error) {
	file, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	names, err := file.Readdirnames(limit)
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	return names, err
}
