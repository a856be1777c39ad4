-- name: insert_event
-- One event, in the caller's transaction. create_time is named so that goharvest's own table form works too.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
VALUES (now(), %s, %s, %s, %s, %s)

-- name: insert_events
-- Many events, in their order, in one statement. Arrays come as text: drivers take long to make them of lists.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT now(), topic, key, value, names::text[], texts::text[]
FROM unnest(%s::text::text[], %s::text::text[], %s::text::{value_type}[], %s::text::text[], %s::text::text[])
     WITH ORDINALITY AS event (topic, key, value, names, texts, place)
ORDER BY place

-- name: may_summarise_keys
-- One row where there is the function below, and the role may call it: not where an earlier version migrated the outbox.
SELECT true
FROM pg_proc AS found
WHERE found.oid = to_regprocedure({quoted_outbox_summarise_keys} || '(pg_catalog.int8)')::oid
  AND has_function_privilege(found.oid, 'EXECUTE')

-- name: summarise_keys
-- At the end of a transaction that has written very many rows: the leader need not read them to know their keys.
SELECT {outbox_summarise_keys}({written})
