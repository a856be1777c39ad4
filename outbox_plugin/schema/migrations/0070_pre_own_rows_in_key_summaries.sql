-- As before, but of the transaction's own rows alone. The rows that others had committed meanwhile were summarised, too: they
-- were relayed soon, and yet all later rows of their keys waited for the whole batch.
-- A transaction's own rows are those that it sees and whose writers are still at work: itself, and its savepoints that have
-- written. A savepoint has a later transaction id; `age` counts from the transaction's own. IS TRUE lets the planner look
-- them up in a hash table, whatever their number.
-- A planner whose statistics are of an empty table takes all rows of the batch for one. So nothing is joined with them that
-- could be joined row by row, and nothing is sorted that an index has in order.
CREATE OR REPLACE FUNCTION {outbox_summarise_keys}(written BIGINT) RETURNS BOOLEAN LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET work_mem = '64MB'
AS $summarise$
DECLARE
    max_ranges CONSTANT bigint := 10000;
    max_keys   CONSTANT bigint := 8000000;
    top        CONSTANT xid := pg_current_xact_id()::xid;
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
    WITH nested AS MATERIALIZED (
        SELECT writer
        FROM (SELECT DISTINCT xmin AS writer
              FROM {outbox} WHERE id > above AND id < 9223372036854775807 AND xmin <> top) AS others
        WHERE age(writer) < 0
          AND pg_xact_status((pg_current_xact_id()::text::bigint - age(writer))::text::xid8) = 'in progress'
    ), neighbours AS (
        SELECT min(id) AS first, max(id) AS last
        FROM (SELECT id, id - dense_rank() OVER (ORDER BY id) AS distance
              FROM {outbox} WHERE id > above AND id < 9223372036854775807
                AND (xmin = top OR (xmin IN (SELECT writer FROM nested)) IS TRUE)) AS numbered
        GROUP BY distance
        LIMIT max_ranges + 1
    ), covered AS (
        SELECT count(*) AS ranges, range_agg(int8range(first, last, '[]')) AS ids FROM neighbours
    ), latest AS (
        SELECT id, xmin::text::bigint AS writer
        FROM {outbox} WHERE id > above AND id < 9223372036854775807
          AND (xmin = top OR (xmin IN (SELECT writer FROM nested)) IS TRUE) ORDER BY id DESC LIMIT 100
    ), anchors AS (
        SELECT array_agg(id) AS ids, array_agg(writer) AS writers FROM latest
    ), hashed AS (
        SELECT DISTINCT hashtextextended(rtrim(coalesce(kafka_key, '')) COLLATE "C",
                   hashtextextended(coalesce(kafka_topic, '') COLLATE "C", 0)) & 9223372036854775807 AS key_hash
        FROM {outbox} WHERE id > above AND id < 9223372036854775807
            AND (xmin = top OR (xmin IN (SELECT writer FROM nested)) IS TRUE) AND (SELECT ranges <= max_ranges FROM covered)
        LIMIT max_keys + 1
    ), keys AS (
        SELECT count(*) AS number, string_agg(int8send(key_hash), ''::bytea) AS hashes FROM hashed
    )
    INSERT INTO {outbox_key_summary} (incarnation, hash_form, ids, last_ids, last_writers, key_hashes)
    SELECT ours, 1, covered.ids, anchors.ids, anchors.writers, hashes
    FROM covered, anchors, keys WHERE ranges <= max_ranges AND number BETWEEN 1 AND max_keys
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
