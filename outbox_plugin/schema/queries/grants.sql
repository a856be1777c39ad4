-- name: emitter
-- Writes events, but cannot read them.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT INSERT ON {outbox} TO {role};
GRANT USAGE ON SEQUENCE {sequence} TO {role};
GRANT EXECUTE ON FUNCTION {outbox_emit}(pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.jsonb) TO {role};
GRANT EXECUTE ON FUNCTION
    {outbox_emit_record}(pg_catalog.text, pg_catalog.bytea, pg_catalog.bytea, pg_catalog.text[], pg_catalog.bytea[], INTEGER,
                         TIMESTAMP WITH TIME ZONE)
TO {role};
GRANT EXECUTE ON FUNCTION {outbox_summarise_keys}(BIGINT) TO {role};
GRANT EXECUTE ON FUNCTION {outbox_bytes}(pg_catalog.text), {outbox_bytes}(pg_catalog.bytea) TO {role};
GRANT EXECUTE ON FUNCTION
    {outbox_value}(pg_catalog.text, pg_catalog.text), {outbox_value}(pg_catalog.text, pg_catalog.bytea),
    {outbox_value}(pg_catalog.bytea, pg_catalog.text), {outbox_value}(pg_catalog.bytea, pg_catalog.bytea)
TO {role};

-- name: harvester
-- Relays events, in either delivery, and parks or dead-letters those that Kafka refuses. Who can read outbox_secret can sign
-- heartbeats and progress records.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, UPDATE, DELETE ON {outbox} TO {role};
GRANT SELECT ON SEQUENCE {sequence} TO {role};
GRANT SELECT, UPDATE ON {outbox_identity} TO {role};
GRANT SELECT ON {outbox_secret} TO {role};
GRANT SELECT ON {outbox_key_summary} TO {role};
GRANT SELECT, INSERT ON {outbox_parked} TO {role};
GRANT SELECT, INSERT ON {outbox_dead_letter} TO {role};
GRANT USAGE ON SEQUENCE {outbox_dead_letter_id_seq} TO {role};
GRANT EXECUTE ON FUNCTION {outbox_bytes}(pg_catalog.text), {outbox_bytes}(pg_catalog.bytea) TO {role};
-- Needed only with OUTBOX_RETENTION.
GRANT SELECT, INSERT ON {outbox_history} TO {role};
GRANT EXECUTE ON FUNCTION {outbox_history_days}(INTERVAL) TO {role};

-- name: inbox
-- Handles events. Grant the rights on the tables that the handler writes separately.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {outbox_inbox} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {outbox_inbox_dead_letter} TO {role};
GRANT USAGE ON SEQUENCE {outbox_inbox_dead_letter_id_seq} TO {role};
GRANT SELECT, INSERT, UPDATE ON {outbox_inbox_position} TO {role};
-- For assets of Dagster, with or without Spark, that consume ranges of a topic.
GRANT SELECT, INSERT, UPDATE ON {outbox_consumer_position} TO {role};

-- name: spark
-- Stages a job's events and commits them. Grant the rights on the business tables that the job writes separately.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT INSERT ON {outbox} TO {role};
GRANT USAGE ON SEQUENCE {sequence} TO {role};
GRANT INSERT ON {outbox_dead_letter} TO {role};
GRANT USAGE ON SEQUENCE {outbox_dead_letter_id_seq} TO {role};
GRANT SELECT, INSERT, UPDATE, DELETE ON {outbox_staging} TO {role};
GRANT SELECT, INSERT, UPDATE ON {outbox_job} TO {role};
GRANT SELECT, INSERT, UPDATE ON {outbox_stream} TO {role};
GRANT USAGE, CREATE ON SCHEMA outbox_staging TO {role};
GRANT EXECUTE ON FUNCTION {outbox_summarise_keys}(BIGINT) TO {role};
GRANT EXECUTE ON FUNCTION
    {outbox_value}(pg_catalog.text, pg_catalog.text), {outbox_value}(pg_catalog.text, pg_catalog.bytea),
    {outbox_value}(pg_catalog.bytea, pg_catalog.text), {outbox_value}(pg_catalog.bytea, pg_catalog.bytea)
TO {role};

-- name: operator
-- Pauses, resumes, releases parked keys, retries or discards dead letters, replays kept events, and sees the status.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT, INSERT ON {outbox} TO {role};
GRANT USAGE ON SEQUENCE {sequence} TO {role};
GRANT SELECT, UPDATE ON {outbox_identity} TO {role};
GRANT SELECT ON {outbox_secret} TO {role};
GRANT SELECT, DELETE ON {outbox_parked} TO {role};
GRANT SELECT, UPDATE, DELETE ON {outbox_dead_letter} TO {role};
GRANT SELECT ON {outbox_history} TO {role};
GRANT SELECT, UPDATE, DELETE ON {outbox_inbox_dead_letter} TO {role};
GRANT SELECT, INSERT, UPDATE ON {outbox_consumer_position} TO {role};
GRANT EXECUTE ON FUNCTION
    {outbox_value}(pg_catalog.text, pg_catalog.text), {outbox_value}(pg_catalog.text, pg_catalog.bytea),
    {outbox_value}(pg_catalog.bytea, pg_catalog.text), {outbox_value}(pg_catalog.bytea, pg_catalog.bytea)
TO {role};

-- name: monitor
-- Sees the status, and verifies what Spark's jobs have emitted. Without outbox_secret it could not tell the harvesters' heartbeats
-- from forged ones; with it, it could forge them.
GRANT USAGE ON SCHEMA {schema} TO {role};
GRANT SELECT ON {outbox} TO {role};
GRANT SELECT ON {outbox_identity} TO {role};
GRANT SELECT ON {outbox_secret} TO {role};
GRANT SELECT ON {outbox_parked} TO {role};
GRANT SELECT ON {outbox_dead_letter} TO {role};
GRANT SELECT ON {outbox_job} TO {role};
GRANT SELECT ON {outbox_stream} TO {role};
GRANT SELECT ON {outbox_inbox_dead_letter} TO {role};
GRANT SELECT ON {outbox_consumer_position} TO {role};

-- name: sequence
-- The schema and the name of the sequence that ids are drawn from; no row if there is none.
SELECT namespace.nspname, found.relname
FROM pg_class AS found
JOIN pg_namespace AS namespace ON namespace.oid = found.relnamespace
WHERE found.oid = {id_sequence}
