-- Which generation of its transactional id each slice of the keys uses, by the slice's name; 0 where there is none. Never
-- set back, also not with the layout: a leader of a lower one is fenced no more.
ALTER TABLE {outbox_identity} ADD COLUMN IF NOT EXISTS generations JSONB NOT NULL DEFAULT '{{}}';
