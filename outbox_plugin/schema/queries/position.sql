-- name: read
-- A consumer's position in a topic; no row if it has consumed nothing yet.
SELECT topic_id, next_offsets, lost FROM {outbox_consumer_position}
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s

-- name: begin
-- Create an empty position for a consumer's first range. Waits if another transaction is creating it.
INSERT INTO {outbox_consumer_position} (consumer, backfill, kafka_topic, topic_id, next_offsets)
VALUES (%(consumer)s, %(backfill)s, %(topic)s, %(topic_id)s, '{{}}')
ON CONFLICT DO NOTHING

-- name: lock
-- The consumer's position, locked until this transaction ends.
SELECT topic_id, next_offsets, lost FROM {outbox_consumer_position}
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s
FOR UPDATE

-- name: advance
-- Move the position behind the range whose effects this transaction writes.
UPDATE {outbox_consumer_position}
SET next_offsets = next_offsets || %(next_offsets)s::jsonb, lost = lost + %(lost)s, moved_at = clock_timestamp()
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s

-- name: set
-- Set the position, as an operator asked.
INSERT INTO {outbox_consumer_position} AS known (consumer, backfill, kafka_topic, topic_id, next_offsets)
VALUES (%(consumer)s, %(backfill)s, %(topic)s, %(topic_id)s, %(next_offsets)s::jsonb)
ON CONFLICT (consumer, backfill, kafka_topic) DO UPDATE
    SET topic_id = excluded.topic_id, next_offsets = excluded.next_offsets, lost = 0, moved_at = clock_timestamp()

-- name: acknowledge
-- Record that an operator has acknowledged the offsets that were lost.
UPDATE {outbox_consumer_position} SET lost = 0
WHERE consumer = %(consumer)s AND backfill = %(backfill)s AND kafka_topic = %(topic)s
