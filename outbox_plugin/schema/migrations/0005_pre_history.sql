-- Published rows that are kept for a while (OUTBOX_RETENTION), a partition a day; a day is dropped as a whole.
CREATE TABLE IF NOT EXISTS {outbox_history} (
    table_name          TEXT        NOT NULL,
    id                  BIGINT      NOT NULL,
    published_at        TIMESTAMPTZ NOT NULL,
    create_time         TIMESTAMPTZ NOT NULL,
    kafka_topic         TEXT        NOT NULL,
    kafka_key           TEXT        NOT NULL,
    kafka_value         BYTEA       NULL,
    kafka_header_keys   TEXT[]      NOT NULL,
    kafka_header_values TEXT[]      NOT NULL
) PARTITION BY RANGE (published_at);
CREATE INDEX IF NOT EXISTS outbox_history_key ON {outbox_history} (table_name, kafka_topic, kafka_key, id);
