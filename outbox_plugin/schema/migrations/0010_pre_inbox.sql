-- Which events each consumer group has handled: one row per event, written in the transaction of its effect.
CREATE TABLE IF NOT EXISTS {outbox_inbox} (
    consumer_group  TEXT        NOT NULL,
    idempotency_key TEXT        NOT NULL,
    handled_at      TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, idempotency_key)
);
CREATE INDEX IF NOT EXISTS outbox_inbox_handled_at ON {outbox_inbox} (consumer_group, handled_at);

-- Records that a group gave up on, as they came, with the reason. `retry_at`: somebody asked to try again.
CREATE TABLE IF NOT EXISTS {outbox_inbox_dead_letter} (
    id                  BIGSERIAL   PRIMARY KEY,
    consumer_group      TEXT        NOT NULL,
    idempotency_key     TEXT        NOT NULL,
    kafka_topic         TEXT        NOT NULL,
    kafka_partition     INTEGER     NOT NULL,
    kafka_offset        BIGINT      NOT NULL,
    kafka_timestamp     BIGINT      NOT NULL,
    kafka_key           BYTEA       NULL,
    kafka_value         BYTEA       NULL,
    kafka_header_keys   TEXT[]      NOT NULL,
    kafka_header_values BYTEA[]     NOT NULL,
    error               TEXT        NOT NULL,
    attempts            INTEGER     NOT NULL,
    failed_at           TIMESTAMPTZ NOT NULL DEFAULT now(),
    retry_at          TIMESTAMPTZ NULL,
    UNIQUE (consumer_group, idempotency_key)
);
CREATE INDEX IF NOT EXISTS outbox_inbox_dead_letter_retry
    ON {outbox_inbox_dead_letter} (consumer_group) WHERE retry_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS outbox_inbox_dead_letter_failed_at ON {outbox_inbox_dead_letter} (consumer_group, failed_at);
