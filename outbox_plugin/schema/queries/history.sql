-- name: keep_days
-- Create the partitions of the coming days, and drop those that are past their retention. Returns whether nothing is left to
-- do.
SELECT {outbox_history_days}(%(keep)s::interval)

-- name: replay
-- Emit kept rows again, in their order. A header holds the id that each row had.
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
