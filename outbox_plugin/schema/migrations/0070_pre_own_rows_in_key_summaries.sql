-- Called at the end of a transaction that has written so many rows. It summarises the keys of the last rows that the
-- transaction has written itself, and returns whether it did. The rows that others have committed meanwhile are relayed soon,
-- and all later rows of their keys would wait for the batch. It must not end the caller's transaction, whatever happens:
-- without a summary, the leader reads the keys. So it waits for no lock, and does nothing in a serializable transaction, which
-- would conflict with all who write. More than `max_keys` keys would take too much memory. It reads the table with the rights
-- of the function's owner, so it does that only where the table has the same owner: whoever owns a table can have its readers
-- run any code.
-- The hash is that of the statement `key_hash`. Summaries that do not count any more are removed.
-- A transaction's own rows are those that it sees and whose writers are still at work: itself, and its savepoints that have
-- written. A savepoint has a later transaction id. One that seems to be later than any is that of a frozen row, and cannot be
-- asked for. IS TRUE lets the planner look savepoints up in a hash table, whatever their number.
-- Rows of others leave gaps between the ids. Where there are very many, the widest ranges are covered; the leader reads the
-- rest. A summary that would cover less than half of the rows is not made.
-- A planner whose statistics are of an empty table takes all rows of the batch for one. So nothing is joined with them that
-- could be joined row by row, and nothing is sorted that an index has in order.
CREATE OR REPLACE FUNCTION {outbox_summarise_keys}(written BIGINT) RETURNS BOOLEAN LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET work_mem = '64MB'
AS $summarise$
#variable_conflict use_variable
DECLARE
    max_ranges CONSTANT bigint := 10000;
    max_keys   CONSTANT bigint := 8000000;
    whole      bigint;
    top        xid;
    nested     xid[] := '{{}}';
    ours       uuid;
    above      bigint;
    made       bigint;
BEGIN
    IF current_setting('transaction_isolation') = 'serializable' OR written IS NULL THEN
        RETURN false;
    END IF;
    SELECT known.incarnation INTO ours
    FROM {outbox_identity} AS known
    JOIN pg_class ON pg_class.oid = known.table_oid
    JOIN pg_roles ON pg_roles.oid = pg_class.relowner
    WHERE known.table_oid = to_regclass({quoted_outbox})::oid AND rolname = current_user;
    IF ours IS NULL THEN
        RETURN false;
    END IF;
    SELECT greatest(id::numeric - least(greatest(written, 0), 1000000000) * 1.1 - 1000, -9223372036854775808)::bigint
    INTO above FROM {outbox} WHERE id < 9223372036854775807 ORDER BY id DESC LIMIT 1;
    whole := pg_current_xact_id()::text::bigint;
    top := pg_current_xact_id()::xid;
    BEGIN
        SELECT coalesce(array_agg(writer), nested) INTO nested
        FROM (SELECT writer, (writer::text::bigint - whole % 4294967296 + 4294967296) % 4294967296 AS ahead
              FROM (SELECT DISTINCT xmin AS writer
                    FROM {outbox} WHERE id > above AND id < 9223372036854775807 AND xmin <> top) AS others) AS later
        WHERE CASE WHEN ahead < 2147483648 THEN pg_xact_status((whole + ahead)::text::xid8) = 'in progress' ELSE false END;
    EXCEPTION WHEN invalid_parameter_value THEN
        nested := '{{}}';
    END;
    WITH own AS NOT MATERIALIZED (
        SELECT id, xmin AS writer, kafka_topic, kafka_key
        FROM {outbox} WHERE id > above AND id < 9223372036854775807
          AND (xmin = top OR (xmin IN (SELECT unnest(nested))) IS TRUE)
    ), neighbours AS (
        SELECT min(id) AS first, max(id) AS last, count(*) AS rows, sum(count(*)) OVER () AS all_rows
        FROM (SELECT id, id - dense_rank() OVER (ORDER BY id) AS distance FROM own) AS numbered
        GROUP BY distance
        ORDER BY count(*) DESC
        LIMIT max_ranges
    ), covered AS (
        SELECT range_agg(int8range(first, last, '[]')) AS ids, 2 * sum(rows) >= max(all_rows) AS suffice FROM neighbours
    ), latest AS (
        SELECT id, writer::text::bigint AS writer FROM own
        WHERE id::bigint <@ (SELECT ids FROM covered) ORDER BY id DESC LIMIT 100
    ), anchors AS (
        SELECT array_agg(id) AS ids, array_agg(writer) AS writers FROM latest
    ), hashed AS (
        SELECT DISTINCT hashtextextended(rtrim(coalesce(kafka_key, '')) COLLATE "C",
                   hashtextextended(coalesce(kafka_topic, '') COLLATE "C", 0)) & 9223372036854775807 AS key_hash
        FROM own WHERE (SELECT suffice FROM covered)
        LIMIT max_keys + 1
    ), keys AS (
        SELECT count(*) AS number, string_agg(int8send(key_hash), ''::bytea) AS hashes FROM hashed
    )
    INSERT INTO {outbox_key_summary} (incarnation, hash_form, ids, last_ids, last_writers, key_hashes)
    SELECT ours, 1, covered.ids, anchors.ids, anchors.writers, hashes
    FROM covered, anchors, keys WHERE suffice AND number BETWEEN 1 AND max_keys
    RETURNING id INTO made;
    DELETE FROM {outbox_key_summary} WHERE id IN (
        SELECT old.id FROM {outbox_key_summary} AS old
        WHERE NOT EXISTS (SELECT FROM {outbox_identity} AS known WHERE known.incarnation = old.incarnation)
           OR (old.incarnation = ours AND old.id <> coalesce(made, 0) AND (
               old.ids <@ (SELECT ids FROM {outbox_key_summary} WHERE id = made)
               OR cardinality(old.last_ids) > 2 * (
                   SELECT count(*) FROM unnest(old.last_ids, old.last_writers) AS last (id, writer)
                   CROSS JOIN LATERAL (
                       SELECT FROM {outbox} AS waiting
                       WHERE waiting.id = last.id AND waiting.xmin::text::bigint = last.writer LIMIT 1
                   ) AS found
               )))
        FOR UPDATE SKIP LOCKED
    );
    RETURN made IS NOT NULL;
EXCEPTION WHEN OTHERS OR query_canceled THEN  -- A role's statement_timeout cancels, too.
    RAISE WARNING 'the keys of a large batch were not summarised: %', SQLERRM;
    RETURN false;
END
$summarise$;
REVOKE ALL ON FUNCTION {outbox_summarise_keys}(BIGINT) FROM PUBLIC;
