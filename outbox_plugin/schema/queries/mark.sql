-- name: mark
-- Give the earliest rows that do not carry the leader's id that id. A lost mark is only made again, so it need not be
-- durable. By their places in the table, not by their ids: the index is searched once, and a row that was changed
-- meanwhile has another place, and is left alone.
UPDATE {outbox} AS marked
SET leader_id = %(leader_id)s
WHERE ctid = ANY (ARRAY(
    WITH hasty AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
    SELECT ctid FROM {outbox}, hasty
    WHERE id > (%(floor)s)::bigint
      AND (leader_id IS NULL OR leader_id <> %(leader_id)s)
      {conditions}
    ORDER BY id
    LIMIT %(limit)s
))
RETURNING marked.id, 0::bigint, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, 0::bigint

-- name: delete
-- Delete what was delivered, unless another leader has marked it since.
WITH hasty AS MATERIALIZED (SELECT set_config('synchronous_commit', 'off', true))
DELETE FROM {outbox} USING hasty WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s

-- name: reset
-- Take the leader's id off rows that were not delivered.
UPDATE {outbox} SET leader_id = NULL WHERE id = ANY (%(ids)s) AND leader_id = %(leader_id)s
