-- No record is a dead letter of a group twice. By the key's hash: a long key beside a long topic is more than an index takes,
-- as 0054 had it at first. The key is needed: in a topic that was made anew, another event has the same place.
DROP INDEX IF EXISTS {outbox_inbox_dead_letter_record};
CREATE UNIQUE INDEX outbox_inbox_dead_letter_record ON {outbox_inbox_dead_letter}
    (consumer_group, hashtextextended(idempotency_key, 0), kafka_topic, kafka_partition, kafka_offset);
