-- name: kind
-- What a table is, and whether other tables inherit from it; no row where there is none.
SELECT relkind::text, EXISTS (SELECT FROM pg_inherits WHERE inhparent = found.oid)
FROM pg_class AS found WHERE oid = to_regclass(%(base)s)

-- name: sequence_of_another
-- The sequence of this name, where it belongs to another table, or to none.
SELECT FROM pg_class AS found
WHERE oid = to_regclass(%(sequence)s) AND NOT EXISTS (
    SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = found.oid
                            AND refclassid = 'pg_class'::regclass AND refobjid = to_regclass(%(base)s))

-- name: other_owner
-- The owner of the table, and who we are, where that is somebody else.
SELECT pg_get_userbyid(relowner), current_user
FROM pg_class WHERE oid = to_regclass(%(base)s) AND pg_get_userbyid(relowner) <> current_user

-- name: fires_again
-- What an INSERT into the table sets off. A row that is put back would set it off once more.
SELECT format('the trigger %%s', tgname) FROM pg_trigger
WHERE tgrelid = to_regclass(%(base)s) AND (tgtype & 4) <> 0 AND NOT tgisinternal AND tgenabled <> 'D'
  AND tgname <> 'outbox_placed' AND tgname <> 'outbox_wake_up' AND pg_get_triggerdef(oid) !~ 'pg_trigger_depth'
UNION ALL
SELECT format('the rule %%s', rulename) FROM pg_rewrite
WHERE ev_class = to_regclass(%(base)s) AND ev_type = '3' AND ev_enabled <> 'D'

-- name: hidden_rows
-- One row where row level security leaves rows out of what the view shows, as no log of changes does.
SELECT WHERE {is_row_secured} AND (
    NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = {stored_in} AND polpermissive AND polcmd = '*' AND polroles @> '{{0}}'
                                        AND pg_get_expr(polqual, polrelid) = 'true')
    OR EXISTS (SELECT FROM pg_policy WHERE polrelid = {stored_in} AND NOT polpermissive)
)

-- name: columns
-- The columns of a table, in their order, each with its type.
SELECT attname, format_type(atttypid, atttypmod)
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
-- The roles of those that may not draw a place from the sequence, as they must for a new row.
SELECT rolname FROM pg_roles
WHERE has_any_column_privilege(pg_roles.oid, to_regclass(%(base)s)::oid, 'INSERT')
  AND NOT has_sequence_privilege(pg_roles.oid, {id_sequence}, 'USAGE, UPDATE')
  AND NOT starts_with(rolname, 'pg_')
ORDER BY rolname LIMIT 1

-- name: has_switched
-- Whether new rows of a table get a place in the outbox's order.
SELECT FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE adrelid = to_regclass(%(base)s) AND attname = %(column)s

-- name: publication
-- How a publication has the table: whether it names it; whether it has it in any way; whether it has it as one of a schema; and
-- whether it leaves out rows or columns. No row where there is no such publication.
SELECT names_it.prpubid IS NOT NULL,
       EXISTS (SELECT FROM pg_publication_tables AS published
               WHERE published.pubname = publication.pubname AND published.schemaname = %(schema)s
                 AND published.tablename = %(name)s),
       EXISTS (SELECT FROM pg_publication_namespace JOIN pg_namespace AS schema ON schema.oid = pnnspid
               WHERE pnpubid = publication.oid AND schema.nspname = %(schema)s),
       names_it.prqual IS NOT NULL OR names_it.prattrs IS NOT NULL
FROM pg_publication AS publication
LEFT JOIN pg_publication_rel AS names_it ON prpubid = publication.oid AND prrelid = to_regclass(%(base)s)
WHERE publication.pubname = %(publication)s

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
