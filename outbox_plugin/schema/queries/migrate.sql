-- name: lock
-- Allow one migration at a time in a database. The lock is held to the end of the transaction.
SELECT pg_advisory_xact_lock(hashtextextended('outbox_plugin.migrate', 0))

-- name: wait_a_little
-- For the transaction: wait only briefly for locks, because whoever needs a table that we wait for must wait behind us.
SET LOCAL lock_timeout = '1s'

-- name: in_the_way
-- The session that may hold the lock that we waited for; if there are several, the one with the oldest transaction.
SELECT format('session %%s (%%s), whose transaction is %%s s old', activity.pid,
              CASE WHEN application_name <> '' THEN application_name ELSE coalesce(usename::text, 'of another role') END,
              coalesce(extract(epoch FROM clock_timestamp() - xact_start)::int::text, '?'))
FROM pg_locks JOIN pg_stat_activity AS activity ON activity.pid = pg_locks.pid
WHERE granted AND activity.pid <> pg_backend_pid()
  AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ((locktype = 'advisory' AND objsubid = 1
        AND ((classid::bigint << 32) | objid::bigint) = hashtextextended('outbox_plugin.migrate', 0))
       OR relation = ANY (SELECT pg_class.oid FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
                          WHERE nspname = %(schema)s AND relname = ANY (%(names)s::text[])))
ORDER BY xact_start LIMIT 1

-- name: trust_nobody
-- For the transaction: names without a schema mean Postgres's own objects, whatever others may create in the search_path.
SET LOCAL search_path = pg_catalog, pg_temp

-- name: strangers
-- Tables with the names of ours, and functions that this transaction has replaced, whose owners could make them run code with
-- our rights. Trusted owners are our role, superusers, and the owners of the database, the schema and the outbox.
SELECT format('%%s belongs to the role %%I', what, rolname)
FROM (
    SELECT format('the table %%I', relname) AS what, relowner AS owner, relnamespace AS namespace
    FROM pg_class WHERE relname = ANY (%(names)s::text[])
    UNION ALL
    SELECT format('the function %%s', pg_proc.oid::regprocedure), proowner, pronamespace
    FROM pg_proc WHERE xmin = pg_current_xact_id()::xid
) AS named
JOIN pg_namespace ON pg_namespace.oid = namespace
JOIN pg_roles ON pg_roles.oid = owner
WHERE nspname = %(schema)s AND NOT rolsuper AND owner <> nspowner
  AND NOT owner = ANY (
      SELECT oid FROM pg_roles WHERE rolname = current_user
      UNION ALL
      SELECT datdba FROM pg_database WHERE datname = current_database()
      UNION ALL
      SELECT relowner FROM pg_class WHERE oid = to_regclass({quoted_outbox})
  )

-- name: create_ledger
-- The table of applied migrations, by outbox.
CREATE TABLE IF NOT EXISTS {outbox_migration} (
    table_name pg_catalog.text        NOT NULL,
    name       pg_catalog.text        NOT NULL,
    applied_at pg_catalog.timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (table_name, name)
)

-- name: forget_dropped_table
-- Forget the migrations of a table that was dropped: a new one is migrated from the start.
DELETE FROM {outbox_migration} WHERE table_name = %(table)s AND to_regclass({quoted_outbox}) IS NULL

-- name: exists
-- Whether the outbox exists.
SELECT 1 WHERE to_regclass({quoted_outbox}) IS NOT NULL

-- name: applied
-- The migrations that were applied to this table.
SELECT name FROM {outbox_migration} WHERE table_name = %(table)s

-- name: record
-- Record that a migration was applied.
INSERT INTO {outbox_migration} (table_name, name) VALUES (%(table)s, %(name)s)

-- name: notices_truncation
-- Whether the table has the trigger that notices a TRUNCATE, and it always fires.
SELECT 1 FROM pg_trigger
WHERE tgrelid = {stored_in} AND tgname = 'outbox_truncated'
  AND tgfoid = to_regproc({quoted_outbox_truncated}) AND tgenabled = 'A'

-- name: notice_truncation
-- Create the trigger by which TRUNCATE makes the outbox another incarnation. It also fires where a session's
-- `session_replication_role` is `replica`: tools that copy tables set that, and logical replication does.
CREATE OR REPLACE TRIGGER outbox_truncated AFTER TRUNCATE ON {stored}
FOR EACH STATEMENT EXECUTE FUNCTION {outbox_truncated}();
ALTER TABLE {stored} ENABLE ALWAYS TRIGGER outbox_truncated

-- name: identify
-- Register the outbox, as a new incarnation if its table is new or another one than before. Its group stays registered.
INSERT INTO {outbox_identity} AS known (table_name, table_oid, incarnation)
VALUES (%(table)s, to_regclass({quoted_outbox})::oid, gen_random_uuid())
ON CONFLICT (table_name) DO UPDATE
    SET table_oid = excluded.table_oid, incarnation = excluded.incarnation, since = now()
    WHERE known.table_oid <> excluded.table_oid

-- name: is_identified
-- Whether the outbox is registered, and its table is still the registered one.
SELECT 1 FROM {outbox_identity} WHERE table_name = %(table)s AND table_oid = to_regclass({quoted_outbox})::oid

-- name: has_secret
-- Whether the outbox has a secret.
SELECT 1 FROM {outbox_secret} WHERE table_name = %(table)s

-- name: make_secret
-- Give the outbox a secret of 244 random bits. Postgres generates it, so that no statement log contains it.
INSERT INTO {outbox_secret} (table_name, secret)
VALUES (%(table)s, sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())))
ON CONFLICT DO NOTHING

-- name: may_make_room
-- Whether to set the table's fillfactor, so that its pages leave room for marked rows: we may alter it, and nobody has set it.
SELECT 1
FROM pg_class
WHERE oid = to_regclass({quoted_outbox}) AND relkind = 'r' AND pg_has_role(relowner, 'USAGE')
  AND NOT EXISTS (SELECT FROM unnest(reloptions) AS option WHERE starts_with(option, 'fillfactor='))

-- name: make_room
-- Leave room in pages, so that a marked row stays in its page and needs no new index entry. Pages that are full stay full.
ALTER TABLE {outbox} SET (fillfactor = 45)

-- name: may_make_staging_schema
-- Whether the schema of Spark's staging tables is missing, and we may create it.
SELECT 1
WHERE to_regnamespace('outbox_staging') IS NULL AND has_database_privilege(current_database(), 'CREATE')

-- name: has_staging_schema
-- Whether the schema of Spark's staging tables exists.
SELECT 1 WHERE to_regnamespace('outbox_staging') IS NOT NULL

-- name: make_staging_schema
-- Create the schema of Spark's staging tables, so that jobs need no right to create tables in the outbox's schema.
CREATE SCHEMA outbox_staging
