-- Which ordering keys the rows of a large batch have. The batch's own transaction says so, for the leader would have to read
-- all of its rows to know, and live events would wait meanwhile.
-- `incarnation`: of the outbox that has the rows. `hash_form`: which expression made the hashes; those of another form are of
-- no use. `ids`: of all rows whose keys are among the hashes. `last_ids`, `last_writers`: the last of these rows, and the
-- transaction ids that wrote them. A summary counts while most of them are there: later their ids may be given again, to
-- rows with other keys. `key_hashes`: 8 bytes for each key, big-endian, joined.
CREATE TABLE IF NOT EXISTS {outbox_key_summary} (
    id           BIGINT         GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    incarnation  UUID           NOT NULL,
    hash_form    INTEGER        NOT NULL,
    ids          INT8MULTIRANGE NOT NULL,
    last_ids     BIGINT[]       NOT NULL,
    last_writers BIGINT[]       NOT NULL,
    key_hashes   BYTEA          NOT NULL
);
ALTER TABLE {outbox_key_summary} ALTER COLUMN key_hashes SET STORAGE EXTERNAL;

-- Called at the end of a transaction that has written so many rows. It summarises the keys of the last rows that the
-- transaction sees, its own and others', and returns whether it did. It must not end the caller's transaction, whatever
-- happens: without a summary, the leader reads the keys. So it waits for no lock, and does nothing in a serializable
-- transaction, which would conflict with all who write. Ids that are far apart have too many ranges, and so many keys take
-- too much memory. It reads the table with the rights of the function's owner, so it does that only where the table has the
-- same owner: whoever owns a table can have its readers run any code.
-- The hash is that of the statement `key_hash`. Summaries that do not count any more are removed.
CREATE OR REPLACE FUNCTION {outbox_summarise_keys}(written BIGINT) RETURNS BOOLEAN LANGUAGE plpgsql
SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '1s'
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off SET work_mem = '64MB'
AS $summarise$
DECLARE
    max_ranges CONSTANT bigint := 10000;
    max_keys   CONSTANT bigint := 8000000;
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
    SELECT (greatest(max(id)::numeric - least(greatest(written, 0), 1000000000) * 1.1 - 1000, -9223372036854775808))::bigint
    INTO above FROM {outbox} WHERE id < 9223372036854775807;
    WITH neighbours AS (
        SELECT min(id) AS first, max(id) AS last
        FROM (SELECT id, id - dense_rank() OVER (ORDER BY id) AS distance
              FROM {outbox} WHERE id > above AND id < 9223372036854775807) AS numbered
        GROUP BY distance
        LIMIT max_ranges + 1
    ), covered AS (
        SELECT count(*) AS ranges, range_agg(int8range(first, last, '[]')) AS ids FROM neighbours
    ), latest AS (
        SELECT id, xmin::text::bigint AS writer
        FROM {outbox} WHERE id > above AND id < 9223372036854775807 ORDER BY id DESC LIMIT 100
    ), anchors AS (
        SELECT array_agg(id) AS ids, array_agg(writer) AS writers FROM latest
    ), hashed AS (
        SELECT DISTINCT hashtextextended(rtrim(coalesce(kafka_key, '')) COLLATE "C",
                   hashtextextended(coalesce(kafka_topic, '') COLLATE "C", 0)) & 9223372036854775807 AS key_hash
        FROM {outbox} WHERE id > above AND id < 9223372036854775807 AND (SELECT ranges <= max_ranges FROM covered)
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
                   JOIN {outbox} AS waiting ON waiting.id = last.id AND waiting.xmin::text::bigint = last.writer
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
