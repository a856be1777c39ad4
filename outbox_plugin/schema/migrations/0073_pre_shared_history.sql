-- How long an outbox keeps its published rows (OUTBOX_RETENTION), as the harvester that started last says; NULL if it keeps
-- none. Outboxes of one schema share the history, so a day of it is dropped only when the longest of their times is over.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS history_kept INTERVAL NULL;
