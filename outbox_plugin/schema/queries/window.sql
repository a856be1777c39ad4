-- name: walk_by_id
-- For the transaction: walk the primary key. To the planner a table that was nearly empty when it was last analysed looks
-- as if scanning or sorting all of it were cheaper, just when a burst has filled it.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true), set_config('jit', 'off', true)

-- name: steer
-- For the transaction of a read: walk the primary key, as `walk_by_id` does. A role's time-out
-- would cancel a long read, and the same read of every later term: `schema.silent_server` says what ends our waits. A read whose
-- rows are not received keeps its lock of the table: whoever alters the table would wait for it, and everybody else behind
-- them. TCP ends it. A standby shows rows that were purged a moment ago, and no lock of a writer: a pooler or proxy may lead
-- to one, where it is an error to ask for the right to write.
SELECT set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('enable_sort', 'off', true), set_config('jit', 'off', true),
       set_config('statement_timeout', '0', true), set_config('tcp_user_timeout', '2000', true),
       set_config('transaction_read_only', 'off', true)

-- name: durable
-- For the transaction, whatever the session's default. By itself: joined to what deletes, it doubles what a row costs.
-- Without a time-out, as in `steer`.
SELECT set_config('synchronous_commit', 'on', true), set_config('statement_timeout', '0', true)

-- name: hasty
-- For the transaction: what is lost of it is only done again.
SELECT set_config('synchronous_commit', 'off', true), set_config('statement_timeout', '0', true)

-- name: not_idle_for_long
-- For the transaction: while it waits for our next statement, the next leader may wait for its locks. Milliseconds.
SELECT set_config('idle_in_transaction_session_timeout', '2000', true)

-- name: not_idle_for_ever
-- The same for what nobody waits for at once.
SELECT set_config('idle_in_transaction_session_timeout', '10000', true)

-- name: snapshot
-- Which transactions have ended, and whether a standby says so.
SELECT pg_current_snapshot()::text, pg_is_in_recovery()

-- name: open_in_binary
-- Put before a query: in the simple protocol, only a cursor's rows come in binary.
DECLARE earliest BINARY NO SCROLL CURSOR FOR

-- name: fetch
-- All rows of the query that is open.
FETCH ALL FROM earliest

-- name: read_window
-- The earliest rows that are wanted; never that of the largest bigint, which no range of ids can end behind. None once the table is not the one that the term began with, or its layout is not.
-- The value and the headers of a large row are left out, to be read apart: no number of rows bounds their bytes. The horizon
-- of such a row comes with a minus sign, since a value that is NULL is a tombstone. A compressed array counts as large: Postgres
-- does not say what it has inside without looking.
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
           OR pg_column_compression(kafka_header_values) IS NOT NULL AS is_large
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
-- A condition of a read: it begins above the ids that only open transactions can still commit rows of. If one of these
-- has ended in the snapshot of this very statement, it begins where it would without this condition.
AND id > (
    SELECT CASE WHEN bool_or(pg_visible_in_snapshot(writer::text::xid8, pg_current_snapshot()))
                THEN (%(above)s)::bigint ELSE (%(open_up_to)s)::bigint END
    FROM unnest(%(open_writers)s::bigint[]) AS open (writer)
)

-- name: of_this_outbox
-- A condition of every read: the table is still the one that the term began with, and its layout is.
AND {is_this_outbox}

-- name: of_this_leader
-- A condition of a mark: no other leader has begun to lead the shard since.
AND EXISTS (SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(term)s::uuid)

-- name: not_in_flight
-- A condition of a read.
AND NOT id::bigint <@ %(in_flight)s::int8multirange

-- name: of_slice
-- A condition of a read: the key's hash, as a number that is not negative, modulo the number of shards. A row without a key
-- is one shard's too.
AND (hashtextextended(coalesce(kafka_key, ''), 0) & 9223372036854775807) %% %(shards)s = %(shard)s

-- name: key_hash
-- The hash of a row's ordering key that summaries of keys use, as an expression; a number of 63 bits. The seed of the key's
-- hash is the topic's. A collation would let equal texts differ, or the other way round. A read shows the blanks that fill up
-- a key of type CHAR(n), and a cast to text drops them: so blanks at a key's end do not count.
hashtextextended(rtrim(coalesce(kafka_key, '')) COLLATE pg_catalog."C",
    hashtextextended(coalesce(kafka_topic, '') COLLATE pg_catalog."C", 0)) & 9223372036854775807

-- name: key_hashes
-- The hashes of given keys, in their order.
SELECT {key_hash}
FROM unnest(%(topics)s::text[], %(keys)s::text[]) WITH ORDINALITY AS given (kafka_topic, kafka_key, place)
ORDER BY place

-- name: key_hashes_up_to
-- The hashes of the next rows, joined, and the last of their ids; and whether they are this outbox's: else there are none.
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
-- The same of all rows whose ids are in one of many narrow ranges; the first id of a range is in it, and the last is not.
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
-- Summaries that writers of large batches have left, by form of their hashes: how many bytes of hashes each has. A summary
-- counts while most of its last rows are there, as they were written. The LIMIT has each of them looked up by itself: to the
-- planner a table that was empty when it was last analysed looks as if joining all of it were cheaper.
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
-- A part of a summary's hashes; nothing once the summary is gone.
SELECT substring(key_hashes, %(first)s::int, %(bytes)s::int) FROM {outbox_key_summary} WHERE id = %(summary)s

