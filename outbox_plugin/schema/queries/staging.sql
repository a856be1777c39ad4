-- name: staging_exists
-- A row, if another task has made the staging table.
SELECT FROM pg_class WHERE oid = to_regclass({quoted_staging})

-- name: create_staging
-- Where tasks put what is to appear together. Unlogged: if Postgres crashes it is emptied, and the commit counts its
-- rows. Events stand there as text, so that one which is too long for the outbox can be staged and set aside. It is read
-- once and dropped: to vacuum it meanwhile would be in vain.
CREATE UNLOGGED TABLE {staging} WITH (autovacuum_enabled = false) AS
SELECT {columns} FROM {source} AS business WITH NO DATA

-- name: index_staging
-- By it, events are read in the order in which they came: a sort of so many rows would spill to disk, beside the log that
-- every commit waits for.
CREATE INDEX ON {staging} (outbox_ordinal)

-- name: own
-- A driver whose session lives as long as its job owns its staging tables by a lock that is named after them.
SELECT pg_advisory_lock(hashtextextended(%(staging)s, 0))

-- name: create_alone
-- For the transaction of a task that creates the staging table: others wait, and find that it is there.
SELECT pg_advisory_xact_lock(hashtextextended(%(staging)s, 1))

-- name: register
-- The table that has just been made is a staging table of the job's, and may be removed as one. Nobody holds it yet.
INSERT INTO {outbox_staging} (name, job_id, leased_until, table_oid, outbox_name)
SELECT %(staging)s, %(job_id)s, clock_timestamp(), to_regclass({quoted_staging})::oid, relname
FROM pg_class WHERE oid = to_regclass({quoted_outbox})

-- name: lease
-- Nobody's session lives as long as this job: its staging table is its own until an hour after its last sign of life.
UPDATE {outbox_staging} SET leased_until = clock_timestamp() + interval '1 hour' WHERE name = %(staging)s

-- name: end_lease
-- Whoever finds the staging table may remove it from now on.
UPDATE {outbox_staging} SET leased_until = clock_timestamp() WHERE name = %(staging)s

-- name: drop_staging
-- Remove it.
DROP TABLE IF EXISTS {staging}

-- name: unregister
-- The staging table is gone.
DELETE FROM {outbox_staging} WHERE name = %(staging)s

