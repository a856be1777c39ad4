-- A value as bytes, and back: an outbox has its values as text or as bytes; of `like_this` only the type counts.
CREATE OR REPLACE FUNCTION {outbox_bytes}(value TEXT) RETURNS BYTEA LANGUAGE sql STABLE
AS $$ SELECT convert_to(value, 'UTF8') $$;
CREATE OR REPLACE FUNCTION {outbox_bytes}(value BYTEA) RETURNS BYTEA LANGUAGE sql STABLE AS $$ SELECT value $$;
CREATE OR REPLACE FUNCTION {outbox_value}(value BYTEA, like_this TEXT) RETURNS TEXT LANGUAGE sql STABLE
AS $$ SELECT convert_from(value, 'UTF8') $$;
CREATE OR REPLACE FUNCTION {outbox_value}(value BYTEA, like_this BYTEA) RETURNS BYTEA LANGUAGE sql STABLE
AS $$ SELECT value $$;

-- Lanes that wait behind a bad row: a key of a topic, or the whole topic where `kafka_key` is NULL.
CREATE TABLE IF NOT EXISTS {outbox_parked} (
    table_name  TEXT        NOT NULL,
    kafka_topic TEXT        NOT NULL,
    kafka_key   TEXT        NULL,
    row_id      BIGINT      NOT NULL,
    reason      TEXT        NOT NULL,
    since       TIMESTAMPTZ NOT NULL DEFAULT now(),
    UNIQUE NULLS NOT DISTINCT (table_name, kafka_topic, kafka_key)
);

-- Rows that Kafka refused for what they are, where the policy is not to let their key wait.
CREATE TABLE IF NOT EXISTS {outbox_dead_letter} (
    id                  BIGSERIAL   PRIMARY KEY,
    table_name          TEXT        NOT NULL,
    row_id              BIGINT      NULL,
    reason              TEXT        NOT NULL,
    buried_at           TIMESTAMPTZ NOT NULL DEFAULT now(),
    create_time         TIMESTAMPTZ NOT NULL,
    kafka_topic         TEXT        NOT NULL,
    kafka_key           TEXT        NOT NULL,
    kafka_value         BYTEA       NULL,
    kafka_header_keys   TEXT[]      NOT NULL,
    kafka_header_values TEXT[]      NOT NULL
);
