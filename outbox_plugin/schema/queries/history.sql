-- name: keep_days
-- Create the partitions of the coming days, and drop those that are past the retention of all outboxes of the schema. An outbox
-- whose table was dropped does not count. Tables are looked up by name, as a restore gives them other object ids, and by object id,
-- as somebody may have renamed one. Returns whether nothing is left to do.
SELECT {outbox_history_days}(greatest(%(keep)s::interval, (
    SELECT max(known.history_kept)
    FROM {outbox_identity} AS known JOIN pg_class
        ON pg_class.relname = regexp_replace(known.table_name, '^.*[.]', '') OR pg_class.oid = known.table_oid
    WHERE pg_class.relnamespace = (SELECT own.relnamespace FROM pg_class AS own WHERE own.oid = to_regclass({quoted_outbox}))
)))

-- name: keep_gone
-- The end of a statement whose part `gone` has deleted published rows: they are moved to the history.
INSERT INTO {outbox_history} (table_name, id, published_at, create_time, kafka_topic, kafka_key, kafka_value,
                              kafka_header_keys, kafka_header_values {more_columns})
SELECT %(table)s, id, now(), create_time, kafka_topic, kafka_key, {outbox_bytes}(kafka_value || ''), kafka_header_keys,
       kafka_header_values {more_columns}
FROM gone

-- name: replay
-- Emit kept rows again, in their order. A header holds the id that each row had.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values
                      {more_columns})
SELECT now(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''),
       kafka_header_keys || 'outbox-replay'::text, {replayed_header_values} {replayed_columns}
FROM {outbox_history}
WHERE table_name = %(table)s
  AND (%(topic)s::text IS NULL OR kafka_topic = %(topic)s)
  AND (%(key)s::text IS NULL OR kafka_key = %(key)s)
  AND (%(since)s::timestamptz IS NULL OR published_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR published_at < %(until)s)
ORDER BY published_at, id

-- name: replayed_header_values
-- The values of the headers, as an expression; a whole record has none of them there.
CASE WHEN kafka_header_bytes IS NULL THEN kafka_header_values || id::text ELSE kafka_header_values END

-- name: replayed_columns
-- What a whole record has beside, as expressions.
kafka_key_bytes, kafka_value_bytes,
CASE WHEN kafka_header_bytes IS NOT NULL THEN kafka_header_bytes || convert_to(id::text, 'UTF8') END,
kafka_partition, kafka_timestamp
