package journal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// This file is about a database that is not where it should be: not opened yet
// because the disk is full, or taken away while it is in use (a state directory
// that somebody deletes, moves or mounts over). The kernel keeps a deleted file
// for whoever has it open, so writes to it go well and are lost with the
// process; only a look at the path tells.

// ready opens the database if that could not be done before, and puts it back
// if its file is gone. It needs the lock on writing.
func (j *Journal) ready(ctx context.Context) error {
	if j.writer == nil {
		if err := j.start(ctx); err != nil {
			return err
		}
		j.log.Info("the journal could be opened", "path", j.path)
		return nil
	}
	if j.inPlace() {
		return nil
	}
	if err := j.putBack(ctx); err != nil {
		return fmt.Errorf("%s is gone or was replaced while in use, and can't be written anew yet: %w", j.path, err)
	}
	return nil
}

// inPlace reports whether the open files are the ones that their paths name.
// That a path can't be looked at does not mean that the file is gone.
func (j *Journal) inPlace() bool {
	for suffix, opened := range j.files {
		now, err := os.Stat(j.path + suffix)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || err == nil && !os.SameFile(now, opened) {
			return false
		}
	}
	return true
}

// remember notes which files are open.
func (j *Journal) remember() {
	j.files = map[string]fs.FileInfo{}
	for _, suffix := range []string{"", "-wal"} {
		if opened, err := os.Stat(j.path + suffix); err == nil {
			j.files[suffix] = opened
		}
	}
}

// start opens the database, and begins a new one if it is damaged. After an
// error nothing is open. It needs the lock on writing.
func (j *Journal) start(ctx context.Context) error {
	j.serving.Lock()
	defer j.serving.Unlock()
	err := j.begin(ctx)
	if isCorrupt(err) {
		j.closeDatabase()
		if err = j.moveAside(err); err == nil {
			err = j.begin(ctx)
		}
	}
	if err != nil {
		j.closeDatabase()
		return err
	}
	j.remember()
	return nil
}

// putBack writes all that the open database holds to a new file in the place
// of the one that is gone, and goes on with that. Cursors stay good. A file
// that is there instead is kept beside it.
func (j *Journal) putBack(ctx context.Context) error {
	if err := os.MkdirAll(j.options.Dir, 0o700); err != nil {
		return err
	}
	if err := j.relock(); err != nil {
		return err
	}
	copied := filepath.Join(j.options.Dir, fileName+".copy")
	if err := writeCopy(ctx, j, copied); err != nil {
		return errors.Join(err, removeIfThere(copied))
	}
	j.serving.Lock()
	defer j.serving.Unlock()
	// An error of closing is of the old file: everything in it is in the copy.
	j.closeDatabase()
	found, err := j.renameDatabase("replaced")
	if err == nil {
		err = os.Rename(copied, j.path)
	}
	if err != nil {
		return err
	}
	j.log.Error("the journal's file was deleted, moved or replaced while in use: written anew, nothing is lost; leave --state.dir alone while gpu-exporter runs",
		"path", j.path, "found_instead", found)
	if err := j.openDatabase(ctx); err != nil {
		j.closeDatabase()
		return err
	}
	j.remember()
	return nil
}

// writeCopy makes a copy of the open database that a power failure does not
// take away.
func writeCopy(ctx context.Context, j *Journal, path string) error {
	if err := removeIfThere(path); err != nil {
		return err
	}
	// VACUUM INTO takes an empty file, and leaves its mode as it is.
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer file.Close()
	if _, err := j.writer.ExecContext(ctx, "VACUUM INTO ?", path); err != nil {
		return err
	}
	return file.Sync()
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
