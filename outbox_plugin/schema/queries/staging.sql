-- name: staging_exists
-- One row if another task has created the staging table.
SELECT FROM pg_class WHERE oid = to_regclass({quoted_staging})

-- name: create_staging
-- Create a staging table, into which tasks copy their rows. It is unlogged: a crash of Postgres empties it, so the commit
-- counts its rows. The columns of events are text, so that an event that is too long for the outbox can be staged, too, and
-- become a dead letter. Autovacuum is off, because the table is read once and dropped.
CREATE UNLOGGED TABLE {staging} WITH (autovacuum_enabled = false) AS
SELECT {columns} FROM {source} AS business WITH NO DATA

-- name: index_staging
-- The commit reads events by this index, in the order in which they were staged. Sorting them instead would spill to disk,
-- and slow down the WAL, for which every commit waits.
CREATE INDEX ON {staging} (outbox_ordinal)

-- name: own
-- Own a staging table by an advisory lock on its name. For a driver whose session lasts as long as its job.
SELECT pg_advisory_lock(hashtextextended(%(staging)s, 0))

-- name: create_alone
-- For the transaction of a task that creates the staging table: other tasks wait for it, and then find the table.
SELECT pg_advisory_xact_lock(hashtextextended(%(staging)s, 1))

-- name: register
-- Register the new table as a staging table of the job, so that it can be removed as one. Nobody has leased it yet.
INSERT INTO {outbox_staging} (name, job_id, leased_until, table_oid, outbox_name)
SELECT %(staging)s, %(job_id)s, clock_timestamp(), to_regclass({quoted_staging})::oid, relname
FROM pg_class WHERE oid = to_regclass({quoted_outbox})

-- name: lease
-- Lease the staging table to its job for another hour. For jobs whose sessions do not last as long as the job.
UPDATE {outbox_staging} SET leased_until = clock_timestamp() + interval '1 hour' WHERE name = %(staging)s

-- name: end_lease
-- End the lease: any job may now remove the staging table.
UPDATE {outbox_staging} SET leased_until = clock_timestamp() WHERE name = %(staging)s

-- name: drop_staging
-- Drop the staging table.
DROP TABLE IF EXISTS {staging}

-- name: unregister
-- Remove the staging table from the register.
DELETE FROM {outbox_staging} WHERE name = %(staging)s

-- name: orphans
-- Staging tables that nobody owns any more, and that our role may drop. Those of other roles are left to their jobs.
-- A table counts as a staging table if its object id is registered (names may repeat). Earlier versions registered no id, or
-- nothing: their tables must be in the outbox's schema, and have a staging table's name and first columns.
-- A table is owned by a lock, by a task that writes to it, or by a lease, except a lease of an earlier run of the same job.
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
-- How many characters fit into the columns of the outbox; NULL means no limit.
SELECT attname, CASE WHEN atttypmod > 4 THEN atttypmod - 4 END
FROM pg_attribute
WHERE attrelid = to_regclass({quoted_outbox}) AND attname = ANY (ARRAY['kafka_topic', 'kafka_key', 'kafka_value'])

-- name: find_job
-- One row if the job was committed to this outbox, or if an earlier version committed it under one of the `former` ids.
SELECT job_id FROM {outbox_job}
WHERE (job_id = %(job_id)s AND events_by_outbox ? (SELECT relname FROM pg_class WHERE oid = {quoted_outbox}::regclass))
    OR (job_id = ANY (%(former)s::text[] || %(job_id)s::text) AND events_by_outbox IS NULL)

-- name: record_job
-- Record the job. Returns one row if it was not committed to this outbox before. A second driver with the same id waits
-- here for the first, even one of an earlier version, or one that writes to another outbox.
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
-- Record the batch. Returns one row if it was not committed before: how many events the earlier batches emitted.
INSERT INTO {outbox_stream} AS stream (query_id, batch_id, events, digest)
VALUES (%(job_id)s, %(batch_id)s, %(events)s, %(batch_id)s::text || ':' || %(digest)s::text)
ON CONFLICT (query_id) DO UPDATE
    SET batch_id = excluded.batch_id, events = stream.events + excluded.events, committed_at = now(), digest = excluded.digest
    WHERE stream.batch_id < excluded.batch_id
