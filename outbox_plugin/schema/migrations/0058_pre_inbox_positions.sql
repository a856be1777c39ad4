-- How far each group has handled each partition. Kafka forgets the offsets of a group that has no member for a while
-- (offsets.retention.minutes); a row here stays. `topic_id` is Kafka's: a topic that was made anew has another one.
-- `next_offset`: the first offset that has not been handled.
CREATE TABLE IF NOT EXISTS {outbox_inbox_position} (
    consumer_group  TEXT        NOT NULL,
    kafka_topic     TEXT        NOT NULL,
    kafka_partition INTEGER     NOT NULL,
    topic_id        TEXT        NOT NULL,
    next_offset     BIGINT      NOT NULL,
    moved_at        TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer_group, kafka_topic, kafka_partition)
);
