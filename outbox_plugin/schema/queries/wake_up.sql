-- name: create_function
-- The trigger's function. It notifies only if a leader sleeps, because NOTIFY takes a database-wide lock at commit. A sleeping
-- leader holds its shard's lock, so that the writer cannot get a shared lock, and notifies. If the writer gets the shared lock,
-- it keeps it until its transaction ends, so that the leader cannot go to sleep and miss the row. The shards' locks are
-- written out in one expression: so writers need no rights on our tables, and a loop would cost twice as much.
CREATE OR REPLACE FUNCTION {outbox_wake_up}() RETURNS pg_catalog.trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT ({all_awake}) THEN
        PERFORM pg_catalog.pg_notify('outbox', TG_ARGV[0]);
    END IF;
    RETURN NULL;
END $$

-- name: awake
-- Whether the leader of a shard is awake. It stays awake until the transaction ends.
pg_try_advisory_xact_lock_shared((TG_RELID::bigint << 16) | {shard})

-- name: shards
-- How many shards the outbox has, or the number in the settings if that is larger.
SELECT greatest(shards, %(shards)s::int) FROM {outbox_identity} WHERE table_name = %(table)s

-- name: create_trigger
-- It runs once for each statement, not for each row.
CREATE OR REPLACE TRIGGER outbox_wake_up AFTER INSERT ON {stored}
FOR EACH STATEMENT EXECUTE FUNCTION {outbox_wake_up}({table_name}, {shards})

-- name: drop_trigger
-- Writers no longer wake harvesters.
DROP TRIGGER IF EXISTS outbox_wake_up ON {stored}

-- name: shards_of_trigger
-- The number of shards whose leaders writers can wake; no row if there is no trigger.
SELECT split_part(encode(tgargs, 'escape'), chr(92) || '000', 2)::int FROM pg_trigger
WHERE tgrelid = {stored_in} AND tgname = 'outbox_wake_up' AND tgnargs = 2

-- name: wakes_up
-- Whether writers wake the leader of a shard. The trigger's arguments are the table's name and the number of shards.
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = {stored_in} AND tgname = 'outbox_wake_up'
                                         AND tgenabled <> 'D' AND tgnargs = 2
                                         AND split_part(encode(tgargs, 'escape'), chr(92) || '000', 2)::int > %(shard)s)

-- name: listen
-- Receive notifications of new rows and of commands.
LISTEN outbox

-- name: arm
-- Take the shard's lock, so that writers notify. Returns false if a writer holds its shared lock: it will not notify.
SELECT pg_try_advisory_lock(({stored_in}::bigint << 16) | %(shard)s)

-- name: disarm
-- Release the shard's lock, so that writers need not notify.
SELECT pg_advisory_unlock(({stored_in}::bigint << 16) | %(shard)s)
