-- Up to where each consumer has had its effects in each topic: moved in the transaction of the effects. A backfill has a
-- position of its own. `topic_id` is Kafka's: a topic that was made anew has another one. `next_offsets`: by partition, the
-- first offset that has had no effect. `lost`: how many offsets Kafka had deleted before they were consumed, since somebody
-- last set the position.
CREATE TABLE IF NOT EXISTS {outbox_consumer_position} (
    consumer     TEXT        NOT NULL,
    backfill     TEXT        NOT NULL,
    kafka_topic  TEXT        NOT NULL,
    topic_id     TEXT        NOT NULL,
    next_offsets JSONB       NOT NULL,
    lost         BIGINT      NOT NULL DEFAULT 0,
    moved_at     TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, backfill, kafka_topic)
);
