-- +goose Up

-- SHA-256 of a quarantined row's key, so that all rows with one key are found.
-- Lines that are no row have none.
ALTER TABLE quarantine ADD COLUMN row_key BLOB;

CREATE INDEX quarantine_row_key ON quarantine (row_key) WHERE row_key IS NOT NULL;
