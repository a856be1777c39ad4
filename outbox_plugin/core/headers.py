"""The names of the record headers that this package writes and reads."""

from __future__ import annotations

IDEMPOTENCY_HEADER = "idempotency-key"
EVENT_TYPE_HEADER = "event-type"
OCCURRED_AT_HEADER = "occurred-at"
CONTENT_TYPE_HEADER = "content-type"
CONTENT_SCHEMA_HEADER = "content-schema"
JOB_HEADER = "outbox-job"  # The Spark job or streaming query that emitted the event.
SEQUENCE_HEADER = "outbox-sequence"  # The event's place within its job, from 1 on.
REPLAY_HEADER = "outbox-replay"  # The former id of an event that `outbox replay` has emitted again.
CLAIM_CHECK_HEADER = "claim-check"  # The object that holds the value in place of the record.
