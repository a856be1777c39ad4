-- name: walk_by_id
-- For the transaction: make the planner walk the primary key. With the statistics of a table that was nearly empty, it would
-- scan or sort the whole table, just when a burst has filled it.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true), set_config('jit', 'off', true)

-- name: configure_read
-- For the transaction of a read. The planner walks the primary key, as with `walk_by_id`. There is no time-out of a statement
-- or of a lock: one of the role would cancel a long read, and then the same read of every later term; `schema.silent_server`
-- decides when to give up instead. TCP ends a read whose rows the client does not receive: otherwise the read would keep its
-- lock on the table, an ALTER TABLE would wait for that, and everybody else for the ALTER TABLE. Asking for the right to write
-- fails on a standby, to which a pooler or proxy may lead: a standby shows rows that were just purged, and no locks of
-- writers.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true), set_config('jit', 'off', true),
       set_config('statement_timeout', '0', true), set_config('lock_timeout', '0', true),
       set_config('tcp_user_timeout', '2000', true), set_config('transaction_read_only', 'off', true), {notice_hidden_rows}

-- name: notice_hidden_rows
-- An expression, for a transaction: have Postgres refuse a statement from which row level security would hide rows. A term would
-- take hidden rows for rows that are not there: they would be overtaken, or published twice.
set_config('row_security', 'off', true)

-- name: durable
-- For the transaction: make the commit durable, whatever the session's default. A statement by itself, because combined with
-- the DELETE it would double the cost per row. There is no time-out, as in `configure_read`.
SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '0', true),
       set_config('lock_timeout', '0', true), {notice_hidden_rows}

-- name: durable_with_idle_time_out
-- As `durable`, for a transaction of several statements: it ends after 2 s without one, because the next leader may be waiting for
-- its locks.
SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '0', true),
       set_config('lock_timeout', '0', true), set_config('idle_in_transaction_session_timeout', '2000', true), {notice_hidden_rows}

-- name: not_durable
-- For the transaction: do not wait for the commit to be durable. What a crash undoes is simply done again.
SELECT set_config('synchronous_commit', 'off', true), set_config('statement_timeout', '0', true),
       set_config('lock_timeout', '0', true), {notice_hidden_rows}

-- name: registration_limits
-- For the transaction: end it after 10 s without a statement, and wait no longer for a lock. No leader waits for it. The
-- role's other time-outs, of which the last one came with Postgres 17, would end it instead while it waits.
SELECT set_config('idle_in_transaction_session_timeout', '10000', true), set_config('lock_timeout', '10000', true),
       set_config('statement_timeout', '0', true),
       (SELECT set_config(name, '0', true) FROM pg_settings WHERE name = 'transaction_timeout')

-- name: snapshot
-- The current snapshot, which shows the transactions that have ended, and whether the server is a standby.
SELECT pg_current_snapshot()::text, pg_is_in_recovery()

-- name: open_in_binary
-- A prefix for a query: in the simple protocol, only a cursor returns rows in binary.
DECLARE earliest BINARY NO SCROLL CURSOR FOR

-- name: fetch
-- All rows of the cursor.
FETCH ALL FROM earliest

-- name: read_window
-- Read the earliest rows that meet the conditions. The row with the largest bigint as id is never read, because no range of ids
-- can end behind it. Of large rows, value and headers are left out, to be read separately: a limit on rows does not bound their
-- bytes. The horizon of a large row is negative, because a NULL value alone would mean a tombstone. A compressed array counts
-- as large, because Postgres tells its size only after decompressing it. A whole record counts as large, too: so other rows
-- have no more columns to read.
SELECT id, create_time, kafka_topic, kafka_key,
       CASE WHEN is_large THEN NULL ELSE kafka_value END,
       CASE WHEN is_large THEN NULL ELSE kafka_header_keys END,
       CASE WHEN is_large THEN NULL ELSE kafka_header_values END,
       CASE WHEN is_large THEN -(SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint)
            ELSE (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint) END
FROM (
    SELECT id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
           octet_length(kafka_value) > %(large)s
           OR pg_column_size(kafka_header_keys) > %(large)s OR pg_column_size(kafka_header_values) > %(large)s
           OR pg_column_compression(kafka_header_keys) IS NOT NULL
           OR pg_column_compression(kafka_header_values) IS NOT NULL
           OR {is_whole} AS is_large
    FROM {outbox}
    WHERE id > (%(above)s)::bigint AND id < 9223372036854775807
      {conditions}
    ORDER BY id
    LIMIT %(limit)s
) AS earliest
ORDER BY id

-- name: up_to
-- A condition of a read.
AND id <= (%(until)s)::bigint

