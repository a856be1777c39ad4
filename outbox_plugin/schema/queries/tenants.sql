-- name: short_lock_timeout
-- For the transaction: do not wait for a tenant's table that somebody has locked.
SELECT set_config('lock_timeout', '200', true)

-- name: short_time_outs
-- For the transaction: do not wait for a table that somebody has locked, and do not read for long one that is full of deleted rows.
SELECT set_config('lock_timeout', '200', true), set_config('statement_timeout', '1000', true)

-- name: drawn_ids
-- Of each schema's outbox: a text that is another one as soon as an id was drawn, or the table or its sequence was replaced or
-- emptied; and whether an open transaction may have drawn an id. No row for an outbox whose ids do not tell whether rows were
-- inserted: a view, several sequences, one that we may not read, or one of which sessions draw several ids at once. No row for
-- an outbox whose rows row level security hides from us, without policies that let us read and delete them: a harvester refuses
-- it. No row either for an outbox that somebody has locked, or waits to lock: reading the sequence takes the same lock as drawing
-- an id, and would wait. So a transaction that only reads, as another process does here, does not count as one that may have drawn
-- an id: it has no transaction id. All locks are kept to the end of the statement: ask for a limited number of schemas.
WITH drawn AS MATERIALIZED (
    SELECT namespace.nspname, outbox.oid, outbox.relfilenode, min(sequence.seqrelid) AS seqrelid
    FROM pg_namespace AS namespace
    JOIN pg_class AS outbox ON outbox.relnamespace = namespace.oid AND outbox.relname = %(name)s
                           AND outbox.relkind = ANY ('{{r,p}}')
    JOIN pg_attribute AS col ON col.attrelid = outbox.oid AND col.attname = 'id'
    JOIN (
        SELECT refobjid AS table_id, refobjsubid::int AS number, objid AS sequence_id
        FROM pg_depend
        WHERE classid = 'pg_class'::regclass AND refclassid = 'pg_class'::regclass AND deptype = 'i'
        UNION ALL
        SELECT preset.adrelid, preset.adnum, uses.refobjid
        FROM pg_attrdef AS preset
        JOIN pg_depend AS uses ON uses.classid = 'pg_attrdef'::regclass AND uses.objid = preset.oid
                              AND uses.refclassid = 'pg_class'::regclass
    ) AS source ON source.table_id = outbox.oid AND source.number = col.attnum
    JOIN pg_sequence AS sequence ON sequence.seqrelid = source.sequence_id
    WHERE namespace.nspname = ANY (%(schemas)s::text[])
      AND NOT (outbox.relrowsecurity AND row_security_active(outbox.oid) AND EXISTS (
        SELECT FROM (SELECT outbox.oid AS table_id, oid AS role_id FROM pg_roles WHERE rolname = current_user) AS access
        WHERE {lacks_policies}
      ))
    GROUP BY namespace.nspname, outbox.oid, outbox.relfilenode
    HAVING count(*) = 1 AND bool_and(sequence.seqcache = 1 AND has_sequence_privilege(sequence.seqrelid, 'USAGE, SELECT'))
), held AS MATERIALIZED (
    SELECT locktype, relation, mode, granted, virtualtransaction FROM pg_locks
    WHERE locktype = 'transactionid' AND mode = 'ExclusiveLock' AND granted
       OR locktype = 'relation' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
), locked AS MATERIALIZED (
    SELECT relation, bool_or(mode = ANY ('{{ShareLock,ShareRowExclusiveLock,ExclusiveLock,AccessExclusiveLock}}')) AS is_exclusive,
           bool_or(granted AND mode = 'RowExclusiveLock'
                   AND virtualtransaction = ANY (SELECT virtualtransaction FROM held WHERE locktype = 'transactionid')) AS is_writing
    FROM held
    WHERE locktype = 'relation'
    GROUP BY relation
)
SELECT drawn.nspname,
       concat_ws(' ', drawn.oid, drawn.relfilenode, drawn.seqrelid, found.relfilenode, pg_sequence_last_value(drawn.seqrelid)),
       coalesce(locked.is_writing, false)
FROM drawn
JOIN pg_class AS found ON found.oid = drawn.seqrelid
LEFT JOIN locked ON locked.relation = drawn.seqrelid
WHERE locked.is_exclusive IS NOT TRUE

-- name: has_rows
-- Whether a tenant's outbox has rows.
SELECT EXISTS (SELECT FROM {outbox})

-- name: wake_up_locks
-- Of each schema whose outbox has the trigger that lets writers wake its leaders: the lock of the first shard's leader.
SELECT namespace.nspname, (outbox.oid::bigint << 16)
FROM pg_namespace AS namespace
JOIN pg_class AS outbox ON outbox.relnamespace = namespace.oid AND outbox.relname = %(name)s
JOIN pg_trigger ON tgrelid = outbox.oid AND tgname = 'outbox_wake_up' AND tgenabled <> 'D' AND tgnargs = 2
WHERE namespace.nspname = ANY (%(schemas)s::text[])

-- name: arm
-- Take those of these locks that are free, for the session, and return them. All sessions share the room for locks; half of it
-- is left to others.
SELECT lock
FROM (
    SELECT lock FROM unnest(%(locks)s::bigint[]) AS lock
    LIMIT (SELECT greatest(0, current_setting('max_locks_per_transaction')::bigint
                              * current_setting('max_connections')::bigint / 2 - count(*)) FROM pg_locks)
) AS few
WHERE pg_try_advisory_lock(lock)

-- name: disarm
-- Release these locks.
SELECT pg_advisory_unlock(lock) FROM unnest(%(locks)s::bigint[]) AS lock
