-- Staging tables that Spark's tasks fill while no session of the driver's can hold them, and until when each is theirs.
CREATE TABLE IF NOT EXISTS {outbox_staging} (
    name         TEXT        PRIMARY KEY,
    job_id       TEXT        NOT NULL,
    leased_until TIMESTAMPTZ NOT NULL
);

-- How far each streaming query is: its last batch whose events are in the outbox, and how many events it has emitted.
CREATE TABLE IF NOT EXISTS {outbox_stream} (
    query_id     TEXT        PRIMARY KEY,
    batch_id     BIGINT      NOT NULL,
    events       BIGINT      NOT NULL,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT now()
);
