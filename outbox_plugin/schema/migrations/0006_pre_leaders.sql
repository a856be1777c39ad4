-- Who leads each shard, from the first on: what an earlier leader would still put aside may have been published since.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS leaders UUID[] NOT NULL DEFAULT '{{}}';
