-- name: state
-- Whether the outbox is still the one that the term began with; the number of its layout; whether the shard is paused; and
-- the last id drawn, or 0 unless the sequence draws ids one by one, upwards. Run it before `writers`: a writer that draws
-- an id in between is then listed there.
SELECT known.incarnation = %(incarnation)s AND known.table_oid = to_regclass({quoted_outbox})::oid,
       pg_is_in_recovery(),
       known.layout,
       known.paused OR %(shard)s = ANY (known.paused_shards),
       coalesce((SELECT pg_sequence_last_value(seqrelid)
                 FROM pg_sequence
                 WHERE seqrelid = {id_sequence} AND seqcache = 1 AND seqincrement > 0
                   AND has_sequence_privilege(seqrelid, 'USAGE, SELECT')), 0)
FROM {outbox_identity} AS known
WHERE known.table_name = %(table)s

-- name: writers
-- The open transactions that may have drawn an id: drawing one takes a lock on the sequence, which the transaction keeps to
-- its end. With their transaction ids, if they have any, and those of their subtransactions. Locks show the lower 32 bits.
SELECT virtualtransaction, array_agg(transactionid::text::bigint) FILTER (WHERE locktype = 'transactionid'),
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM pg_locks
WHERE granted AND (
    (locktype = 'transactionid' AND mode = 'ExclusiveLock')
    OR (locktype = 'relation' AND relation = {id_sequence}
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND mode <> 'AccessShareLock' AND (pid IS NULL OR pid <> pg_backend_pid()))
)
GROUP BY virtualtransaction
HAVING bool_or(locktype = 'relation')

-- name: parked
-- The parked ordering keys, each with its bad row.
SELECT kafka_topic, kafka_key, row_id, reason, since, keyless FROM {outbox_parked} WHERE table_name = %(table)s ORDER BY row_id

-- name: lead
-- Record this leader as the shard's leader. Arrays count from 1.
UPDATE {outbox_identity} SET leaders[%(shard)s + 1] = %(leader_id)s::uuid, term = term + 1
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s

-- name: begin_term
-- Give a new term its number, and return which terms may have rows in flight. The number comes from the clock, so that a
-- restored backup cannot give a number twice.
UPDATE {outbox_identity}
SET term = greatest(term + 1, %(above)s::bigint + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s
RETURNING term, recorded, unsigned

-- name: recorded
-- Record that the slice's last progress record is from this term, and signed. Does nothing if the group or the layout has
-- changed, or if a later term has recorded itself.
UPDATE {outbox_identity}
SET recorded = recorded || jsonb_build_object(%(slice)s::text, %(term)s::bigint),
    unsigned = array_remove(unsigned, %(slice)s::text)
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s
  AND coalesce((recorded ->> %(slice)s::text)::bigint, 0) < %(term)s

-- name: nothing_in_flight
-- Record that the term has deleted everything that it published. Does nothing if a later term has written a record.
UPDATE {outbox_identity}
SET recorded = recorded - %(slice)s::text
WHERE table_name = %(table)s AND (recorded ->> %(slice)s::text)::bigint = %(term)s

-- name: leads
-- One row if this leader still leads the shard, in the table that its term began with. It stays so until the transaction
-- ends.
SELECT FROM {outbox_identity}
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s
  AND leaders[%(shard)s + 1] = %(leader_id)s::uuid
  AND table_oid = to_regclass({quoted_outbox})::oid
FOR SHARE

-- name: generation
-- Which generation of its transactional id a slice uses; no row if the table is no longer the same.
SELECT coalesce((generations ->> %(slice)s::text)::int, 0) FROM {outbox_identity}
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s

-- name: raise_generation
-- Let the slice use the next generation of its transactional id. Returns the generation, or no row if this is not its leader.
UPDATE {outbox_identity}
SET generations = jsonb_set(generations, ARRAY[%(slice)s::text], to_jsonb(
    greatest(coalesce((generations ->> %(slice)s::text)::int, 0), %(generation)s::int) + 1))
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s
  AND leaders[%(shard)s + 1] = %(leader_id)s::uuid
RETURNING (generations ->> %(slice)s::text)::int

-- name: park
-- Park the ordering keys of bad rows. Rows that no longer exist are skipped.
INSERT INTO {outbox_parked} (table_name, kafka_topic, kafka_key, row_id, reason, keyless)
SELECT %(table)s, kafka_topic, CASE WHEN bad.whole_topic THEN NULL ELSE kafka_key END, id, bad.reason,
       kafka_key IS NULL AND NOT bad.whole_topic
FROM unnest(%(ids)s::bigint[], %(whole_topics)s::boolean[], %(reasons)s::text[]) AS bad (bad_id, whole_topic, reason)
JOIN {outbox} ON id = bad.bad_id
ORDER BY id
ON CONFLICT DO NOTHING

-- name: release
-- Release parked keys: those of a topic, of a key, or all if neither is given.
DELETE FROM {outbox_parked}
WHERE table_name = %(table)s
  AND (%(topic)s::text IS NULL OR kafka_topic = %(topic)s)
  AND (%(key)s::text IS NULL OR kafka_key = %(key)s)
RETURNING kafka_topic, kafka_key, row_id, reason, since, keyless

-- name: dead_letter
-- Move bad rows to the table of dead letters.
WITH gone AS (DELETE FROM {outbox} WHERE id = ANY (%(ids)s::bigint[]) RETURNING *)
INSERT INTO {outbox_dead_letter} (table_name, row_id, reason, create_time, kafka_topic, kafka_key, kafka_value,
                                  kafka_header_keys, kafka_header_values {more_columns})
SELECT %(table)s, gone.id, bad.reason, gone.create_time, gone.kafka_topic, gone.kafka_key,
       {outbox_bytes}(gone.kafka_value || ''), gone.kafka_header_keys, gone.kafka_header_values {more_columns}
FROM gone
JOIN unnest(%(ids)s::bigint[], %(reasons)s::text[]) AS bad (bad_id, reason) ON gone.id = bad.bad_id
ORDER BY gone.id

-- name: there
-- Which of the given rows are in the outbox.
SELECT id FROM {outbox} WHERE id = ANY (%(ids)s::bigint[])

-- name: dead_letters
-- All dead letters, the earliest first.
SELECT id, kafka_topic, kafka_key, reason, buried_at FROM {outbox_dead_letter}
WHERE table_name = %(table)s ORDER BY id

-- name: dead_letters_in_bytes
-- The same, with topics and keys as the bytes that the database has: some of them cannot be written in UTF-8.
SELECT id, convert_to(kafka_topic, 'SQL_ASCII'), convert_to(kafka_key, 'SQL_ASCII'), reason, buried_at FROM {outbox_dead_letter}
WHERE table_name = %(table)s ORDER BY id

-- name: count_dead_letters
-- How many dead letters there are.
SELECT count(*) FROM {outbox_dead_letter} WHERE table_name = %(table)s

-- name: count_some_dead_letters
-- How many dead letters there are; counts at most `counted`.
SELECT count(*) FROM (SELECT FROM {outbox_dead_letter} WHERE table_name = %(table)s LIMIT %(counted)s) AS letters

-- name: dead_letters_to_retry
-- The dead letters with these ids, or all if no ids are given, the earliest first. Also whether each cannot be emitted
-- unchanged, because Spark had to alter a column or the outbox lacks the columns of a whole record; and the reason.
SELECT id, altered <> '{{}}' OR {does_not_fit},
       CASE WHEN {does_not_fit} THEN 'it is a whole record, and the table lacks the columns for it: run `outbox migrate`' ELSE reason END
FROM {outbox_dead_letter} AS letter
WHERE table_name = %(table)s AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
ORDER BY id
FOR UPDATE

-- name: retry_dead_letters
-- Move dead letters back to the outbox, with new ids, so that they follow all other rows.
WITH gone AS (DELETE FROM {outbox_dead_letter} WHERE id = ANY (%(ids)s) RETURNING *)
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values
                      {more_columns})
