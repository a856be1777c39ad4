-- The number of the last term, of any shard. It grows with each.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS term BIGINT NOT NULL DEFAULT 0;
