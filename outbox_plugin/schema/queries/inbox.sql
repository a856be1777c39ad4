-- name: record_handled
-- Record that these events, each of another key, are handled in this transaction; returns how many had not been, and
-- which, unless all of them. Waits for a transaction that is handling one of them now. Records them in one order, so that
-- two transactions with the same events cannot deadlock. Returns the id of this transaction too, and sets its sign.
-- Until the transaction ends, the server checks that the client's machine is still there: one that has lost its power
-- would keep the events from others for hours. The commit is durable, whatever the session's default, because Kafka's
-- offset moves after it.
WITH recorded AS (
    INSERT INTO {outbox_inbox} AS known (consumer_group, idempotency_key, sources)
    SELECT %(group)s, key, ARRAY[source]
    FROM unnest(%(keys)s::text[], %(sources)s::text[]) AS each (key, source)
    ORDER BY key
    ON CONFLICT (consumer_group, idempotency_key) DO UPDATE
        SET sources = known.sources || excluded.sources, handled_at = now()
        WHERE NOT excluded.sources <@ known.sources
    RETURNING idempotency_key
), counted AS MATERIALIZED (
    SELECT count(*) AS events FROM recorded
), signed AS MATERIALIZED (
    SELECT pg_current_xact_id()::text AS transaction_id, set_config('application_name', %(sign)s, true),
           set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
           set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '10000', true),
           set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)
)
SELECT events,
       CASE WHEN events < %(count)s THEN (SELECT array_agg(idempotency_key) FROM recorded) END,
       transaction_id
FROM counted CROSS JOIN signed

-- name: known_formerly
-- Which of these were recorded as handled since they were written to Kafka, at a time in milliseconds since 1970. Before
-- that, their names were those of other events: of a topic that was deleted meanwhile.
SELECT idempotency_key
FROM unnest(%(keys)s::text[], %(written)s::bigint[]) AS each (key, written)
JOIN {outbox_inbox} AS known ON consumer_group = %(group)s AND idempotency_key = key
WHERE (extract(epoch FROM handled_at) * 1000) >= written

-- name: became
-- What became of a transaction (in progress, committed, aborted), and whether it is the present one of this session.
SELECT pg_xact_status(%(id)s::text::xid8), coalesce(pg_current_xact_id_if_assigned()::text = %(id)s::text, false)

-- name: roll_back_prepared
-- The statement that rolls a transaction back which has been prepared; no row where it has not.
SELECT format('ROLLBACK PREPARED %%L', gid) FROM pg_prepared_xacts
WHERE transaction::text::bigint = (%(id)s::text::bigint & 4294967295) AND database = current_database()

-- name: mark
-- The last mark of this transaction, before this one; gone after a return to a savepoint from before it was made.
WITH last AS MATERIALIZED (SELECT current_setting('outbox_inbox.mark', true) AS mark)
SELECT mark, set_config('outbox_inbox.mark', %(mark)s, true) FROM last

-- name: forget_handled
-- These were recorded as handled by a handler's own COMMIT, but are not.
WITH event AS (
    SELECT key, source FROM unnest(%(keys)s::text[], %(sources)s::text[]) AS each (key, source)
), shared AS (
    UPDATE {outbox_inbox} AS known SET sources = array_remove(sources, source) FROM event
    WHERE consumer_group = %(group)s AND idempotency_key = key AND sources @> ARRAY[source] AND cardinality(sources) > 1
)
DELETE FROM {outbox_inbox} AS known USING event
WHERE consumer_group = %(group)s AND idempotency_key = key AND sources = ARRAY[source]
RETURNING idempotency_key

-- name: dead_letter
-- Give an event up: recorded as handled, and kept with the reason, unless it has been handled meanwhile.
-- Durable like `record_handled`.
WITH recorded AS (
    INSERT INTO {outbox_inbox} AS known (consumer_group, idempotency_key, sources)
    VALUES (%(group)s, %(idempotency_key)s, ARRAY[%(source)s::text])
    ON CONFLICT (consumer_group, idempotency_key) DO UPDATE
        SET sources = known.sources || excluded.sources, handled_at = now()
        WHERE NOT excluded.sources <@ known.sources
    RETURNING idempotency_key
), durable AS MATERIALIZED (
    SELECT set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)
)
INSERT INTO {outbox_inbox_dead_letter} (consumer_group, idempotency_key, kafka_topic, kafka_partition, kafka_offset,
    kafka_timestamp, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, error, attempts)
SELECT %(group)s, idempotency_key, %(topic)s, %(partition)s, %(offset)s, %(timestamp)s, %(key)s::bytea,
       %(value)s::bytea, %(header_keys)s::text[], %(header_values)s::bytea[], %(error)s, %(attempts)s
FROM recorded CROSS JOIN durable
ON CONFLICT DO NOTHING
RETURNING id

