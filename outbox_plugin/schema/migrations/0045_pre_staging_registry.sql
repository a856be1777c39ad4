-- Which table each entry is: only a table that is entered here is ever removed. An earlier version enters a name alone.
ALTER TABLE {outbox_staging} ADD COLUMN IF NOT EXISTS table_oid OID NULL;
