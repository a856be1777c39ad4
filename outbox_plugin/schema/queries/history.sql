-- name: lock_days
-- One at a time makes and drops partitions.
SELECT pg_advisory_xact_lock(hashtextextended('outbox_history', 0))

-- name: create_day
-- The partition of one day; `day` and `next_day` as literals, because a partition's bounds take no parameters.
CREATE TABLE IF NOT EXISTS {partition} PARTITION OF {outbox_history} FOR VALUES FROM ({day}) TO ({next_day})

-- name: days
-- The partitions that there are.
SELECT child.relname FROM pg_inherits JOIN pg_class AS child ON child.oid = inhrelid
WHERE inhparent = to_regclass({quoted_outbox_history})

-- name: drop_day
-- A day whose time is over.
DROP TABLE IF EXISTS {partition}

-- name: replay
-- Emit kept rows again, in their order, marked by a header with the id that they had.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT now(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''),
       kafka_header_keys || 'outbox-replay'::text, kafka_header_values || id::text
FROM {outbox_history}
WHERE table_name = %(table)s
  AND (%(topic)s::text IS NULL OR kafka_topic = %(topic)s)
  AND (%(key)s::text IS NULL OR kafka_key = %(key)s)
  AND (%(since)s::timestamptz IS NULL OR published_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR published_at < %(until)s)
ORDER BY published_at, id
