-- name: kind
-- The kind of a relation, and whether it is a partition or other tables inherit from it; no row if it does not exist.
SELECT relkind::text, relispartition OR EXISTS (SELECT FROM pg_inherits WHERE inhparent = found.oid)
FROM pg_class AS found WHERE oid = to_regclass(%(base)s)

-- name: sequence_of_another
-- One row if the sequence of this name exists and does not belong to the table.
SELECT FROM pg_class AS found
WHERE oid = to_regclass(%(sequence)s) AND NOT EXISTS (
    SELECT FROM pg_depend WHERE classid = 'pg_class'::regclass AND objid = found.oid
                            AND refclassid = 'pg_class'::regclass AND refobjid = to_regclass(%(base)s))

-- name: other_owner
-- The owner of the table and the current role, if they differ.
SELECT pg_get_userbyid(relowner), current_user
FROM pg_class WHERE oid = to_regclass(%(base)s) AND pg_get_userbyid(relowner) <> current_user

-- name: fires_again
-- The triggers and rules that an INSERT into the table fires. Putting a row back would fire them again.
SELECT format('the trigger %%s', tgname) FROM pg_trigger
WHERE tgrelid = to_regclass(%(base)s) AND (tgtype & 4) <> 0 AND NOT tgisinternal AND tgenabled <> 'D'
  AND tgname <> 'outbox_placed' AND tgname <> 'outbox_wake_up' AND pg_get_triggerdef(oid) !~ 'pg_trigger_depth'
UNION ALL
SELECT format('the rule %%s', rulename) FROM pg_rewrite
WHERE ev_class = to_regclass(%(base)s) AND ev_type = '3' AND ev_enabled <> 'D'

-- name: hidden_rows
-- One row if row level security hides rows from the view. Debezium, which reads the WAL, sees them all.
SELECT WHERE {is_row_secured} AND (
    NOT EXISTS (SELECT FROM pg_policy WHERE polrelid = {stored_in} AND polpermissive AND polcmd = '*' AND polroles @> '{{0}}'
                                        AND pg_get_expr(polqual, polrelid) = 'true')
    OR EXISTS (SELECT FROM pg_policy WHERE polrelid = {stored_in} AND NOT polpermissive)
)

-- name: columns
-- The columns of a table, in their order, each with its type, whether it is generated, and its collation unless that is the
-- database's.
SELECT attname, format_type(atttypid, atttypmod), attgenerated <> '',
       CASE WHEN attcollation <> 0 AND attcollation <> 'pg_catalog."default"'::regcollation
            THEN attcollation::regcollation::text END
FROM pg_attribute
WHERE attrelid = to_regclass(%(base)s) AND attnum > 0 AND NOT attisdropped
ORDER BY attnum

-- name: writers
-- The roles, other than the owner, that may insert into a table or into columns of it. PUBLIC stands for all roles.
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
-- A role that may insert rows, but may not use the sequence, which every new row needs.
SELECT rolname FROM pg_roles
WHERE has_any_column_privilege(pg_roles.oid, to_regclass(%(base)s)::oid, 'INSERT')
  AND NOT has_sequence_privilege(pg_roles.oid, {id_sequence}, 'USAGE, UPDATE')
  AND NOT starts_with(rolname, 'pg_')
ORDER BY rolname LIMIT 1

-- name: has_switched
-- One row if new rows of the table already get a place in the outbox's order.
SELECT FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum
WHERE adrelid = to_regclass(%(base)s) AND attname = %(column)s

-- name: publication
-- How a publication contains the table: whether it names the table; whether it contains it in any way; whether it contains
-- the table's whole schema; and whether it leaves out rows or columns. No row if there is no such publication.
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
-- Pause the outbox at once: the layout's number changes, so that even a leader that does not know of the pause yet reads no
-- further row. Returns a row if the outbox is known.
UPDATE {outbox_identity}
SET paused = true, layout = greatest(layout + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
WHERE table_name = %(table)s
RETURNING true

-- name: log_position
-- The present end of the WAL.
SELECT pg_current_wal_insert_lsn()::text

-- name: nudge
-- Write a message to the WAL. A slot's reader confirms positions only of its tables' changes and of messages, so without a
-- message it would confirm nothing after the last change. It may confirm the last message only after the next one.
SELECT pg_logical_emit_message(true, 'outbox_switch', '')

-- name: slot
-- One row if this database has a replication slot of that name.
SELECT FROM pg_replication_slots WHERE slot_name = %(slot)s AND database = current_database()

-- name: behind
-- How many bytes of the WAL, up to a position, a slot's reader has not confirmed yet, and whether it is connected now. No row
-- if there is no such slot.
SELECT greatest(0, pg_wal_lsn_diff(%(position)s::pg_lsn, confirmed_flush_lsn))::bigint, active
FROM pg_replication_slots WHERE slot_name = %(slot)s