-- name: lock_letter
-- A row, if the dead letter is still there and still to be tried again; locked until its effect is committed. With it
-- goes the id of this transaction, whose sign is set. Durable like `record_handled`.
WITH locked AS MATERIALIZED (
    SELECT id FROM {outbox_inbox_dead_letter} WHERE id = %(id)s AND retry_at IS NOT NULL FOR UPDATE
)
SELECT id, pg_current_xact_id()::text, set_config('application_name', %(sign)s, true),
       set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
       set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '10000', true),
       set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)
FROM locked

-- name: remove_letter
-- What was tried again has been handled.
DELETE FROM {outbox_inbox_dead_letter} WHERE id = %(id)s RETURNING id

-- name: dead_letter_again
-- What was tried again has failed again.
UPDATE {outbox_inbox_dead_letter}
SET error = %(error)s, attempts = attempts + %(attempts)s, failed_at = now(), retry_at = NULL
WHERE id = %(id)s AND retry_at IS NOT NULL
RETURNING id

-- name: letters_to_retry
-- Dead letters that somebody wants tried again, of the partitions that this process has.
SELECT id, kafka_topic, kafka_partition, kafka_offset, kafka_timestamp, kafka_key, kafka_value, kafka_header_keys,
       kafka_header_values, idempotency_key
FROM {outbox_inbox_dead_letter}
WHERE consumer_group = %(group)s AND retry_at IS NOT NULL
  AND (kafka_topic, kafka_partition) = ANY (SELECT * FROM unnest(%(topics)s::text[], %(partitions)s::int[]))
ORDER BY id
LIMIT %(limit)s

-- name: letters
-- What groups gave up on, the oldest first.
SELECT id, consumer_group, kafka_topic, kafka_partition, kafka_offset, kafka_key, idempotency_key, error, attempts,
       failed_at, retry_at
FROM {outbox_inbox_dead_letter}
WHERE %(group)s::text IS NULL OR consumer_group = %(group)s
ORDER BY id
LIMIT %(limit)s

-- name: ask_retry
-- Ask the group's consumers to try these again; NULL for all.
UPDATE {outbox_inbox_dead_letter} SET retry_at = now()
WHERE (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s)) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
RETURNING id

-- name: discard
-- Forget these for good, NULL for all; they stay recorded as handled.
DELETE FROM {outbox_inbox_dead_letter}
WHERE (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s)) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
RETURNING id

-- name: clean_alone
-- True for the one process of a group that may clean until its transaction ends.
SELECT pg_try_advisory_xact_lock(hashtextextended('outbox_plugin.clean ' || %(place)s || ' ' || %(group)s, 0))

-- name: clean_handled
-- A small batch of the oldest of a group's rows whose time has passed.
DELETE FROM {outbox_inbox} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {outbox_inbox}
    WHERE consumer_group = %(group)s AND handled_at < (now() - %(keep)s::interval)
    ORDER BY handled_at LIMIT %(limit)s))

-- name: clean_letters
-- A small batch of the oldest of a group's dead letters whose time has passed, but for those to be tried again.
DELETE FROM {outbox_inbox_dead_letter} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {outbox_inbox_dead_letter}
    WHERE consumer_group = %(group)s AND failed_at < (now() - %(keep)s::interval) AND retry_at IS NULL
    ORDER BY failed_at LIMIT %(limit)s))

-- name: is_migrated
-- Nothing; an error where `outbox migrate` of this version has not run yet.
SELECT sources FROM {outbox_inbox} LIMIT 0

-- name: patience
-- Wait for the locks of others for so many milliseconds at most, until this transaction ends, and for no standby: a
-- position may lag.
SELECT set_config('lock_timeout', %(milliseconds)s::text, true), set_config('synchronous_commit', 'off', true)

-- name: positions
-- How far a group has handled the partitions of these topics. A topic that was made anew has another id, and no row.
SELECT kafka_topic, kafka_partition, next_offset, coalesce(leader_epochs -> topic_id, '[]')::text
FROM {outbox_inbox_position} AS position
JOIN unnest(%(topics)s::text[], %(topic_ids)s::text[]) AS each (topic, id) ON kafka_topic = topic AND topic_id = id
WHERE consumer_group = %(group)s

-- name: move_positions
-- Write how far a group has handled these partitions. In one order, so that two who write the same cannot deadlock.
-- A position may go back: after an unclean election of a leader, the partition ends before where it was.
INSERT INTO {outbox_inbox_position} AS known (consumer_group, kafka_topic, kafka_partition, topic_id, next_offset,
    leader_epochs)
SELECT %(group)s, topic, number, id, next_offset, epochs::jsonb
FROM unnest(%(topics)s::text[], %(partitions)s::int[], %(topic_ids)s::text[], %(next_offsets)s::bigint[],
            %(leader_epochs)s::text[])
     AS each (topic, number, id, next_offset, epochs)
ORDER BY topic, number
ON CONFLICT (consumer_group, kafka_topic, kafka_partition) DO UPDATE
    SET topic_id = excluded.topic_id, next_offset = excluded.next_offset, leader_epochs = excluded.leader_epochs,
        moved_at = clock_timestamp()
    WHERE known.topic_id <> excluded.topic_id OR known.next_offset <> excluded.next_offset
       OR (known.leader_epochs = excluded.leader_epochs) IS NOT TRUE
