"""Writes a harvester's events to the log. It decides which are logged, at which level and with which fields."""

from __future__ import annotations

import logging
from collections.abc import Callable

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

SAME_REASON_SECONDS = 60.0  # Takeovers that fail for the same reason are logged no sooner than so long after another.


class EventLog:
    """The log of one harvester's events."""

    def __init__(self, now: Callable[[], float]) -> None:
        """Nothing has been logged yet. `now` is the clock of the harvester's runtime."""
        self._now = now
        # By shard, when each reason of a takeover that failed was logged; forgotten when a takeover succeeds.
        self._failures: dict[int, dict[str, float]] = {}

    def write(self, event: HarvestEvent) -> None:
        """Log an event that operators should know of. All other events are only for metrics."""
        of_shard: dict[str, object] = {"shard": event.shard}  # Fields of the log record, beside its text.
        match event:
            case TermBegan():
                self._failures.pop(event.shard, None)
                logger.info(
                    "shard %d: leading as %s (%d published rows of the last leader deleted)",
                    event.shard,
                    event.leader_id,
                    event.recovered,
                    extra={**of_shard, "leader": event.leader_id, "term": event.term},
                )
            case TermFinished():
                self._write_end(event)
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

    def _write_end(self, event: TermFinished) -> None:
        leader: dict[str, object] = {"shard": event.shard, "leader": event.leader_id}
        if event.reason is None:
            done = "handed over" if event.has_led else "stopped before it has taken over"
            logger.info("shard %d: %s", event.shard, done, extra=leader)
        elif event.has_led:
            level = logging.INFO if event.is_planned else logging.WARNING
            logger.log(level, "shard %d: leading no more: %s", event.shard, event.reason, extra=leader)
        elif self._is_news(event.shard, event.reason):
            logger.warning("shard %d: the takeover failed: %s", event.shard, event.reason, extra=leader)

    def _is_news(self, shard: int, reason: str) -> bool:
        """Whether no takeover of the shard that failed for this reason has been logged lately.

        While the cause lasts, harvesters try again every few seconds.
        """
        now = self._now()
        lately = {each: at for each, at in self._failures.get(shard, {}).items() if now - at < SAME_REASON_SECONDS}
        is_news = reason not in lately
        self._failures[shard] = lately | ({reason: now} if is_news else {})
        return is_news
