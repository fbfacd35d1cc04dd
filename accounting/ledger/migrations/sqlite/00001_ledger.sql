-- +goose Up

-- What repeats in every row stands once here and has a small number there.
CREATE TABLE node (
    id               INTEGER PRIMARY KEY,
    name             TEXT NOT NULL COLLATE BINARY UNIQUE,
    complete_through INTEGER -- epoch seconds; every row before it has been served
) STRICT;

CREATE TABLE run (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL COLLATE BINARY UNIQUE
) STRICT;

-- The part of a row's key that says which device, and how the card was cut.
CREATE TABLE device (
    id       INTEGER PRIMARY KEY,
    uuid     TEXT NOT NULL COLLATE BINARY,
    slices   INTEGER NOT NULL,
    slice_of INTEGER NOT NULL,
    UNIQUE (uuid, slices, slice_of)
) STRICT;

-- The part of a row's key that says who.
CREATE TABLE holder (
    id       INTEGER PRIMARY KEY,
    state    TEXT NOT NULL COLLATE BINARY CHECK (state IN ('held', 'idle', 'down')),
    username TEXT NOT NULL COLLATE BINARY,
    uid      INTEGER NOT NULL,
    kind     TEXT NOT NULL COLLATE BINARY,
    workload TEXT NOT NULL COLLATE BINARY,
    project  TEXT NOT NULL COLLATE BINARY,
    class    TEXT NOT NULL COLLATE BINARY,
    UNIQUE (username, uid, kind, workload, project, class, state)
) STRICT;

-- What a row says of its device beside the key.
CREATE TABLE placement (
    id         INTEGER PRIMARY KEY,
    node       INTEGER NOT NULL REFERENCES node (id),
    card       TEXT NOT NULL COLLATE BINARY,
    card_index INTEGER NOT NULL,
    model      TEXT NOT NULL COLLATE BINARY,
    profile    TEXT NOT NULL COLLATE BINARY,
    UNIQUE (card, node, card_index, model, profile)
) STRICT;

CREATE TABLE attribution (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL COLLATE BINARY UNIQUE
) STRICT;

-- One entry for each transaction that brought rows. Its number is the point up
-- to which a reader has seen the ledger.
CREATE TABLE ingest (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    at          INTEGER NOT NULL, -- epoch seconds
    source      TEXT NOT NULL COLLATE BINARY,
    inserted    INTEGER NOT NULL DEFAULT 0,
    quarantined INTEGER NOT NULL DEFAULT 0
) STRICT;

-- Rows, in order of time. Once there a row is only ever replaced by a later
-- state of itself.
CREATE TABLE usage (
    bucket             INTEGER NOT NULL, -- epoch seconds
    device             INTEGER NOT NULL REFERENCES device (id),
    holder             INTEGER NOT NULL REFERENCES holder (id),
    run                INTEGER NOT NULL REFERENCES run (id),
    placement          INTEGER NOT NULL REFERENCES placement (id),
    attribution        INTEGER NOT NULL REFERENCES attribution (id),
    ingest             INTEGER NOT NULL REFERENCES ingest (id),
    gpu_us             INTEGER NOT NULL,
    share_us           INTEGER NOT NULL,
    held_us            INTEGER NOT NULL,
    reserved_us        INTEGER NOT NULL,
    active_us          INTEGER NOT NULL,
    active_known_us    INTEGER NOT NULL,
    idle_us            INTEGER NOT NULL,
    memory_kib_seconds INTEGER NOT NULL,
    memory_known_us    INTEGER NOT NULL,
    energy_mj          INTEGER NOT NULL,
    peak_memory_bytes  INTEGER NOT NULL,
    peak_temperature_c INTEGER NOT NULL,
    estimated          INTEGER NOT NULL,
    PRIMARY KEY (bucket, device, holder, run)
) STRICT, WITHOUT ROWID;

-- First and last bucket of a card.
CREATE INDEX usage_placement ON usage (placement, bucket);

-- Rows that are in no sum: kept as they came, with the reason.
CREATE TABLE quarantine (
    id         INTEGER PRIMARY KEY,
    digest     BLOB NOT NULL UNIQUE, -- SHA-256 of reason and row: the same row comes once
    reason     TEXT NOT NULL COLLATE BINARY,
    detail     TEXT NOT NULL COLLATE BINARY,
    node       TEXT NOT NULL COLLATE BINARY, -- as the row says, or empty
    bucket     INTEGER,                      -- epoch seconds, if the row says
    source     TEXT NOT NULL COLLATE BINARY,
    line       TEXT NOT NULL COLLATE BINARY, -- JSON, as on the wire
    first_seen INTEGER NOT NULL              -- epoch seconds
) STRICT;

CREATE TABLE target (
    id            INTEGER PRIMARY KEY,
    url           TEXT NOT NULL COLLATE BINARY UNIQUE,
    node          INTEGER REFERENCES node (id), -- learnt from its first row
    cursor        TEXT NOT NULL COLLATE BINARY DEFAULT '',
    last_success  INTEGER, -- epoch seconds
    last_error    TEXT NOT NULL COLLATE BINARY DEFAULT '',
    last_error_at INTEGER
) STRICT;

-- Ends time in service: of one card, or of all cards of a node.
CREATE TABLE retirement (
    id          INTEGER PRIMARY KEY,
    node        TEXT NOT NULL COLLATE BINARY,
    card        TEXT NOT NULL COLLATE BINARY,
    at          INTEGER NOT NULL, -- epoch seconds, on a quarter hour
    recorded_at INTEGER NOT NULL,
    UNIQUE (node, card, at),
    CHECK ((node = '') <> (card = ''))
) STRICT;

