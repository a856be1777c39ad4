-- name: steer
-- For the transaction of the read: walk the primary key. A table that was nearly empty when it was last analysed looks
-- to the planner as if sorting all of it were cheaper, just when a burst has filled it.
SELECT set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)

-- name: read_window
-- The earliest rows that are not in flight; none once the table is not the one that the term began with.
SELECT id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
       pg_snapshot_xmax(pg_current_snapshot())::text::bigint
FROM {outbox}
WHERE NOT id <@ %(in_flight)s::int8multirange
  AND EXISTS (SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND incarnation = %(incarnation)s
                                             AND table_oid = to_regclass(%(table)s)::oid)
ORDER BY id
LIMIT %(limit)s

-- name: purge
-- Delete what was published, and nothing that was inserted later under the same ids: the row must have been visible to
-- the read (its inserting transaction is older than the read's horizon) and be no younger than the youngest row read.
-- Durable when it returns, whatever the session's default, because its ids leave the progress record then.
-- The two bounds on the id are what the index is searched by: with a multirange alone, the planner walks the table.
WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'on', true))
DELETE FROM {outbox} AS old
USING durable
WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
  AND old.id <@ %(ids)s::int8multirange
  AND (%(created_until)s::bigint IS NULL
       OR old.create_time <= '2000-01-01 00:00:00+00'::timestamptz + %(created_until)s::bigint * interval '1 microsecond')
  AND age(old.xmin) > age((%(horizon)s::bigint %% 4294967296)::text::xid)

-- name: give_up_after
-- For the transaction of a look: one that waits for somebody's lock must not outlive the one who asked.
SELECT set_config('statement_timeout', %(milliseconds)s::text, true)

-- name: backlog
-- How many rows wait, and for how many seconds the oldest has.
SELECT count(*), extract(epoch FROM clock_timestamp() - min(create_time))::float8 FROM {outbox}

-- name: waiting
-- How many rows wait, and the last of their ids; with `last`, only those up to it.
SELECT count(*), max(id) FROM {outbox} WHERE %(last)s::bigint IS NULL OR id <= %(last)s::bigint