-- name: above_open_writers
-- A condition of a read: start above the ids that only open transactions can still fill. If one of these transactions has ended
-- in this statement's own snapshot, the condition has no effect.
AND id > (
    SELECT CASE WHEN bool_or(pg_visible_in_snapshot(writer::text::xid8, pg_current_snapshot()))
                THEN (%(above)s)::bigint ELSE (%(open_up_to)s)::bigint END
    FROM unnest(%(open_writers)s::bigint[]) AS open (writer)
)

-- name: of_this_outbox
-- A condition of every read: the table and its layout are still those that the term began with.
AND {is_this_outbox}

-- name: not_marked
-- A condition of a mark: the row does not carry the mark id already, nor the id of rows that could not be deleted.
AND (leader_id IS NULL OR (leader_id <> %(mark_id)s AND leader_id <> %(delivered)s))

-- name: of_this_leader
-- A condition of a mark: no other leader has begun to lead the shard since.
AND EXISTS (SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(leader_id)s::uuid)

-- name: not_in_flight
-- A condition of a read: leave out the rows that are in flight.
AND NOT id::bigint <@ %(in_flight)s::int8multirange

-- name: of_slice
-- A condition of a read: the rows of one shard, which is the key's hash, as a non-negative number, modulo the number of shards.
-- A row without a key counts as one with an empty key.
AND (hashtextextended(coalesce(kafka_key, ''), 0) & 9223372036854775807) %% %(shards)s = %(shard)s

-- name: key_hash
-- An expression: the hash of a row's ordering key, as summaries of keys contain it; a number of 63 bits. The key is hashed with
-- the topic's hash as seed. The collation "C" compares bytes: with another one, different texts may be equal. Blanks at a key's
-- end do not count, because a key of type CHAR(n) is padded with blanks when it is read, but not when it is cast to text.
hashtextextended(rtrim(coalesce(kafka_key, '')) COLLATE pg_catalog."C",
    hashtextextended(coalesce(kafka_topic, '') COLLATE pg_catalog."C", 0)) & 9223372036854775807

-- name: key_hashes
-- The hashes of given keys, in their order.
SELECT {key_hash}
FROM unnest(%(topics)s::text[], %(keys)s::text[]) WITH ORDINALITY AS given (kafka_topic, kafka_key, place)
ORDER BY place

-- name: key_hashes_up_to
-- The last id of the next rows, the hashes of their keys in one byte string, and whether the table is still this outbox. If it
-- is not, there are no hashes.
SELECT max(id), string_agg(int8send({key_hash}), ''::bytea), {is_this_outbox}
FROM (
    SELECT id, kafka_topic, kafka_key
    FROM {outbox}
    WHERE id > (%(above)s)::bigint
      {conditions}
    ORDER BY id
    LIMIT %(limit)s
) AS following

-- name: key_hashes_between
-- The hashes of the keys of all rows in the given narrow ranges of ids; a range includes its first id, but not its last one.
SELECT string_agg(int8send({key_hash}), ''::bytea), {is_this_outbox}
FROM unnest(%(first)s::bigint[], %(behind)s::bigint[]) AS narrow (first, behind)
CROSS JOIN LATERAL (
    SELECT kafka_topic, kafka_key
    FROM {outbox}
    WHERE id >= narrow.first AND id < narrow.behind
      {conditions}
    ORDER BY id
) AS inside

-- name: key_summaries
-- The summaries that writers of large batches have left, in one form of hashes: how many bytes of hashes each has. A summary
-- counts as long as most of its last rows still exist, unchanged. The LIMIT makes the planner look each of them up by id: with
-- the statistics of an empty table, it would join the whole table instead.
SELECT summary.id, octet_length(summary.key_hashes)
FROM {outbox_key_summary} AS summary
WHERE summary.incarnation = %(incarnation)s AND summary.hash_form = %(hash_form)s
  AND lower(summary.ids) <= %(bound)s::bigint
  AND cardinality(summary.last_ids) <= (2 * (
      SELECT count(*) FROM unnest(summary.last_ids, summary.last_writers) AS last (id, writer)
      CROSS JOIN LATERAL (
          SELECT FROM {outbox} AS waiting
          WHERE waiting.id = last.id AND waiting.xmin::text::bigint = last.writer LIMIT 1
      ) AS found
  ))
ORDER BY summary.id

-- name: summarised_hashes
-- A part of a summary's hashes; no row if the summary is gone.
SELECT substring(key_hashes, %(first)s::int, %(bytes)s::int) FROM {outbox_key_summary} WHERE id = %(summary)s

