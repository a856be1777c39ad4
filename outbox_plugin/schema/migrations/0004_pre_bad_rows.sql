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
    kafka_value         TEXT        NULL,
    kafka_header_keys   TEXT[]      NOT NULL,
    kafka_header_values TEXT[]      NOT NULL
);
