-- name: create_function
-- Wakes the harvesters that sleep, and takes no database-wide lock while none does: NOTIFY would, at every commit.
-- A shard's leader that sleeps holds the shard's lock, so ours is refused, and we notify. While we hold ours, to the end
-- of the transaction, no leader falls asleep: it would not hear of the row. Writers need no right to our tables, and pay
-- for no look at them: the shards' locks are written out, in one expression, as a loop would cost as much again.
CREATE OR REPLACE FUNCTION {outbox_wake_up}() RETURNS pg_catalog.trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT ({all_awake}) THEN
        PERFORM pg_catalog.pg_notify('outbox', TG_ARGV[0]);
    END IF;
    RETURN NULL;
END $$

-- name: awake
-- Whether the leader of a shard is awake, and will be until the transaction ends.
pg_try_advisory_xact_lock_shared((TG_RELID::bigint << 16) | {shard})

-- name: shards
-- How many shards the outbox has, or is to have.
SELECT greatest(shards, %(shards)s::int) FROM {outbox_identity} WHERE table_name = %(table)s

-- name: create_trigger
-- Once for each statement, whatever its rows.
CREATE OR REPLACE TRIGGER outbox_wake_up AFTER INSERT ON {outbox}
FOR EACH STATEMENT EXECUTE FUNCTION {outbox_wake_up}({table_name}, {shards})

-- name: drop_trigger
-- Write without it again.
DROP TRIGGER IF EXISTS outbox_wake_up ON {outbox}

-- name: shards_of_trigger
-- For how many shards writers wake their leaders; no row where they wake none.
SELECT split_part(encode(tgargs, 'escape'), chr(92) || '000', 2)::int FROM pg_trigger
WHERE tgrelid = to_regclass({quoted_outbox}) AND tgname = 'outbox_wake_up' AND tgnargs = 2

-- name: wakes_up
-- Whether writers wake the leader of a shard: the trigger's arguments are the table's name and a number of shards.
SELECT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = to_regclass({quoted_outbox}) AND tgname = 'outbox_wake_up'
                                         AND tgenabled <> 'D' AND tgnargs = 2
                                         AND split_part(encode(tgargs, 'escape'), chr(92) || '000', 2)::int > %(shard)s)

-- name: listen
-- Hear of rows and of orders.
LISTEN outbox

-- name: sleep
-- Whether no writer is at work that would not wake us; from now on, all will.
SELECT pg_try_advisory_lock((to_regclass({quoted_outbox})::oid::bigint << 16) | %(shard)s)

-- name: rise
-- Spare writers the trouble.
SELECT pg_advisory_unlock((to_regclass({quoted_outbox})::oid::bigint << 16) | %(shard)s)
