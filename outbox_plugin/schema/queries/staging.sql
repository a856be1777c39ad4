-- name: create_events
-- Where a job's tasks put their events. Unlogged: if Postgres crashes it is emptied, and the commit counts its rows.
CREATE UNLOGGED TABLE {staging} AS
SELECT ''::text AS outbox_attempt, 0::bigint AS outbox_ordinal,
       kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values
FROM {outbox} WITH NO DATA

-- name: create_rows
-- Where a job's tasks put the rows of a business table.
CREATE UNLOGGED TABLE {staging} AS
SELECT ''::text AS outbox_attempt, 0::bigint AS outbox_ordinal, {columns} FROM {business} WITH NO DATA

-- name: own
-- Staging tables are named after their owner's lock, which lives as long as the driver's session.
SELECT pg_advisory_lock(hashtextextended(%(staging)s, 0))

-- name: orphans
-- Staging tables whose driver is gone, as far as we may drop them: another role's are for its own jobs to remove.
SELECT quote_ident(schemaname) || '.' || quote_ident(tablename)
FROM pg_tables
WHERE starts_with(tablename, 'outbox_staging_') AND pg_has_role(tableowner, 'USAGE')
    AND pg_try_advisory_xact_lock(hashtextextended(tablename, 0))

-- name: find_job
-- A row, if the job has been committed.
SELECT job_id FROM {outbox_job} WHERE job_id = %(job_id)s

-- name: claim_job
-- One row, if the job has not been committed before. A second driver with the same id waits here for the first.
INSERT INTO {outbox_job} (job_id, events) VALUES (%(job_id)s, %(events)s) ON CONFLICT DO NOTHING RETURNING job_id

-- name: count
-- The rows of the attempts that Spark has accepted.
SELECT count(*) FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s)

-- name: publish_rows
-- The business rows, as they were staged.
INSERT INTO {business} ({columns}) SELECT {columns} FROM {staging} WHERE outbox_attempt = ANY (%(attempts)s)

-- name: publish_events
-- The events, in their order: ids are drawn as the sorted rows come. Two headers prove order and origin to a consumer.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT clock_timestamp(), kafka_topic, kafka_key, kafka_value,
       kafka_header_keys || ARRAY['outbox-job', 'outbox-sequence'],
       kafka_header_values || ARRAY[%(job_id)s::text, row_number() OVER (ORDER BY outbox_ordinal)::text]
FROM {staging}
WHERE outbox_attempt = ANY (%(attempts)s)
ORDER BY outbox_ordinal