-- name: not_summarised
-- The ranges of ids up to a bound that none of the summaries has; the first id of a range is in it, and the last is not.
SELECT lower(part), upper(part)
FROM unnest(
    int8multirange(int8range(%(above)s::bigint, %(bound)s::bigint, '(]'))
    - coalesce((SELECT range_agg(ids) FROM {outbox_key_summary} WHERE id = ANY (%(summaries)s::bigint[])), '{{}}'::int8multirange)
) AS part

-- name: end_of_batch
-- The last row of a transaction that has written a tenth, at least, of the latest rows up to an id.
SELECT max(last_id)
FROM (
    SELECT max(id) AS last_id
    FROM (SELECT id, xmin::text AS writer FROM {outbox} WHERE id <= (%(until)s)::bigint ORDER BY id DESC LIMIT 1000) AS latest
    GROUP BY writer
    HAVING count(*) >= 100
) AS batches

-- name: not_parked
-- A condition of a read.
AND kafka_topic <> ALL (%(parked_topics)s::text[])
AND (kafka_key IS NOT NULL OR kafka_topic <> ALL (%(parked_keyless)s::text[]))
AND (kafka_key IS NULL OR NOT (
    (kafka_topic, kafka_key) = ANY (SELECT * FROM unnest(%(parked_key_topics)s::text[], %(parked_keys)s::text[]))
))

-- name: header_bytes
-- What the headers of a row take, as an expression. Their arrays are looked into only where they are compressed.
CASE WHEN pg_column_compression(kafka_header_keys) IS NULL AND pg_column_compression(kafka_header_values) IS NULL
     THEN coalesce(pg_column_size(kafka_header_keys), 0)::bigint + coalesce(pg_column_size(kafka_header_values), 0)
     ELSE octet_length(record_send(ROW(kafka_header_keys)))::bigint + octet_length(record_send(ROW(kafka_header_values)))
END

-- name: large_rows
-- How large the values and the headers are that a read left out; nothing of a row that has vanished since.
SELECT id, coalesce(octet_length(kafka_value), 0), {header_bytes} FROM {outbox} WHERE id = ANY (%(ids)s) ORDER BY id

-- name: left_out
-- What a read left out of rows.
SELECT id, kafka_value, kafka_header_keys, kafka_header_values FROM {outbox} WHERE id = ANY (%(ids)s)

-- name: purge
-- Delete what was published, and nothing else that has such an id by now: a condition proves each row.
-- Durable when it returns, because its ids leave the progress record then.
-- The two bounds on the id are what the index is searched by: with a multirange alone, the planner walks the table.
DELETE FROM {outbox} AS old
WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
  {conditions}

-- name: purge_into_history
-- As `purge`, but the rows are kept.
WITH gone AS (
    DELETE FROM {outbox} AS old
    WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
      {conditions}
    RETURNING old.*
)
INSERT INTO {outbox_history} (table_name, id, published_at, create_time, kafka_topic, kafka_key, kafka_value,
                              kafka_header_keys, kafka_header_values)
SELECT %(table)s, id, now(), create_time, kafka_topic, kafka_key, {outbox_bytes}(kafka_value || ''), kafka_header_keys,
       kafka_header_values
FROM gone

-- name: not_deleted
-- What a purge has left, though its conditions hold.
SELECT old.id FROM {outbox} AS old
WHERE old.id >= lower(%(ids)s::int8multirange) AND old.id < upper(%(ids)s::int8multirange)
  {conditions}

-- name: visible_to_the_read
-- A condition of a purge, and a quick one: the row was visible to the read, as its inserting transaction is older than the
-- read's horizon, and it is no older and no younger than the rows that were read. It proves less than there is: a row that
-- was rewritten since, or that is 2^31 transactions old, has a transaction id that looks younger. Only while that is so
-- far from wrapping: a horizon that is 2^31 transactions old would make new rows look old; so would one that lies ahead,
-- as it does after a backup was restored in place.
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

-- name: created_as_published
-- A condition of a purge: the row was created when the published one was, to the microsecond, in the same incarnation of
-- the outbox. `timestamptz_send` gives the number that a read gives, also where a time is infinite.
AND (old.id::bigint, timestamptz_send(old.create_time)) = ANY (
    SELECT published.id, int8send(published.created)
    FROM unnest(%(each)s::bigint[], %(created)s::bigint[]) AS published (id, created)
)
  AND EXISTS (
    SELECT FROM {outbox_identity}
    WHERE table_name = %(table)s AND incarnation = %(incarnation)s AND table_oid = to_regclass({quoted_outbox})::oid
)

-- name: give_up_after
-- For the transaction of a look: one that waits for somebody's lock must not outlive the one who asked.
SELECT set_config('statement_timeout', %(milliseconds)s::text, true)

-- name: backlog
-- Of the earliest rows, at most `counted` of them: how many wait for each shard, and for how many seconds the oldest has;
-- the ids of the middle one and of the last one of them all; and the last id of all rows, but for the largest there is,
-- which is never read. The cost does not grow with the rows behind them.
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
-- Of the earliest rows that wait for nothing but the harvester, at most `counted` of them: how many there are for each
-- shard, and for how many seconds the oldest has waited. The cost does not grow with the rows behind them.
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
-- How many rows wait, and the last of their ids; with `last`, only those up to it.
SELECT count(*), max(id) FROM {outbox} WHERE %(last)s::bigint IS NULL OR id <= %(last)s::bigint
