-- name: begin_marking
-- For the transaction of a mark, which follows as a statement of its own: its snapshot is younger than the lock. What is
-- lost of it is only done again, and it has no time-out, as in `steer`. While it lasts, no other leader begins to lead the
-- shard: a mark whose snapshot does not know of its successor would take rows from it that the successor has marked.
-- A marking keeps its rows locked until all of them have been sent: where the leader's packets vanish, TCP ends it.
SELECT set_config('synchronous_commit', 'off', true), set_config('statement_timeout', '0', true),
       set_config('tcp_user_timeout', '2000', true),
       pg_advisory_xact_lock((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s)

-- name: wait_a_little
-- For the transaction: how long it waits for a lock.
SELECT set_config('lock_timeout', '500', true)

-- name: wait_for_marks
-- Before a leader begins to lead: no mark of the last one is under way until the transaction ends.
SELECT pg_advisory_xact_lock((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s)

-- name: wait_for_others
-- For the transaction: it waits for whatever else it needs.
SELECT set_config('lock_timeout', '0', true)

-- name: markings
-- The sessions that mark rows of the shard now.
SELECT pid FROM pg_locks
WHERE locktype = 'advisory' AND granted AND pid <> pg_backend_pid() AND objsubid = 1
  AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ((classid::bigint << 32) | objid::bigint)
      = ((to_regclass({quoted_outbox})::oid::bigint << 16) | 32768 | %(shard)s)

-- name: end_session
-- End a session, whatever it does: also one that sends rows to a leader which is stopped and reads none of them.
SELECT pg_terminate_backend(%(pid)s)

-- name: mark
-- Give the earliest rows that do not carry the leader's id that id, nor the one of rows that cannot be deleted; as many as have so many bytes together, and no row
-- after one that was left out. By their ids, not by their places in the table: a row that somebody changes meanwhile has
-- another place then, would be left out, and rows behind it would overtake it. A value, or headers, that are larger than any
-- record are not read; their size stands in the place of the time of creation, which this delivery does not look at: of the
-- headers, with a minus sign.
UPDATE {outbox} AS marked
SET leader_id = %(leader_id)s
WHERE id = ANY (ARRAY(
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT id, CASE WHEN octet_length(kafka_value) <= %(largest)s THEN octet_length(kafka_value) ELSE 0 END
                       + CASE WHEN {header_bytes} <= %(largest_headers)s THEN {header_bytes} ELSE 0 END AS size
            FROM {outbox}
            WHERE id > (%(above)s)::bigint
              AND (leader_id IS NULL OR (leader_id <> %(leader_id)s AND leader_id <> %(delivered)s))
              {conditions}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS counted
    WHERE before < %(bytes)s
)) AND (leader_id IS NULL OR (leader_id <> %(leader_id)s AND leader_id <> %(delivered)s))
RETURNING marked.id,
          CASE WHEN octet_length(kafka_value) > %(largest)s THEN octet_length(kafka_value)::bigint
               WHEN {header_bytes} > %(largest_headers)s THEN -{header_bytes} ELSE 0::bigint END,
          kafka_topic, kafka_key,
          CASE WHEN octet_length(kafka_value) <= %(largest)s THEN kafka_value END,
          CASE WHEN {header_bytes} <= %(largest_headers)s THEN kafka_header_keys END,
          CASE WHEN {header_bytes} <= %(largest_headers)s THEN kafka_header_values END, 0::bigint

-- name: delete
-- Delete what was delivered, unless another leader has marked it since.
DELETE FROM {outbox} WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: keep_delivered
-- Let nobody mark rows again that were delivered and that a deletion has left: they still carry the leader's id.
UPDATE {outbox} SET leader_id = %(delivered)s WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: delivered
-- Such rows among the earliest ones; those behind them are marked by nobody, and found once they are among these.
SELECT id FROM (SELECT id, leader_id FROM {outbox} ORDER BY id LIMIT 20000) AS earliest
WHERE leader_id = %(delivered)s

-- name: reset
-- Take the leader's id off rows that were not delivered.
UPDATE {outbox} SET leader_id = NULL WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: is_leader
-- One row while no other leader has begun to lead the shard.
SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(term)s::uuid
