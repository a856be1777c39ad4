-- name: mark
-- Give the earliest rows that do not carry the leader's id that id; as many as have so many bytes together, and no row
-- after one that was left out. By their ids, not by their places in the table: a row that somebody changes meanwhile has
-- another place then, would be left out, and rows behind it would overtake it.
UPDATE {outbox} AS marked
SET leader_id = %(leader_id)s
WHERE id = ANY (ARRAY(
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT id, coalesce(octet_length(kafka_value), 0) AS size FROM {outbox}
            WHERE id > (%(floor)s)::bigint
              AND (leader_id IS NULL OR leader_id <> %(leader_id)s)
              {conditions}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS counted
    WHERE before < %(bytes)s
)) AND (leader_id IS NULL OR leader_id <> %(leader_id)s)
RETURNING marked.id, 0::bigint, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, 0::bigint

-- name: delete
-- Delete what was delivered, unless another leader has marked it since.
DELETE FROM {outbox} WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: reset
-- Take the leader's id off rows that were not delivered.
UPDATE {outbox} SET leader_id = NULL WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: is_leader
-- One row while no other leader has begun to lead the shard.
SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(term)s::uuid
