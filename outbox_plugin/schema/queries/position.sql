-- name: read
-- Where a consumer stands in a topic; no row where it has consumed nothing yet.
SELECT topic_id, next_offsets, lost FROM {outbox_consumer_position}
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s

-- name: begin
-- For a consumer's first range: a position that knows no partition. Another transaction's first range is waited for.
INSERT INTO {outbox_consumer_position} (consumer, backfill, kafka_topic, topic_id, next_offsets)
VALUES (%(consumer)s, %(backfill)s, %(topic)s, %(topic_id)s, '{{}}')
ON CONFLICT DO NOTHING

-- name: lock
-- Where the consumer stands, which nobody else changes until this transaction ends.
SELECT topic_id, next_offsets, lost FROM {outbox_consumer_position}
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s
FOR UPDATE

-- name: advance
-- The position after a range whose effects this transaction makes.
UPDATE {outbox_consumer_position}
SET next_offsets = next_offsets || %(next_offsets)s::jsonb, lost = lost + %(lost)s, moved_at = clock_timestamp()
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s

-- name: set
-- Where an operator wants the consumer to stand.
INSERT INTO {outbox_consumer_position} AS known (consumer, backfill, kafka_topic, topic_id, next_offsets)
VALUES (%(consumer)s, %(backfill)s, %(topic)s, %(topic_id)s, %(next_offsets)s::jsonb)
ON CONFLICT (consumer, backfill, kafka_topic) DO UPDATE
    SET topic_id = excluded.topic_id, next_offsets = excluded.next_offsets, lost = 0, moved_at = clock_timestamp()

-- name: acknowledge
-- An operator knows of the offsets that were lost.
UPDATE {outbox_consumer_position} SET lost = 0
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s
