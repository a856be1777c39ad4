"""Writes a harvester's events to the log. It decides which are logged, at which level and with which fields."""

from __future__ import annotations

import logging

from outbox_plugin.printable import logger_of
from outbox_plugin.relay.events import (
    GenerationRaised,
    HarvestEvent,
    KeysHeld,
    KeysSummarised,
    LiveRowsJoined,
    RecordsIgnored,
    RowsDeadLettered,
    RowsParked,
    TermBegan,
    TermFinished,
)

logger = logger_of("outbox_plugin.harvester")


def log_event(event: HarvestEvent) -> None:
    """Log an event that operators should know of. All other events are only for metrics."""
    of_shard: dict[str, object] = {"shard": event.shard}  # Fields of the log record, beside its text.
    match event:
        case TermBegan():
            logger.info(
                "shard %d: leading as %s (%d published rows of the last leader deleted)",
                event.shard,
                event.leader_id,
                event.recovered,
                extra={**of_shard, "leader": event.leader_id, "term": event.term},
            )
        case TermFinished():
            leader = {**of_shard, "leader": event.leader_id}
            if event.reason is None:
                logger.info("shard %d: handed over", event.shard, extra=leader)
            else:
                level = logging.INFO if event.is_planned else logging.WARNING
                logger.log(level, "shard %d: leading no more: %s", event.shard, event.reason, extra=leader)
        case RowsParked() | RowsDeadLettered():
            done = "waits" if isinstance(event, RowsParked) else "is a dead letter"
            for bad in event.bad:
                row, reason = bad.row, bad.refusal.reason
                whose = f"topic {row.topic}, key {row.key}"
                named = {**of_shard, "topic": row.topic, "key": row.key}
                logger.warning("row %d (%s) %s: %s", row.id, whose, done, reason, extra=named)
        case GenerationRaised():
            logger.warning(
                "shard %d: a transaction that touched a partition without a leader cannot end yet; going on with "
                "generation %d of the transactional id",
                event.shard,
                event.generation,
                extra=of_shard,
            )
        case RecordsIgnored():
            logger.warning("shard %d: %s", event.shard, event.message(), extra=of_shard)
        case KeysSummarised():
            level = logging.INFO if event.error is None else logging.WARNING
            logger.log(level, "shard %d: %s", event.shard, event.message(), extra=of_shard)
        case LiveRowsJoined():
            logger.info("shard %d: the backlog has been read", event.shard, extra=of_shard)
        case KeysHeld():
            for key in event.keys:
                named = {**of_shard, "topic": key.topic, "key": key.key}
                logger.warning("shard %d: %s", event.shard, event.message(key), extra=named)
        case _:
            pass
