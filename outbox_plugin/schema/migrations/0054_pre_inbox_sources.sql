-- Of which topic, and type, the events are that have this key: one key on two topics is two events. NULL where an earlier
-- version has recorded it: that one did not tell them apart, so it counts for all.
ALTER TABLE {outbox_inbox} ADD COLUMN IF NOT EXISTS sources TEXT[] NULL;

-- Two events of one key may both be dead letters. That no event is one twice, its row in the inbox sees to; and 0055.
DO $$
DECLARE
    only_key TEXT;
BEGIN
    FOR only_key IN
        SELECT conname FROM pg_constraint WHERE conrelid = to_regclass({quoted_outbox_inbox_dead_letter}) AND contype = 'u'
    LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', to_regclass({quoted_outbox_inbox_dead_letter}), only_key);
    END LOOP;
END
$$;
