-- Rows without a key, which an ALTER TABLE may have let in, wait in a lane of their own: they are all bad, and no row with a
-- key waits for them. By the key's hash, as a key may be longer than an index takes.
ALTER TABLE {outbox_parked} ADD COLUMN IF NOT EXISTS keyless BOOLEAN NOT NULL DEFAULT false;
DO $$
DECLARE
    only_lane TEXT;
BEGIN
    FOR only_lane IN
        SELECT conname FROM pg_constraint WHERE conrelid = to_regclass({quoted_outbox_parked}) AND contype = 'u'
    LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', to_regclass({quoted_outbox_parked}), only_lane);
    END LOOP;
END
$$;
CREATE UNIQUE INDEX IF NOT EXISTS outbox_parked_lane ON {outbox_parked}
    (table_name, kafka_topic, hashtextextended(kafka_key, 0), keyless) NULLS NOT DISTINCT;
