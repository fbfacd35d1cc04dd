-- +goose Up

-- Who held what in the last hours is read by bucket, newest first.
CREATE INDEX final_bucket ON final (bucket);

-- +goose Down

DROP INDEX final_bucket;
