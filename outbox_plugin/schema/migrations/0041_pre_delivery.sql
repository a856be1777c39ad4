-- In which delivery the outbox is harvested; NULL until a harvester that says so has started.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS delivery TEXT NULL;
