-- name: insert_event
-- Insert one event, in the caller's transaction. create_time is named, because goharvest's form of the table has no default
-- for it.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
VALUES (now(), %s, %s, %s, %s, %s)

-- name: insert_events
-- Insert many events, in their order, by one statement. Arrays are passed as text, because drivers are slow at converting
-- lists.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
SELECT now(), topic, key, {value}, names::text[], texts::text[]
FROM unnest(%s::text::text[], %s::text::text[], %s::text::{value_type}[], %s::text::text[], %s::text::text[])
     WITH ORDINALITY AS event (topic, key, value, names, texts, place)
ORDER BY place

-- name: insert_records
-- Many events, as above, some of which are whole records. A list of a list's bytes comes as text, too.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
                      kafka_key_bytes, kafka_value_bytes, kafka_header_bytes, kafka_partition, kafka_timestamp)
SELECT now(), topic, key, {value}, names::text[], texts::text[], key_bytes, value_bytes, header_bytes::bytea[],
       partition_number, record_time
FROM unnest(%s::text::text[], %s::text::text[], %s::text::{value_type}[], %s::text::text[], %s::text::text[],
            %s::text::bytea[], %s::text::bytea[], %s::text::text[], %s::text::int4[], %s::text::timestamptz[])
     WITH ORDINALITY AS event (topic, key, value, names, texts, key_bytes, value_bytes, header_bytes, partition_number,
                               record_time, place)
ORDER BY place

-- name: may_summarise_keys
-- One row if the function below exists and the role may call it. An outbox that an earlier version migrated lacks it.
SELECT true
FROM pg_proc AS found
WHERE found.oid = to_regprocedure({quoted_outbox_summarise_keys} || '(pg_catalog.int8)')::oid
  AND has_function_privilege(found.oid, 'EXECUTE')

-- name: summarise_keys
-- Summarise the keys of a transaction's very many rows, at its end. The leader then knows the keys without reading the rows.
SELECT {outbox_summarise_keys}({written})
