"""Verifies the content of topics: each event once, each key in order, no event missing.

`verdict` and `verifier` are pure. `topic_reader` reads topics in this process, `on_spark` reads them with Spark, and
`emitted_counts` asks Postgres how many events a job has emitted. `command` is `outbox verify`.
"""
