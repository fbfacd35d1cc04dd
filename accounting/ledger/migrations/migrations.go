// Package migrations holds the ledger's schema, one folder a dialect.
package migrations

import (
	"embed"
	"io/fs"
)

//go:embed sqlite/*.sql
var files embed.FS

// SQLite returns the migrations of a SQLite ledger.
func SQLite() (fs.FS, error) { return fs.Sub(files, "sqlite") }
