-- name: begin_marking
-- For the transaction of `mark`, which must follow as a separate statement, so that its snapshot is taken after the locks. The
-- first lock keeps other leaders from beginning to lead the shard meanwhile: otherwise a mark whose snapshot lacks the new
-- leader could take rows that the new leader has marked. The second one, which the marks of all shards share, keeps the number
-- of shards from changing: leaders of other shards would not wait for the first. The commit need not be durable, as a lost mark
-- is simply made again. There is no time-out of a statement or of a lock, as in `configure_read`. The marked rows are locked
-- until all of them have been sent; if the leader's packets vanish, TCP ends the session.
SELECT set_config('synchronous_commit', 'off', true), set_config('statement_timeout', '0', true),
       set_config('tcp_user_timeout', '2000', true), {notice_hidden_rows},
       pg_advisory_xact_lock((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s),
       pg_advisory_xact_lock_shared((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | 32767)

-- name: wait_a_little
-- For the transaction: wait at most half a second for a lock.
SELECT set_config('lock_timeout', '500', true)

-- name: wait_for_marks
-- Wait until no mark of the last leader is under way, and allow none until this transaction ends. A new leader does so first.
-- Before the number of shards changes, the marks of all shards are waited for: `shard` is then 32767.
SELECT pg_advisory_xact_lock((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s)

-- name: wait_for_others
-- For the transaction: wait for locks without a limit again.
SELECT set_config('lock_timeout', '0', true)

-- name: markings
-- The sessions that are marking rows of the shard now; of any shard if `shard` is 32767.
SELECT pid FROM pg_locks
WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid() AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ((classid::bigint << 32) | objid::bigint)
      = ((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s)

-- name: end_session
-- End a session, even one that is sending rows to a leader which has been stopped and does not read them.
SELECT pg_terminate_backend(%(pid)s)

-- name: mark
-- Mark the earliest rows that meet the conditions: write the leader's mark id to them, and return them. Marks at most `bytes`
-- bytes, and no row behind one that does not fit. Rows are found by id, not by ctid: a row that somebody updates meanwhile gets another
-- ctid, would be missed, and be overtaken by later rows.
-- A value or headers that are too large for any record are not returned. Their size is returned in place of create_time, which
-- this delivery does not use: negative for headers. The number 1 in its place means a whole record, which is read apart. In place
-- of the horizon comes the number of rows that were found: a trigger or a policy may keep some from being updated. It is 0 for
-- a row that a trigger has left without the mark.
WITH found AS MATERIALIZED (
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT id, CASE WHEN octet_length(kafka_value) <= %(largest)s THEN octet_length(kafka_value) ELSE 0 END
                       + CASE WHEN {whole_value_bytes} <= %(largest)s THEN {whole_value_bytes} ELSE 0 END
                       + CASE WHEN {whole_header_bytes} <= %(largest_headers)s THEN {whole_header_bytes} ELSE 0 END
                       + CASE WHEN {header_bytes} <= %(largest_headers)s THEN {header_bytes} ELSE 0 END AS size
            FROM {outbox}
            WHERE id > (%(above)s)::bigint
              {conditions}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS counted
    WHERE before < %(bytes)s
)
UPDATE {outbox} AS marked
SET leader_id = %(mark_id)s
WHERE id = ANY (ARRAY(SELECT id FROM found))
  AND (leader_id IS NULL OR (leader_id <> %(mark_id)s AND leader_id <> %(delivered)s))
RETURNING marked.id,
          CASE WHEN {is_whole} THEN 1::bigint
               WHEN octet_length(kafka_value) > %(largest)s THEN octet_length(kafka_value)::bigint
               WHEN {header_bytes} > %(largest_headers)s THEN -{header_bytes} ELSE 0::bigint END,
          kafka_topic, kafka_key,
          CASE WHEN octet_length(kafka_value) <= %(largest)s THEN kafka_value END,
          CASE WHEN {header_bytes} <= %(largest_headers)s THEN kafka_header_keys END,
          CASE WHEN {header_bytes} <= %(largest_headers)s THEN kafka_header_values END,
          CASE WHEN marked.leader_id = %(mark_id)s THEN (SELECT count(*) FROM found) ELSE 0::bigint END

-- name: delete
-- Delete delivered rows, unless they have been marked with another id since.
DELETE FROM {outbox} WHERE id = ANY (%(ids)s) AND leader_id = %(mark_id)s

-- name: delete_into_history
-- Like `delete`, but the rows are moved to the history.
WITH gone AS (DELETE FROM {outbox} AS old WHERE id = ANY (%(ids)s) AND leader_id = %(mark_id)s RETURNING old.*)
{keep_gone}

-- name: keep_delivered
-- Give the id of delivered rows to rows that a deletion has left behind, so that nobody marks them again, and have the next leader
-- search for them. Only rows that still carry the mark id.
WITH kept AS (
    UPDATE {outbox} AS old SET leader_id = %(delivered)s WHERE id = ANY (%(ids)s) AND leader_id = %(mark_id)s RETURNING old.id
)
UPDATE {outbox_identity} SET delivered_noted = gen_random_uuid()
WHERE table_name = %(table)s AND EXISTS (SELECT FROM kept)

-- name: still_marked
-- Those of the rows that still carry the mark id, or that of delivered rows: a trigger may keep rows from being deleted, and from
-- losing the mark id.
SELECT id FROM {outbox} WHERE id = ANY (%(ids)s) AND (leader_id = %(mark_id)s OR leader_id = %(delivered)s)

-- name: noted_delivered
-- What the last `keep_delivered` has noted, unless all such rows have been deleted since.
SELECT delivered_noted::text FROM {outbox_identity} WHERE table_name = %(table)s AND delivered_noted IS NOT NULL

-- name: forget_delivered
-- Have no leader search for delivered rows, unless somebody has left further ones since the search began.
UPDATE {outbox_identity} SET delivered_noted = NULL WHERE table_name = %(table)s AND delivered_noted = %(noted)s::uuid

-- name: delivered
-- Delivered rows that could not be deleted. It reads the whole table.
SELECT id FROM {outbox} WHERE leader_id = %(delivered)s LIMIT 20000

-- name: reset
-- Remove the mark id from rows that were not delivered.
UPDATE {outbox} SET leader_id = NULL WHERE id = ANY (%(ids)s) AND leader_id = %(mark_id)s

-- name: is_leader
-- One row unless another leader has begun to lead the shard.
SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(leader_id)s::uuid
