-- Not NULL if the table may have rows that Kafka has and that could not be deleted, in at-least-once delivery: the next leader
-- searches the whole table for them. It is another value each time that a leader leaves such rows.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS delivered_noted UUID NULL DEFAULT pg_catalog.gen_random_uuid();
