-- What the last batch of a streaming query emitted, by which a repeat of it is told from other rows under its number: the
-- batch's number, how many events it had, and a sum over the hashes of their topics, keys and values. NULL: nobody knows.
ALTER TABLE {outbox_stream} ADD COLUMN IF NOT EXISTS digest TEXT NULL;
