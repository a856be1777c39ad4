-- How many events a job has emitted into each outbox of this schema, by the table's name: jobs of two outboxes may have
-- one id. NULL where an earlier version has recorded the job: it did not say for which outbox, so it counts for all.
ALTER TABLE {outbox_job} ADD COLUMN IF NOT EXISTS events_by_outbox JSONB NULL;

-- Whose staging table it is; NULL where an earlier version has registered it.
ALTER TABLE {outbox_staging} ADD COLUMN IF NOT EXISTS outbox_name TEXT NULL;