SELECT now(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''), kafka_header_keys,
       kafka_header_values {more_columns}
FROM gone ORDER BY gone.id

-- name: discard_dead_letters
-- Delete the dead letters with these ids, or all if no ids are given. Returns the ids of those that were there.
DELETE FROM {outbox_dead_letter}
WHERE table_name = %(table)s AND (%(ids)s::bigint[] IS NULL OR id = ANY (%(ids)s))
RETURNING id

-- name: pause
-- Pause a shard, or the whole outbox if no shard is given. Returns a row if the outbox is known.
UPDATE {outbox_identity}
SET paused = paused OR %(shard)s::int IS NULL,
    paused_shards = CASE WHEN %(shard)s::int IS NULL OR %(shard)s::int = ANY (paused_shards) THEN paused_shards
                         ELSE paused_shards || %(shard)s::int END
WHERE table_name = %(table)s
RETURNING shards, paused

-- name: resume
-- Resume a shard, or the outbox and all of its shards if no shard is given. Returns a row if the outbox is known.
UPDATE {outbox_identity}
SET paused = paused AND %(shard)s::int IS NOT NULL,
    paused_shards = CASE WHEN %(shard)s::int IS NULL THEN '{{}}' ELSE array_remove(paused_shards, %(shard)s::int) END
WHERE table_name = %(table)s
RETURNING shards, paused

-- name: notify
-- Wake sleeping harvesters, so that they carry out an operator's command at once.
SELECT pg_notify('outbox', %(table)s)

-- name: layout
-- How many shards the outbox has, and what is paused.
SELECT layout, shards, unsettled, paused, paused_shards FROM {outbox_identity} WHERE table_name = %(table)s

-- name: register_layout
-- Change the outbox's number of shards, if it differs. The layout's number comes from the clock, so that a restored backup
-- cannot give a number twice.
UPDATE {outbox_identity}
SET layout = greatest(layout + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint), shards = %(shards)s, paused_shards = '{{}}',
    leaders = '{{}}',
    unsettled = array_remove(array_append(array_remove(unsettled, shards), shards), %(shards)s::int)
WHERE table_name = %(table)s AND shards <> %(shards)s

-- name: is_settled
-- Whether the shards of all earlier layouts have been fenced and recovered; no row if the layout is another one.
SELECT cardinality(unsettled) = 0 FROM {outbox_identity}
WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND layout = %(layout)s

-- name: settled
-- Record that the shards of all earlier layouts have been fenced and recovered. Does nothing if the layout has changed.
UPDATE {outbox_identity}
SET unsettled = '{{}}', recorded = recorded - %(former)s::text[],
    unsigned = ARRAY(SELECT slice FROM unnest(unsigned) AS slice WHERE slice <> ALL (%(former)s::text[]))
WHERE table_name = %(table)s AND layout = %(layout)s