RETURNING events - %(events)s

-- name: last_batch
-- The stream's last committed batch, and whether it had these events; true if an earlier version recorded no digest.
SELECT batch_id, coalesce(digest = (batch_id::text || ':' || %(digest)s::text) OR NOT starts_with(digest, batch_id::text || ':'), true)
FROM {outbox_stream} WHERE query_id = %(job_id)s

-- name: business_columns
-- The columns of a business table: whether each is bytea, and whether it is null if an INSERT does not name it.
SELECT attname, 'pg_catalog.bytea'::regtype = ANY (ARRAY[atttypid, typbasetype]),
       NOT (atthasdef OR attidentity <> '' OR typdefault IS NOT NULL)
FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid
WHERE attrelid = to_regclass(%(business)s) AND attnum > 0 AND NOT attisdropped

-- name: digest_staged
-- How many rows the attempts have staged, and a sum of hashes of them, which does not depend on their order. Headers are
-- left out: they may differ in each run, such as the time of an event.
SELECT count(*), coalesce(sum(hash_record_extended(ROW(kafka_topic, kafka_key, kafka_value), 0)), 0)::text
FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: digest_records
-- As `digest_staged`; and a sum over whole records with their bytes and partitions. Where there are none, it is the same.
SELECT count(*),
       (coalesce(sum(hash_record_extended(ROW(kafka_topic, kafka_key, kafka_value), 0)), 0)
        + coalesce(sum(hash_record_extended(ROW(kafka_topic, kafka_key, kafka_key_bytes, kafka_value, kafka_value_bytes, kafka_partition), 1))
                   FILTER (WHERE outbox_is_whole), 0))::text
FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: count_staged
-- How many rows the attempts have staged.
SELECT count(*) FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: publish_rows
-- Insert the business rows as they were staged. The writer's ON CONFLICT clause follows.
INSERT INTO {business} ({columns}) SELECT {taken} FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s::uuid[])

-- name: sort_in_memory
-- For the transaction: a sort with 64 MB of memory is faster than one that spills to disk at the default of 4 MB.
SELECT set_config('work_mem', '64MB', true) WHERE pg_size_bytes(current_setting('work_mem')) < pg_size_bytes('64MB')

-- name: read_by_index
-- For the transaction: make the planner use the index. It has no statistics of a table so new, and would sort all of it.
SELECT set_config('enable_sort', 'off', true)

-- name: publish_events
-- Insert the events in their order: ids are drawn as the sorted rows arrive. Two headers hold the job and the event's number
-- in it.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT clock_timestamp(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''),
       kafka_header_keys || ARRAY['outbox-job', 'outbox-sequence'],
       kafka_header_values || ARRAY[%(job_id)s::text, (%(before)s + {place})::text]
FROM {staging}
WHERE outbox_attempt = ANY (%(attempts)s::uuid[]) AND outbox_problem IS NULL
ORDER BY {order}

-- name: publish_records
-- As `publish_events`, where some events are whole records. Their header values are bytes, and begin without a value for the
-- name that marks them.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
                      kafka_key_bytes, kafka_value_bytes, kafka_header_bytes, kafka_partition)
SELECT clock_timestamp(), kafka_topic, kafka_key, {outbox_value}(kafka_value, (NULL::{outbox}).kafka_value || ''),
       CASE WHEN outbox_is_whole THEN ARRAY['outbox-record'] ELSE '{{}}' END
           || kafka_header_keys || ARRAY['outbox-job', 'outbox-sequence'],
       CASE WHEN outbox_is_whole THEN '{{}}'
            ELSE kafka_header_values || ARRAY[%(job_id)s::text, (%(before)s + {place})::text] END,
       kafka_key_bytes, kafka_value_bytes,
       CASE WHEN outbox_is_whole
            THEN kafka_header_bytes || ARRAY[convert_to(%(job_id)s::text, 'UTF8'), convert_to((%(before)s + {place})::text, 'UTF8')]
       END,
       kafka_partition::int4
FROM {staging}
WHERE outbox_attempt = ANY (%(attempts)s::uuid[]) AND outbox_problem IS NULL
ORDER BY {order}

-- name: dead_letter_events
-- Dead-letter the events that would be refused, each with its problem. A missing key or topic stays missing.
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
