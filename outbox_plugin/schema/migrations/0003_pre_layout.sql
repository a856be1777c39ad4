-- How many shards an outbox has, which earlier numbers of shards may still have leaders at work, and what is paused.
ALTER TABLE {outbox_identity}
    ADD COLUMN IF NOT EXISTS layout        BIGINT  NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS shards        INT     NOT NULL DEFAULT 1,
    ADD COLUMN IF NOT EXISTS unsettled     INT[]   NOT NULL DEFAULT '{{}}',
    ADD COLUMN IF NOT EXISTS paused        BOOLEAN NOT NULL DEFAULT false,
    ADD COLUMN IF NOT EXISTS paused_shards INT[]   NOT NULL DEFAULT '{{}}';