-- name: not_summarised
-- The ranges of ids up to a bound that no summary covers; a range includes its first id, but not its last one.
SELECT lower(part), upper(part)
FROM unnest(
    int8multirange(int8range(%(above)s::bigint, %(bound)s::bigint, '(]'))
    - coalesce((SELECT range_agg(ids) FROM {outbox_key_summary} WHERE id = ANY (%(summaries)s::bigint[])), '{{}}'::int8multirange)
) AS part

-- name: end_of_batch
-- The last id of a batch: of a transaction that has written at least 100 of the latest 1,000 rows up to an id.
SELECT max(last_id)
FROM (
    SELECT max(id) AS last_id
    FROM (SELECT id, xmin::text AS writer FROM {outbox} WHERE id <= (%(until)s)::bigint ORDER BY id DESC LIMIT 1000) AS latest
    GROUP BY writer
    HAVING count(*) >= 100
) AS batches

-- name: not_parked
-- A condition of a read: leave out the rows of parked keys and topics.
AND kafka_topic <> ALL (%(parked_topics)s::text[])
AND (kafka_key IS NOT NULL OR kafka_topic <> ALL (%(parked_keyless)s::text[]))
AND (kafka_key IS NULL OR NOT (
    (kafka_topic, kafka_key) = ANY (SELECT * FROM unnest(%(parked_key_topics)s::text[], %(parked_keys)s::text[]))
))

-- name: header_bytes
-- An expression: the bytes of a row's headers. Their arrays are read only if they are compressed; then each text is taken to
-- need four bytes for its length. Nothing here makes Postgres write a text in UTF-8, which it refuses for some.
CASE WHEN pg_column_compression(kafka_header_keys) IS NULL AND pg_column_compression(kafka_header_values) IS NULL
     THEN coalesce(pg_column_size(kafka_header_keys), 0)::bigint + coalesce(pg_column_size(kafka_header_values), 0)
     ELSE coalesce(octet_length(array_to_string(kafka_header_keys, '')) + (4 * cardinality(kafka_header_keys)), 0)::bigint
          + coalesce(octet_length(array_to_string(kafka_header_values, '')) + (4 * cardinality(kafka_header_values)), 0)
END

-- name: is_whole
-- Whether a row is a whole record, as an expression.
kafka_key_bytes IS NOT NULL OR kafka_value_bytes IS NOT NULL OR kafka_header_bytes IS NOT NULL
OR kafka_partition IS NOT NULL OR kafka_timestamp IS NOT NULL

-- name: whole_value_bytes
-- What a whole record has beside the value and the headers of other rows, as an expression.
coalesce(octet_length(kafka_key_bytes), 0)::bigint + coalesce(octet_length(kafka_value_bytes), 0)

-- name: whole_header_bytes
-- What the headers of a whole record take, as an expression. Postgres does not say what a compressed array has inside.
CASE WHEN pg_column_compression(kafka_header_bytes) IS NULL THEN coalesce(pg_column_size(kafka_header_bytes), 0)::bigint
     ELSE octet_length(array_send(kafka_header_bytes)) END

-- name: earliest_ids
-- The ids of the earliest rows that meet the conditions, as `read_window` reads them.
SELECT id FROM {outbox} WHERE id > (%(above)s)::bigint AND id < 9223372036854775807
  {conditions}
ORDER BY id LIMIT %(limit)s

-- name: topics_and_keys
-- The topics and keys of rows.
SELECT id, kafka_topic, kafka_key FROM {outbox} WHERE id = ANY (%(ids)s)

-- name: large_rows
-- The sizes of values and headers that a read left out, in bytes. No row for one that has vanished since.
SELECT id, coalesce(octet_length(kafka_value), 0) + {whole_value_bytes}, {header_bytes} + {whole_header_bytes}
FROM {outbox} WHERE id = ANY (%(ids)s) ORDER BY id

-- name: deferred_columns
-- The values and headers that a read left out, and the rows' topics and keys: whoever changes these may have changed the
-- rest with them. Behind them the columns of whole records.
SELECT id, kafka_value, kafka_header_keys, kafka_header_values, kafka_topic, kafka_key, {whole_columns}
FROM {outbox} WHERE id = ANY (%(ids)s)

-- name: purge
-- Delete published rows. The conditions prove that a row is the published one, and not a later one with the same id.
-- It must be durable when it returns, because the ids are then removed from the progress record.
-- The two bounds on the id are for the index: with a multirange alone, the planner would scan the table.
DELETE FROM {outbox} AS old
WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
  {conditions}

-- name: purge_into_history
-- Like `purge`, but the rows are moved to the history.
WITH gone AS (
    DELETE FROM {outbox} AS old
    WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
      {conditions}
    RETURNING old.*
)
{keep_gone}

-- name: not_deleted
-- The rows that meet the conditions of a purge, but that it did not delete.
SELECT old.id FROM {outbox} AS old
WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
  {conditions}

