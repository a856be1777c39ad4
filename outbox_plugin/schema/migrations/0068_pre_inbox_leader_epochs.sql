-- By the topic's id, the positions that the group has reached, each with the leader epoch of the record before it:
-- [[next_offset, leader_epoch], ...]. NULL: none is known. An inbox of an earlier version moves `next_offset` alone.
ALTER TABLE {outbox_inbox_position} ADD COLUMN IF NOT EXISTS leader_epochs JSONB NULL;
