-- name: kind
-- What a table is; no row where there is none.
SELECT relkind::text FROM pg_class WHERE oid = to_regclass(%(base)s)

-- name: columns
-- The columns of a table, in their order: each with its type and whether Postgres makes its value.
SELECT attname, format_type(atttypid, atttypmod), attgenerated <> '' AS is_generated
FROM pg_attribute
WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum

-- name: writers
-- The roles that may insert into a table, or into columns of it, beside its owner; PUBLIC stands for all.
SELECT DISTINCT CASE WHEN granted.grantee = 0 THEN 'PUBLIC' ELSE pg_get_userbyid(granted.grantee)::text END
FROM pg_class AS found
CROSS JOIN LATERAL (
    SELECT of_table.grantee FROM aclexplode(found.relacl) AS of_table WHERE of_table.privilege_type = 'INSERT'
    UNION ALL
    SELECT of_column.grantee FROM pg_attribute CROSS JOIN LATERAL aclexplode(attacl) AS of_column
    WHERE attrelid = found.oid AND of_column.privilege_type = 'INSERT'
) AS granted
WHERE found.oid = to_regclass(%(base)s) AND granted.grantee <> found.relowner
ORDER BY 1

-- name: cannot_draw
-- The roles of those that may not draw a place from the sequence, as they may in a new row's default.
SELECT rolname FROM pg_roles
WHERE has_table_privilege(pg_roles.oid, to_regclass(%(base)s)::oid, 'INSERT')
  AND NOT has_sequence_privilege(pg_roles.oid, {id_sequence}, 'USAGE')
  AND rolcanlogin
ORDER BY rolname LIMIT 1

-- name: has_switched
-- Whether new rows of a table get a place in the outbox's order.
SELECT FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE adrelid = to_regclass(%(base)s) AND attname = %(column)s

-- name: publication
-- Whether a publication names the table by itself; no row where there is no such publication.
SELECT EXISTS (SELECT FROM pg_publication_rel WHERE prpubid = publication.oid AND prrelid = to_regclass(%(base)s)),
       EXISTS (SELECT FROM pg_publication_tables AS published
               WHERE published.pubname = publication.pubname AND published.schemaname = %(schema)s
                 AND published.tablename = %(name)s)
FROM pg_publication AS publication WHERE publication.pubname = %(publication)s

-- name: hold
-- Pause the outbox from this moment on: a leader that has not heard of it reads by the layout's last number, and finds no row.
-- Returns whether the outbox is known.
UPDATE {outbox_identity}
SET paused = true, layout = greatest(layout + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
WHERE table_name = %(table)s
RETURNING true

-- name: log_position
-- Where the log of changes ends now.
SELECT pg_current_wal_insert_lsn()::text

-- name: nudge
-- A message in the log. Without one, a slot's reader confirms nothing behind the last change of its tables; it confirms
-- a message, or the one before it.
SELECT pg_logical_emit_message(true, 'outbox_switch', '')

-- name: slot
-- Whether there is a replication slot of that name in this database.
SELECT FROM pg_replication_slots WHERE slot_name = %(slot)s AND database = current_database()

-- name: behind
-- How many bytes of the log a slot's reader has not confirmed up to a position, and whether it reads now; no row where there
-- is no such slot.
SELECT greatest(0, pg_wal_lsn_diff(%(position)s::pg_lsn, confirmed_flush_lsn))::bigint, active
FROM pg_replication_slots WHERE slot_name = %(slot)s