-- name: visible_to_the_read
-- A condition of a purge, and a fast one: the row was visible to the read, because its inserting transaction is older than the
-- read's horizon, and it was created between the first and the last row that were read. It can fail for a published row: if the
-- row was rewritten since, or is 2^31 transactions old, its transaction id looks younger. It must never hold for a new row:
-- transaction ids wrap around, so a horizon that is 2^31 transactions old would make new rows look old, as would a horizon that
-- lies ahead, after a backup was restored in place. The last two lines exclude such horizons.
AND old.id::bigint <@ %(ids)s::int8multirange
  AND (%(created_until)s::bigint IS NULL
       OR old.create_time <= ('2000-01-01 00:00:00+00'::timestamptz
                             + (%(created_until)s::bigint * interval '1 microsecond')))
  AND (%(created_from)s::bigint IS NULL
       OR old.create_time >= ('2000-01-01 00:00:00+00'::timestamptz
                             + (%(created_from)s::bigint * interval '1 microsecond')))
  AND age(old.xmin) > age((%(horizon)s::bigint %% 4294967296)::text::xid)
  AND pg_snapshot_xmax(pg_current_snapshot())::text::bigint >= %(horizon)s::bigint
  AND pg_snapshot_xmax(pg_current_snapshot())::text::bigint <= (%(horizon)s::bigint + 2000000000)

-- name: seen_by_the_read
-- A condition of a look at what a purge has left: the row is as it was read, but for its time of creation. Only a view can
-- show another one.
AND old.id::bigint <@ %(ids)s::int8multirange
  AND age(old.xmin) > age((%(horizon)s::bigint %% 4294967296)::text::xid)
  AND pg_snapshot_xmax(pg_current_snapshot())::text::bigint >= %(horizon)s::bigint
  AND pg_snapshot_xmax(pg_current_snapshot())::text::bigint <= (%(horizon)s::bigint + 2000000000)
  AND (SELECT relkind = 'v' FROM pg_class WHERE oid = to_regclass({quoted_outbox}))

-- name: created_as_published
-- A condition of a purge: the row was created at the same microsecond as the published one, in the same incarnation of the
-- outbox. `timestamptz_send` returns the number that a read returns, even for an infinite time.
AND (old.id::bigint, timestamptz_send(old.create_time)) = ANY (
    SELECT published.id, int8send(published.created)
    FROM unnest(%(each)s::bigint[], %(created)s::bigint[]) AS published (id, created)
)
  AND EXISTS (
    SELECT FROM {outbox_identity}
    WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND table_oid = to_regclass({quoted_outbox})::oid
)

-- name: limit_duration
-- For the transaction of a poll: limit its time, so that a poll which waits for a lock ends before its caller gives up.
SELECT set_config('statement_timeout', %(milliseconds)s::text, true)

-- name: backlog
-- Of the earliest rows, at most `counted` of them: for each shard, how many wait, and how many seconds the oldest has waited;
-- the ids of the middle one and of the last one of them all; and the last id of the table, except the largest bigint, which is
-- never read. The cost does not grow with the rows behind them.
WITH earliest AS MATERIALIZED (
    SELECT id, create_time,
           ((hashtextextended(coalesce(kafka_key, ''), 0) & 9223372036854775807) %% %(shards)s)::int AS shard
    FROM {outbox}
    WHERE id < 9223372036854775807
    ORDER BY id
    LIMIT %(counted)s
)
SELECT shard, count(*), extract(epoch FROM clock_timestamp() - min(create_time))::float8,
       (SELECT id FROM earliest ORDER BY id OFFSET %(counted)s / 2 LIMIT 1), (SELECT max(id) FROM earliest),
       (SELECT max(id) FROM {outbox} WHERE id < 9223372036854775807)
FROM earliest
GROUP BY shard

-- name: to_be_sent
-- Of the earliest rows that wait only for the harvester, at most `counted` of them: for each shard, how many there are, and how
-- many seconds the oldest has waited. The cost does not grow with the rows behind them.
WITH earliest AS MATERIALIZED (
    SELECT create_time,
           ((hashtextextended(coalesce(kafka_key, ''), 0) & 9223372036854775807) %% %(shards)s)::int AS shard
    FROM {outbox}
    WHERE id < 9223372036854775807
      {conditions}
    ORDER BY id
    LIMIT %(counted)s
)
SELECT shard, count(*), extract(epoch FROM clock_timestamp() - min(create_time))::float8
FROM earliest
GROUP BY shard

-- name: waiting
-- How many rows wait, and the last of their ids. With `last`, only rows up to that id.
SELECT count(*), max(id) FROM {outbox} WHERE %(last)s::bigint IS NULL OR id <= %(last)s::bigint
