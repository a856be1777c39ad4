"""The inbox: consume topics, and let each event have its effect once.

The handler runs inside a database transaction that also records the event's idempotency key. So the transaction is the
commit point: an event that Kafka delivers again, after a crash or to another process, finds its key and is left out.
Offsets are committed afterwards, and positions written, as a hint where to go on: for as long as keys are remembered,
nothing rests on them but work saved.

Each key of a partition has a queue, and its records are handled in their order, one after the other. Queues are handled
side by side, up to a limit. A record that fails delays only its own queue, until it succeeds or becomes a dead letter.
While many records wait, one transaction handles those of many queues, with one statement that records them all. If a
handler fails, that transaction is rolled back, and each record gets a transaction of its own.

Authority: the primary key of `outbox_inbox`. Two processes that hold one record, as they may around a rebalance, meet
there: the second waits for the first one's transaction, and leaves out what that has committed.

    received            what a handler gets                                           pure
    cloud_event         reads a CloudEvent from it
    key_queues          which records may be handled now; up to where each partition is done    pure
    batch_limit         how many records one transaction handles                      pure
    retry               whether a failed record is tried again, and when              pure
    halving             how a batch that fails is divided                             pure
    dispatcher          key_queues and batch_limit behind a lock: the poller adds records, workers take them
    workers             threads or asyncio tasks that take records and have them handled
    session             a worker's connection and handler; proves that a transaction is the one that was begun
    process_span        what the span of a handler's run says                         pure
    traced_session      a session with such a span around each run, where OpenTelemetry has a tracer
    handling            turns records into transactions, and transactions into outcomes
    handled_keys        records in the transaction of an effect that its event is handled
    consumer            `Inbox`: makes the parts, runs them, and hands its partitions over
    consumer_config     the configuration of its Kafka consumer
    start_check         checks the servers and the tables before it starts
    poll_loop           owns the Kafka consumer: polls, hands the records on, commits offsets
    kafka_records       converts between Kafka's objects and ours
    assignments         begins to fetch the partitions that are assigned, and gives up those that are revoked
    handover            keeps a partition from its next owner while a handler of the last one still runs
    pauses              pauses partitions that hold too much of the memory, or wait for their positions
    positions           where a group goes on when Kafka has forgotten its offsets
    reached_positions   the positions that housekeeping is to write
    rereader            reads partitions again that were truncated, or whose topics were recreated
    unread_deletions    notices offsets that Kafka has deleted before they were read
    housekeeping        writes positions, fetches dead letters that are tried again, and cleans
    dead_letters        events that groups gave up on; `command` is `outbox inbox`
    retention           deletes what was kept for long enough
    events              what happens, as values
    inbox_telemetry     serves metrics, made of these events, and readiness
    inbox_readiness     whether an inbox makes progress                               pure
"""

from __future__ import annotations

from outbox_plugin.inbox.consumer import Inbox
from outbox_plugin.inbox.received import Received
from outbox_plugin.inbox.retry import Retry

__all__ = ["Inbox", "Received", "Retry"]
