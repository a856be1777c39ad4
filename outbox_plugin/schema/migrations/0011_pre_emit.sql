-- Emit an event from any language, in the transaction of the call; returns its idempotency key. A NULL value is a
-- tombstone. Refuses what the harvester could not send, so that the caller learns it, and not Kafka.
CREATE OR REPLACE FUNCTION {outbox_emit}(topic TEXT, key TEXT, value JSONB, headers JSONB DEFAULT '{{}}')
RETURNS TEXT LANGUAGE plpgsql AS $emit$
DECLARE
    header RECORD;
    named  JSONB;
BEGIN
    IF topic IS NULL OR topic !~ '^[A-Za-z0-9._-]{{1,249}}$' OR topic IN ('.', '..') THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('topic: expected 1 to 249 letters, digits, dots, _ and - (given: %L)', topic);
    END IF;
    IF key IS NULL OR length(key) > 100 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('key: expected text of up to 100 characters (given: %L)', key);
    END IF;
    IF jsonb_typeof(coalesce(headers, '{{}}')) <> 'object' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('headers: expected a JSON object of texts (given: %s)', headers);
    END IF;
    FOR header IN SELECT * FROM jsonb_each(headers) AS each (name, content) LOOP
        IF jsonb_typeof(header.content) <> 'string' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = format('headers.%s: expected text (given: %s)', header.name, header.content);
        END IF;
    END LOOP;
    named := jsonb_build_object(
        'idempotency-key', gen_random_uuid(),
        'occurred-at', to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
    ) || coalesce(headers, '{{}}');
    IF octet_length(value::text) + octet_length(named::text) + octet_length(key) > 999900 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('value: the record has %s bytes; Kafka takes 1,000,000', octet_length(value::text));
    END IF;
    INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
    SELECT now(), topic, key, {outbox_value}({outbox_bytes}(value::text), (NULL::{outbox}).kafka_value),
           array_agg(each.name), array_agg(each.content)
    FROM jsonb_each_text(named) AS each (name, content);
    RETURN named ->> 'idempotency-key';
END
$emit$;
