-- Which ordering keys the rows of a large batch have. The batch's own transaction says so, for the leader would have to read
-- all of its rows to know, and live events would wait meanwhile.
-- `incarnation`: of the outbox that has the rows. `hash_form`: which expression made the hashes; those of another form are of
-- no use. `ids`: of all rows whose keys are among the hashes. `last_ids`, `last_writers`: the last of these rows, and the
-- transaction ids that wrote them. A summary counts while most of them are there: later their ids may be given again, to
-- rows with other keys. `key_hashes`: 8 bytes for each key, big-endian, joined.
CREATE TABLE IF NOT EXISTS {outbox_key_summary} (
    id           BIGINT         GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    incarnation  UUID           NOT NULL,
    hash_form    INTEGER        NOT NULL,
    ids          INT8MULTIRANGE NOT NULL,
    last_ids     BIGINT[]       NOT NULL,
    last_writers BIGINT[]       NOT NULL,
    key_hashes   BYTEA          NOT NULL
);
ALTER TABLE {outbox_key_summary} ALTER COLUMN key_hashes SET STORAGE EXTERNAL;
