-- +goose Up

-- Whether some of a row's time is attributed by a step that the site does not
-- trust for billing.
ALTER TABLE final ADD COLUMN review INTEGER NOT NULL DEFAULT 0 CHECK (review IN (0, 1));

ALTER TABLE open ADD COLUMN review INTEGER NOT NULL DEFAULT 0 CHECK (review IN (0, 1));

-- +goose Down

ALTER TABLE open DROP COLUMN review;
ALTER TABLE final DROP COLUMN review;
