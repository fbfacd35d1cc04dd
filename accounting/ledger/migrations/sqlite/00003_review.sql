-- +goose Up

-- Whether some of the row's time is attributed by a step that the node's site
-- does not trust for billing.
ALTER TABLE usage ADD COLUMN review INTEGER NOT NULL DEFAULT 0;
