-- name: record_handled
-- Record that these events, each with a different key, are handled in this transaction. Returns how many of them were new,
-- and which, unless all were; also the id of this transaction, whose mark it sets. Waits if another transaction is handling
-- one of them. Records them in a fixed order, so that two transactions with the same events cannot deadlock. Until the
-- transaction ends, the server probes the client's machine: otherwise one that lost power would lock the events for hours.
-- The commit is durable, whatever the session's default, because Kafka's offset moves after it.
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
-- Which of these events were recorded as handled after they were written to Kafka, at a time in milliseconds since 1970. An
-- older record with the same name is that of another event, from a topic that was deleted since.
SELECT idempotency_key
FROM unnest(%(keys)s::text[], %(written)s::bigint[]) AS each (key, written)
JOIN {outbox_inbox} AS known ON consumer_group = %(group)s AND idempotency_key = key
WHERE (extract(epoch FROM handled_at) * 1000) >= written

-- name: became
-- The status of a transaction (in progress, committed, aborted), and whether it is this session's current one.
SELECT pg_xact_status(%(id)s::text::xid8), coalesce(pg_current_xact_id_if_assigned()::text = %(id)s::text, false)

-- name: roll_back_prepared
-- The statement that rolls a prepared transaction back; no row if the transaction was not prepared.
SELECT format('ROLLBACK PREPARED %%L', gid) FROM pg_prepared_xacts
WHERE transaction::text::bigint = (%(id)s::text::bigint & 4294967295) AND database = current_database()

-- name: mark
-- Set a new mark in this transaction, and return the last one. A rollback to a savepoint undoes marks set after it.
WITH last AS MATERIALIZED (SELECT current_setting('outbox_inbox.mark', true) AS mark)
SELECT mark, set_config('outbox_inbox.mark', %(mark)s, true) FROM last

-- name: forget_handled
-- Delete the records of events that a handler's own COMMIT recorded as handled, though they are not.
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
-- Dead-letter an event: record it as handled, and keep it with the reason, unless it was handled meanwhile. Durable, like
-- `record_handled`.
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
-- One row if the dead letter still exists and is still to be retried. It is locked until the transaction ends. Also returns
-- the id of this transaction, whose mark it sets. Durable, like `record_handled`.
WITH locked AS MATERIALIZED (
    SELECT id FROM {outbox_inbox_dead_letter} WHERE id = %(id)s AND retry_at IS NOT NULL FOR UPDATE
)
SELECT id, pg_current_xact_id()::text, set_config('application_name', %(sign)s, true),
       set_config('tcp_keepalives_idle', '5', true), set_config('tcp_keepalives_interval', '2', true),
       set_config('tcp_keepalives_count', '3', true), set_config('tcp_user_timeout', '10000', true),
       set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END, true)
FROM locked

-- name: remove_letter
-- Delete a dead letter whose retry succeeded.
DELETE FROM {outbox_inbox_dead_letter} WHERE id = %(id)s RETURNING id

-- name: dead_letter_again
-- Keep a dead letter whose retry failed, with the new reason.
UPDATE {outbox_inbox_dead_letter}
SET error = %(error)s, attempts = attempts + %(attempts)s, failed_at = now(), retry_at = NULL
WHERE id = %(id)s AND retry_at IS NOT NULL
RETURNING id

-- name: letters_to_retry
-- The dead letters that are to be retried, of the partitions that this process is assigned.
SELECT id, kafka_topic, kafka_partition, kafka_offset, kafka_timestamp, kafka_key, kafka_value, kafka_header_keys,
       kafka_header_values, idempotency_key
FROM {outbox_inbox_dead_letter}
WHERE consumer_group = %(group)s AND retry_at IS NOT NULL
  AND (kafka_topic, kafka_partition) = ANY (SELECT * FROM unnest(%(topics)s::text[], %(partitions)s::int[]))
ORDER BY id
LIMIT %(limit)s

