-- What a Kafka record has and goharvest's columns cannot hold: bytes that are no text, a partition, a timestamp. All of it is
-- NULL in other rows. A view has the columns that it is made with.
-- `kafka_key_bytes` and `kafka_value_bytes` stand in place of `kafka_key` and `kafka_value`, where they are not NULL.
-- `kafka_header_bytes` has all header values of the row, and `kafka_header_values` none. `kafka_header_keys` begins with the
-- name `outbox-record`, which has no value: a harvester that does not know the columns refuses the row for that.
DO $do$
BEGIN
    IF (SELECT relkind FROM pg_class WHERE oid = to_regclass({quoted_outbox})) IN ('r', 'p') THEN
        ALTER TABLE {outbox}
            ADD COLUMN IF NOT EXISTS kafka_key_bytes BYTEA NULL,
            ADD COLUMN IF NOT EXISTS kafka_value_bytes BYTEA NULL,
            ADD COLUMN IF NOT EXISTS kafka_header_bytes BYTEA[] NULL,
            ADD COLUMN IF NOT EXISTS kafka_partition INTEGER NULL,
            ADD COLUMN IF NOT EXISTS kafka_timestamp TIMESTAMPTZ NULL;
    END IF;
END $do$;
ALTER TABLE {outbox_dead_letter}
    ADD COLUMN IF NOT EXISTS kafka_key_bytes BYTEA NULL,
    ADD COLUMN IF NOT EXISTS kafka_value_bytes BYTEA NULL,
    ADD COLUMN IF NOT EXISTS kafka_header_bytes BYTEA[] NULL,
    ADD COLUMN IF NOT EXISTS kafka_partition INTEGER NULL,
    ADD COLUMN IF NOT EXISTS kafka_timestamp TIMESTAMPTZ NULL;
ALTER TABLE {outbox_history}
    ADD COLUMN IF NOT EXISTS kafka_key_bytes BYTEA NULL,
    ADD COLUMN IF NOT EXISTS kafka_value_bytes BYTEA NULL,
    ADD COLUMN IF NOT EXISTS kafka_header_bytes BYTEA[] NULL,
    ADD COLUMN IF NOT EXISTS kafka_partition INTEGER NULL,
    ADD COLUMN IF NOT EXISTS kafka_timestamp TIMESTAMPTZ NULL;

-- A harvester of an earlier version would make such a row a dead letter without these columns. It parks the row instead.
ALTER TABLE {outbox_dead_letter} DROP CONSTRAINT IF EXISTS outbox_dead_letter_is_whole;
ALTER TABLE {outbox_dead_letter} ADD CONSTRAINT outbox_dead_letter_is_whole
    CHECK (kafka_header_keys[1] IS DISTINCT FROM 'outbox-record' OR kafka_header_bytes IS NOT NULL) NOT VALID;

