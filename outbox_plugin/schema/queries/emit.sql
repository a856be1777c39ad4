-- name: insert_event
-- One event, in the caller's transaction. create_time is named so that goharvest's own table form works too.
INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
VALUES (now(), %s, %s, %s, %s, %s)
