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