-- name: letters
-- The dead letters of groups, the oldest first.
SELECT id, consumer_group, kafka_topic, kafka_partition, kafka_offset, kafka_key, idempotency_key, error, attempts,
       failed_at, retry_at
FROM {outbox_inbox_dead_letter}
WHERE %(group)s::text IS NULL OR consumer_group = %(group)s
ORDER BY id
LIMIT %(limit)s

-- name: ask_retry
-- Ask the group's consumers to retry these dead letters; NULL means all.
UPDATE {outbox_inbox_dead_letter} SET retry_at = now()
WHERE (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s)) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
RETURNING id

-- name: discard
-- Delete these dead letters; NULL means all. Their events stay recorded as handled.
DELETE FROM {outbox_inbox_dead_letter}
WHERE (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s)) AND (%(group)s::text IS NULL OR consumer_group = %(group)s)
RETURNING id

-- name: clean_alone
-- True for the one process of a group that may clean until its transaction ends.
SELECT pg_try_advisory_xact_lock(hashtextextended('outbox_plugin.clean ' || %(place)s || ' ' || %(group)s, 0))

-- name: clean_handled
-- Delete a small batch of the group's oldest records of handled events that are past their time.
DELETE FROM {outbox_inbox} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {outbox_inbox}
    WHERE consumer_group = %(group)s AND handled_at < (now() - %(keep)s::interval)
    ORDER BY handled_at LIMIT %(limit)s))

-- name: clean_letters
-- Delete a small batch of the group's oldest dead letters that are past their time, but not those to be retried.
DELETE FROM {outbox_inbox_dead_letter} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM {outbox_inbox_dead_letter}
    WHERE consumer_group = %(group)s AND failed_at < (now() - %(keep)s::interval) AND retry_at IS NULL
    ORDER BY failed_at LIMIT %(limit)s))

-- name: is_migrated
-- Returns no rows. Fails if `outbox migrate` of this version has not run yet.
SELECT sources FROM {outbox_inbox} LIMIT 0

-- name: patience
-- For the transaction: wait at most so many milliseconds for a lock, and do not wait for the commit to be durable, because a
-- position may lag.
SELECT set_config('lock_timeout', %(milliseconds)s::text, true), set_config('synchronous_commit', 'off', true)

-- name: positions
-- How far a group has handled the partitions of these topics. A recreated topic has another id, and so no row.
SELECT kafka_topic, kafka_partition, next_offset, coalesce(leader_epochs -> topic_id, '[]')::text
FROM {outbox_inbox_position} AS position
JOIN unnest(%(topics)s::text[], %(topic_ids)s::text[]) AS each (topic, id) ON kafka_topic = topic AND topic_id = id
WHERE consumer_group = %(group)s

-- name: move_positions
-- Write how far a group has handled these partitions, in a fixed order, so that two writers cannot deadlock. A position may
-- go back: after an unclean leader election, the partition may end before it.
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

-- name: lock_handover
-- Lock partitions whose records are still being handled by an inbox that leaves its group.
SELECT pg_advisory_lock(hashtextextended('outbox_plugin.handover ' || %(place)s || ' ' || %(group)s || ' ' || topic || ' ' || number, 0))
FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS each (topic, number)

-- name: unlock_handover
-- Unlock these partitions: none of their records is being handled any more.
SELECT pg_advisory_unlock(hashtextextended('outbox_plugin.handover ' || %(place)s || ' ' || %(group)s || ' ' || topic || ' ' || number, 0))
FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS each (topic, number)

-- name: still_handled
-- Which of these partitions are locked, because an inbox that has left the group still handles records of theirs.
SELECT topic, number
FROM unnest(%(topics)s::text[], %(partitions)s::int[]) AS each (topic, number)
WHERE NOT pg_try_advisory_xact_lock_shared(
    hashtextextended('outbox_plugin.handover ' || %(place)s || ' ' || %(group)s || ' ' || topic || ' ' || number, 0))
