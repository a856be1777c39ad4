-- Which term wrote the last progress record of each slice, as long as its rows may be in flight; and the slices whose last
-- leader may have been of a version that did not sign its records.
ALTER TABLE {outbox_identity}
    ADD COLUMN IF NOT EXISTS recorded JSONB  NOT NULL DEFAULT '{{}}',
    ADD COLUMN IF NOT EXISTS unsigned TEXT[] NULL;
UPDATE {outbox_identity}
SET unsigned = CASE WHEN harvest_group IS NULL OR delivery = 'at-least-once' THEN '{{}}' ELSE ARRAY(
    SELECT CASE WHEN shard_count = 1 THEN '0' ELSE number || '-of-' || shard_count END
    FROM unnest(array_append(unsettled, shards)) AS shard_count, generate_series(0, shard_count - 1) AS number
) END
WHERE unsigned IS NULL;
ALTER TABLE {outbox_identity} ALTER COLUMN unsigned SET DEFAULT '{{}}', ALTER COLUMN unsigned SET NOT NULL;