-- Emit a whole record from any language, in the transaction of the call; returns its idempotency key. Refuses what the
-- harvester could not send, so that the caller learns it, and not Kafka. A NULL value is a tombstone. Bytes that are a text
-- are ordered with the events that have this text as their key.
-- No SET search_path: the outbox's own triggers and defaults, which are the user's, would run under it too.
CREATE OR REPLACE FUNCTION {outbox_emit_record}(
    topic TEXT, key BYTEA, value BYTEA, header_names TEXT[] DEFAULT '{{}}', header_values BYTEA[] DEFAULT '{{}}',
    partition INTEGER DEFAULT NULL, record_timestamp TIMESTAMPTZ DEFAULT NULL
)
RETURNS TEXT LANGUAGE plpgsql AS $emit$
DECLARE
    names        pg_catalog.text[] := coalesce(header_names, '{{}}'::pg_catalog.text[]);
    bodies       pg_catalog.bytea[] := coalesce(header_values, '{{}}'::pg_catalog.bytea[]);
    ordering_key pg_catalog.text;
    identity     pg_catalog.text;
    place        pg_catalog.int4;
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
    IF key IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'key: expected bytes (given: NULL)';
    END IF;
    IF pg_catalog.array_ndims(names) OPERATOR(pg_catalog.>) 1 OR pg_catalog.array_ndims(bodies) OPERATOR(pg_catalog.>) 1
            OR pg_catalog.cardinality(names) OPERATOR(pg_catalog.<>) pg_catalog.cardinality(bodies) THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'headers: expected two arrays of one length (given: %s names and %s values)',
            pg_catalog.cardinality(names), pg_catalog.cardinality(bodies)
        );
    END IF;
    IF '' OPERATOR(pg_catalog.=) ANY (names) OR pg_catalog.array_position(names, NULL) IS NOT NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'headers: a header needs a name';
    END IF;
    IF partition OPERATOR(pg_catalog.<) 0 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('partition: expected 0 or more (given: %s)', partition);
    END IF;
    IF record_timestamp OPERATOR(pg_catalog.<) '1970-01-01 00:00:00.001+00'::pg_catalog.timestamptz
            OR NOT pg_catalog.isfinite(record_timestamp) THEN
        RAISE invalid_parameter_value USING
            MESSAGE = pg_catalog.format('record_timestamp: expected a time after 1970 began (given: %L)', record_timestamp);
    END IF;
    BEGIN
        ordering_key := pg_catalog.convert_from(key, 'UTF8');
    EXCEPTION WHEN character_not_in_repertoire OR untranslatable_character THEN
        ordering_key := NULL;
    END;
    IF ordering_key IS NULL OR pg_catalog.length(ordering_key) OPERATOR(pg_catalog.>) 100 THEN
        ordering_key := CASE WHEN pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) 48
            THEN 'hex:' OPERATOR(pg_catalog.||) pg_catalog.encode(key, 'hex')
            ELSE 'sha256:' OPERATOR(pg_catalog.||) pg_catalog.encode(pg_catalog.sha256(key), 'hex') END;
    END IF;
    IF NOT 'occurred-at' OPERATOR(pg_catalog.=) ANY (names) THEN
        names := pg_catalog.array_prepend('occurred-at', names);
        bodies := pg_catalog.array_prepend(pg_catalog.convert_to(
            pg_catalog.to_char(pg_catalog.clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'), 'UTF8'
        ), bodies);
    END IF;
    place := pg_catalog.array_position(names, 'idempotency-key');
    IF place IS NULL THEN
        identity := pg_catalog.gen_random_uuid()::pg_catalog.text;
        names := pg_catalog.array_prepend('idempotency-key', names);
        bodies := pg_catalog.array_prepend(pg_catalog.convert_to(identity, 'UTF8'), bodies);
    ELSE
        identity := pg_catalog.encode(bodies[place], 'escape');
    END IF;
    IF (coalesce(pg_catalog.octet_length(value), 0) OPERATOR(pg_catalog.+) pg_catalog.octet_length(key) OPERATOR(pg_catalog.+)
            pg_catalog.octet_length(pg_catalog.array_send(names)) OPERATOR(pg_catalog.+)
            pg_catalog.octet_length(pg_catalog.array_send(bodies))) OPERATOR(pg_catalog.>) 999900 THEN
        RAISE invalid_parameter_value USING MESSAGE = pg_catalog.format(
            'value: the record has %s bytes in its value; Kafka takes 1,000,000 with key and headers',
            coalesce(pg_catalog.octet_length(value), 0)
        );
    END IF;
    INSERT INTO {outbox} (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
                          kafka_key_bytes, kafka_value_bytes, kafka_header_bytes, kafka_partition, kafka_timestamp)
    VALUES (pg_catalog.now(), topic, ordering_key, NULL, pg_catalog.array_prepend('outbox-record', names), '{{}}',
            key, value, bodies, partition, record_timestamp);
    RETURN identity;
END
$emit$;
