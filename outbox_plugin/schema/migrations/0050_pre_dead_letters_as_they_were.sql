-- Events that Spark has set aside: a key or a topic that was missing is missing here too, and `altered` names the columns
-- whose text is not what it was, because Postgres cannot store that. Neither can be emitted again as it was.
ALTER TABLE {outbox_dead_letter} ALTER COLUMN kafka_topic DROP NOT NULL, ALTER COLUMN kafka_key DROP NOT NULL;
ALTER TABLE {outbox_dead_letter} ADD COLUMN IF NOT EXISTS altered TEXT[] NULL;

-- Earlier versions put an empty text for a missing one, and U+FFFD into values too; the reason says so. They set no
-- `row_id`, which a harvester sets.
UPDATE {outbox_dead_letter}
SET kafka_key = CASE WHEN row_id IS NULL AND reason LIKE 'key: null,%' THEN NULLIF(kafka_key, '') ELSE kafka_key END,
    kafka_topic = CASE WHEN row_id IS NULL THEN NULLIF(kafka_topic, '') ELSE kafka_topic END,
    altered = CASE WHEN row_id IS NULL AND reason ~ '^[a-z]+: has (the character NUL|bytes that are not UTF-8)'
                   THEN ARRAY[split_part(reason, ':', 1)] ELSE '{{}}' END
WHERE altered IS NULL;
ALTER TABLE {outbox_dead_letter} ALTER COLUMN altered SET DEFAULT '{{}}', ALTER COLUMN altered SET NOT NULL;
