-- As before, but a topic of Kafka's own and a header without a name are refused here, and not when the row is relayed.
-- No SET search_path: the outbox's own triggers and defaults, which are the user's, would run under it too.
CREATE OR REPLACE FUNCTION {outbox_emit}(topic TEXT, key TEXT, value JSONB, headers JSONB DEFAULT '{{}}')
RETURNS TEXT LANGUAGE plpgsql AS $emit$
DECLARE
    header RECORD;
    given  pg_catalog.jsonb := coalesce(headers, '{{}}'::pg_catalog.jsonb);
    named  pg_catalog.jsonb;
BEGIN
    IF topic IS NULL OR topic OPERATOR(pg_catalog.!~) '^[A-Za-z0-9._-]{{1,249}}$'
            OR topic OPERATOR(pg_catalog.=) ANY (ARRAY['.', '..']) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('topic: expected 1 to 249 letters, digits, dots, _ and - (given: %L)', topic);
    END IF;
    IF pg_catalog.starts_with(topic, '__') THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'topic: names that begin with __ are for Kafka''s own topics (given: %L)', topic
        );
    END IF;
    IF key IS NULL OR pg_catalog.length(key) OPERATOR(pg_catalog.>) 100 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('key: expected text of up to 100 characters (given: %L)', key);
    END IF;
    IF pg_catalog.jsonb_typeof(given) OPERATOR(pg_catalog.<>) 'object' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('headers: expected a JSON object of texts (given: %s)', headers);
    END IF;
    FOR header IN SELECT * FROM pg_catalog.jsonb_each(given) AS each (name, content) LOOP
        IF header.name OPERATOR(pg_catalog.=) '' THEN
            RAISE invalid_parameter_value USING MESSAGE = 'headers: a header needs a name';
        END IF;
        IF pg_catalog.jsonb_typeof(header.content) OPERATOR(pg_catalog.<>) 'string' THEN
            RAISE invalid_parameter_value USING
                MESSAGE = pg_catalog.format('headers.%s: expected text (given: %s)', header.name, header.content);
        END IF;
    END LOOP;
    named := pg_catalog.jsonb_build_object(
        'idempotency-key', pg_catalog.gen_random_uuid(),
        'occurred-at',
        pg_catalog.to_char(pg_catalog.clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')
    ) OPERATOR(pg_catalog.||) given;
    IF (pg_catalog.octet_length(value::pg_catalog.text) OPERATOR(pg_catalog.+)
            pg_catalog.octet_length(named::pg_catalog.text) OPERATOR(pg_catalog.+)
            pg_catalog.octet_length(key)) OPERATOR(pg_catalog.>) 999900 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format(
                'value: the record has %s bytes; Kafka takes 1,000,000', pg_catalog.octet_length(value::pg_catalog.text)
            );
    END IF;
    INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)
    SELECT pg_catalog.now(), topic, key,
           {outbox_value}(value::pg_catalog.text, (NULL::{outbox}).kafka_value OPERATOR(pg_catalog.||) ''),
           pg_catalog.array_agg(each.name), pg_catalog.array_agg(each.content)
    FROM pg_catalog.jsonb_each_text(named) AS each (name, content);
    RETURN named OPERATOR(pg_catalog.->>) 'idempotency-key';
END
$emit$;
