-- Spark jobs whose rows are in the outbox: a job that is run again under the same id writes nothing.
CREATE TABLE IF NOT EXISTS {outbox_job} (
    job_id       TEXT        PRIMARY KEY,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    events       BIGINT      NOT NULL
);