-- name: orphans
-- Staging tables that nobody owns any more, as far as we may drop them: another role's are for its own jobs to remove.
-- A table is one of ours if it is registered, by its object id as names repeat. Or if an earlier version has made it:
-- that one registered no id, or nothing, so the table must lie beside the outbox and have the name and columns of one.
-- A lock owns a table, or a task that writes to it, or a lease; but not one of an earlier run of the same job.
SELECT class.relname, namespace.nspname
FROM pg_class AS class
JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
LEFT JOIN {outbox_staging} AS lease ON lease.name = class.relname
WHERE starts_with(class.relname, 'outbox_staging_') AND class.relkind = 'r' AND pg_has_role(class.relowner, 'USAGE')
    AND (lease.table_oid = class.oid OR (
        lease.table_oid IS NULL AND class.relpersistence = 'u' AND class.relname ~ '^outbox_staging_[0-9a-f]{{32}}$'
        AND class.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass({quoted_outbox}))
        AND 2 = (
            SELECT count(*) FROM pg_attribute
            WHERE attrelid = class.oid
                AND (attnum = 1 AND attname = 'outbox_attempt' AND atttypid = 'pg_catalog.uuid'::regtype
                     OR attnum = 2 AND attname = 'outbox_ordinal' AND atttypid = 'pg_catalog.int8'::regtype)
        )
    ))
    AND (lease.name IS NULL OR lease.leased_until < clock_timestamp() OR (
        lease.job_id = %(job_id)s
        AND (lease.outbox_name IS NULL OR lease.outbox_name = (SELECT relname FROM pg_class WHERE oid = to_regclass({quoted_outbox})))
    ))
    AND NOT EXISTS (
        SELECT FROM pg_locks
        WHERE relation = class.oid AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
    AND pg_try_advisory_xact_lock(hashtextextended(class.relname, 0))

-- name: limits
-- How many characters fit into the columns of the outbox; NULL is no limit.
SELECT attname, CASE WHEN atttypmod > 4 THEN atttypmod - 4 END
FROM pg_attribute
WHERE attrelid = to_regclass({quoted_outbox}) AND attname = ANY (ARRAY['kafka_topic', 'kafka_key', 'kafka_value'])

-- name: find_job
-- A row, if the job has been committed to this outbox; or if an earlier version has committed it under one of `former`.
SELECT job_id FROM {outbox_job}
WHERE (job_id = %(job_id)s AND events_by_outbox ? (SELECT relname FROM pg_class WHERE oid = {quoted_outbox}::regclass))
    OR (job_id = ANY (%(former)s::text[] || %(job_id)s::text) AND events_by_outbox IS NULL)

-- name: record_job
-- One row, if the job has not been committed to this outbox. A second driver with the same id waits here for the first,
-- also one of an earlier version, and one that writes to another outbox.
INSERT INTO {outbox_job} AS job (job_id, events, events_by_outbox)
SELECT %(job_id)s, %(events)s, jsonb_build_object((SELECT relname FROM pg_class WHERE oid = {quoted_outbox}::regclass), %(events)s::bigint)
WHERE NOT EXISTS (
    SELECT FROM {outbox_job} WHERE job_id = ANY (%(former)s::text[]) AND events_by_outbox IS NULL
)
ON CONFLICT (job_id) DO UPDATE
    SET events = job.events + excluded.events, events_by_outbox = job.events_by_outbox || excluded.events_by_outbox
    WHERE NOT job.events_by_outbox ? (SELECT relname FROM pg_class WHERE oid = {quoted_outbox}::regclass)
RETURNING 0

-- name: record_batch
-- One row, if the batch of the stream has not been committed before: how many events the batches before it emitted.
INSERT INTO {outbox_stream} AS stream (query_id, batch_id, events, digest)
VALUES (%(job_id)s, %(batch_id)s, %(events)s, %(batch_id)s::text || ':' || %(digest)s::text)
ON CONFLICT (query_id) DO UPDATE
    SET batch_id = excluded.batch_id, events = stream.events + excluded.events, committed_at = now(), digest = excluded.digest
    WHERE stream.batch_id < excluded.batch_id
RETURNING events - %(events)s

-- name: last_batch
-- The last batch of the stream that was committed, and whether it had these events; a version before may not have said.
SELECT batch_id, coalesce(digest = (batch_id::text || ':' || %(digest)s::text) OR NOT starts_with(digest, batch_id::text || ':'), true)
FROM {outbox_stream} WHERE query_id = %(job_id)s

-- name: business_columns
-- The columns of a business table: whether each is of bytes, and whether it is null where an INSERT does not name it.
SELECT attname, 'pg_catalog.bytea'::regtype = ANY (ARRAY[atttypid, typbasetype]),
       NOT (atthasdef OR attidentity <> '' OR typdefault IS NOT NULL)
FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
WHERE attrelid = to_regclass(%(business)s) AND attnum > 0 AND NOT attisdropped

-- name: digest_staged
-- How many rows the attempts have staged, and a sum over what they are, in whatever order. Headers are left out: they may
-- say when and by whom an event was made.
SELECT count(*), coalesce(sum(hash_record_extended(ROW(kafka_topic, kafka_key, kafka_value), 0)), 0)::text
FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: count_staged
-- How many rows the attempts have staged.
SELECT count(*) FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: publish_rows
-- The business rows, as they were staged. What the writer says of conflicts follows.
INSERT INTO {business} ({columns}) SELECT {taken} FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: sort_in_memory
-- For the transaction: a sort that spills to disk at 4 MB, as by default, takes longer than one that does at 64.
SELECT set_config('work_mem', '64MB', true) WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('64MB')

-- name: read_by_index
-- For the transaction: the planner knows nothing of a table that is so new, and would sort all of it.
SELECT set_config('enable_sort', 'off', true)

-- name: publish_events
-- The events, in their order: ids are drawn as the sorted rows come. Two headers prove order and origin to a consumer.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT clock_timestamp(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''),
       kafka_header_keys || ARRAY['outbox-job', 'outbox-sequence'],
       kafka_header_values || ARRAY[%(job_id)s::text, (%(before)s + {place})::text]
FROM {staging}
WHERE outbox_attempt = ANY (%(attempts)s::uuid[]) AND outbox_problem IS NULL
ORDER BY {order}

-- name: dead_letter_events
-- The events that would be refused, with what is wrong with each. A key or a topic that is missing is missing here too.
INSERT INTO {outbox_dead_letter} (table_name, reason, create_time, kafka_topic, kafka_key, kafka_value,
                                  kafka_header_keys, kafka_header_values, altered)
SELECT %(table)s, problem ->> 'reason', clock_timestamp(), kafka_topic, kafka_key, kafka_value::bytea,
       kafka_header_keys || ARRAY['outbox-job'], kafka_header_values || ARRAY[%(job_id)s::text],
       ARRAY(SELECT jsonb_array_elements_text(problem -> 'altered'))
FROM {staging}, LATERAL (SELECT outbox_problem::jsonb AS problem) AS wrong
WHERE outbox_attempt = ANY (%(attempts)s::uuid[]) AND outbox_problem IS NOT NULL
ORDER BY outbox_ordinal

-- name: emitted
-- How many events each job, or each streaming query, has emitted.
SELECT job_id, coalesce((events_by_outbox ->> (SELECT relname FROM pg_class WHERE oid = to_regclass({quoted_outbox})))::bigint, events)
FROM {outbox_job}
WHERE job_id = ANY (%(jobs)s) AND coalesce(events_by_outbox ? (SELECT relname FROM pg_class WHERE oid = to_regclass({quoted_outbox})), true)
UNION ALL
SELECT query_id, events FROM {outbox_stream} WHERE query_id = ANY (%(jobs)s)
