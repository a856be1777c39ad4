-- name: mark
-- Give the earliest rows that do not carry the leader's id that id; as many as have so many bytes together, and no row
-- after one that was left out. By their ids, not by their places in the table: a row that somebody changes meanwhile has
-- another place then, would be left out, and rows behind it would overtake it. A value that is larger than any record is
-- not read; its size stands in the place of the time of creation, which this delivery does not look at.
UPDATE {outbox} AS marked
SET leader_id = %(leader_id)s
WHERE id = ANY (ARRAY(
    SELECT id
    FROM (
        SELECT id, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT id, CASE WHEN octet_length(kafka_value) <= %(largest)s THEN octet_length(kafka_value) ELSE 0 END AS size
            FROM {outbox}
            WHERE id > (%(floor)s)::bigint
              AND (leader_id IS NULL OR leader_id <> %(leader_id)s)
              {conditions}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS counted
    WHERE before < %(bytes)s
)) AND (leader_id IS NULL OR leader_id <> %(leader_id)s)
RETURNING marked.id,
          CASE WHEN octet_length(kafka_value) > %(largest)s THEN octet_length(kafka_value)::bigint ELSE 0::bigint END,
          kafka_topic, kafka_key,
          CASE WHEN octet_length(kafka_value) <= %(largest)s THEN kafka_value END,
          kafka_header_keys, kafka_header_values, 0::bigint

-- name: delete
-- Delete what was delivered, unless another leader has marked it since.
DELETE FROM {outbox} WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: reset
-- Take the leader's id off rows that were not delivered.
UPDATE {outbox} SET leader_id = NULL WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: is_leader
-- One row while no other leader has begun to lead the shard.
SELECT FROM {outbox_identity} WHERE table_name = %(table)s AND leaders[%(shard)s + 1] = %(term)s::uuid
