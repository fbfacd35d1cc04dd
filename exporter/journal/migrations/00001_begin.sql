-- +goose Up

-- What the journal knows of itself; one row.
CREATE TABLE journal (
    only       INTEGER PRIMARY KEY CHECK (only = 1),
    id         BLOB    NOT NULL CHECK (length(id) = 16), -- random; where the chain begins
    node       TEXT    NOT NULL,
    boot       TEXT    NOT NULL,           -- boot id of the newest write
    head_seq   INTEGER NOT NULL,           -- the newest final row
    head_chain BLOB    NOT NULL CHECK (length(head_chain) = 16),
    instant_us INTEGER NOT NULL,           -- committed up to here, microseconds since 1970
    open_from  INTEGER NOT NULL,           -- earliest bucket that may still receive rows, seconds since 1970
    pulled_seq INTEGER NOT NULL            -- newest final row that a reader said it has
) STRICT;

-- Rows that never change again, in the order in which they are served.
CREATE TABLE final (
    seq                INTEGER PRIMARY KEY,
    chain              BLOB    NOT NULL CHECK (length(chain) = 16), -- over this row and all before it
    key                BLOB    NOT NULL UNIQUE CHECK (length(key) = 16),
    run                TEXT    NOT NULL,
    node               TEXT    NOT NULL,
    device             TEXT    NOT NULL,
    card               TEXT    NOT NULL,
    "index"            INTEGER NOT NULL,
    model              TEXT    NOT NULL,
    profile            TEXT    NOT NULL,
    slices             INTEGER NOT NULL,
    "of"               INTEGER NOT NULL,
    bucket             INTEGER NOT NULL,   -- seconds since 1970
    state              TEXT    NOT NULL,
    user               TEXT    NOT NULL,
    uid                INTEGER NOT NULL,
    kind               TEXT    NOT NULL,
    workload           TEXT    NOT NULL,
    project            TEXT    NOT NULL,
    class              TEXT    NOT NULL,
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
    estimated          INTEGER NOT NULL CHECK (estimated IN (0, 1)),
    attributed_by      TEXT    NOT NULL
) STRICT;

-- +goose StatementBegin
CREATE TRIGGER final_never_changes BEFORE UPDATE ON final
BEGIN
    SELECT RAISE(ABORT, 'a final row never changes');
END;
-- +goose StatementEnd

-- Rows of buckets that are still open: their numbers grow, nobody is served them.
CREATE TABLE open (
    key                BLOB    PRIMARY KEY CHECK (length(key) = 16),
    run                TEXT    NOT NULL,
    node               TEXT    NOT NULL,
    device             TEXT    NOT NULL,
    card               TEXT    NOT NULL,
    "index"            INTEGER NOT NULL,
    model              TEXT    NOT NULL,
    profile            TEXT    NOT NULL,
    slices             INTEGER NOT NULL,
    "of"               INTEGER NOT NULL,
    bucket             INTEGER NOT NULL,
    state              TEXT    NOT NULL,
    user               TEXT    NOT NULL,
    uid                INTEGER NOT NULL,
    kind               TEXT    NOT NULL,
    workload           TEXT    NOT NULL,
    project            TEXT    NOT NULL,
    class              TEXT    NOT NULL,
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
    estimated          INTEGER NOT NULL CHECK (estimated IN (0, 1)),
    attributed_by      TEXT    NOT NULL
) STRICT, WITHOUT ROWID;

-- The newest final row of each bucket: says at once which is the earliest
-- bucket that a cursor has not been served in full.
CREATE TABLE bucket (
    start    INTEGER PRIMARY KEY,          -- seconds since 1970
    last_seq INTEGER NOT NULL
) STRICT;

CREATE INDEX bucket_last_seq ON bucket (last_seq, start);

-- +goose Down

DROP TABLE bucket;
DROP TABLE open;
DROP TABLE final;
DROP TABLE journal;
