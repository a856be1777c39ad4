"""Whether an inbox is ready: it makes progress, or it has nothing to do. Decides only.

Threads that are alive prove nothing, so each rule asks when something was last *done*. The rules, in their order:

    what is known                                                        verdict
    the poller has not polled yet, or not lately                         not ready
    Postgres has not answered yet, or not lately                         not ready
    Kafka has not answered yet, or not lately                            not ready
    partitions have waited too long for the position to go on from       not ready
    a worker has had its records for too long: a handler hangs           not ready
    records wait, and none was done lately                               not ready
    anything else                                                        ready

A record is *done* when it was handled, left out, or dead-lettered. `now` and all times are seconds of one monotonic
clock of this process.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.core.readiness import NotReady, Readiness, Ready

POLLED_SECONDS = 30.0  # A rebalance waits up to 20 s for handlers.
POSTGRES_SECONDS = 15.0  # Housekeeping asks every second, and after a failure every 5 s.
KAFKA_SECONDS = 15.0  # It is asked every 5 s, and an answer is waited for up to 5 s.
DONE_SECONDS = 60.0  # Retries are 30 s apart at most, unless the inbox is given a longer time.
ALIVE_SECONDS = 300.0  # Kafka takes the partitions of one that has not polled for so long (max.poll.interval.ms).


@dataclass(frozen=True, slots=True)
class DispatcherFacts:
    """What the dispatcher knows. A time is None where there is nothing of the kind.

    Attributes:
        taken_at: when the records that were taken first, of those being handled, were taken.
        waiting_since: where records wait or are being handled: when one was last done, or the first of them came.
    """

    taken_at: float | None = None
    waiting_since: float | None = None


@dataclass(frozen=True, slots=True)
class InboxFacts:
    """What an inbox knows of itself. A time is None where nothing of the kind has happened.

    Attributes:
        polled_at: when it last polled.
        postgres_at, kafka_at: when the server last answered.
        postgres_error, kafka_error: why it did not the last time; None where it did.
        positions_at: when all its partitions last had a position to go on from.
        dispatcher: what the dispatcher knows.
        partitions: how many partitions it has.
    """

    polled_at: float | None = None
    postgres_at: float | None = None
    postgres_error: str | None = None
    kafka_at: float | None = None
    kafka_error: str | None = None
    positions_at: float | None = None
    dispatcher: DispatcherFacts = DispatcherFacts()
    partitions: int = 0


def readiness(facts: InboxFacts, now: float) -> Readiness:
    """Whether an inbox is ready; see the table above."""
    if facts.polled_at is None:
        return NotReady("the inbox is starting")
    if (seconds := now - facts.polled_at) > POLLED_SECONDS:
        return NotReady(f"it has not polled for {seconds:.0f} s")
    return (
        _silent("Postgres", facts.postgres_at, facts.postgres_error, now - POSTGRES_SECONDS, now)
        or _silent("Kafka", facts.kafka_at, facts.kafka_error, now - KAFKA_SECONDS, now)
        or _stuck(facts, now)
        or Ready(_doing(facts))
    )


def _silent(server: str, answered_at: float | None, error: str | None, since: float, now: float) -> NotReady | None:
    if answered_at is not None and answered_at >= since:
        return None
    lacks = "yet" if answered_at is None else f"for {now - answered_at:.0f} s"
    return NotReady(f"{server} has not answered {lacks}" + (f": {error}" if error else ""))


def _stuck(facts: InboxFacts, now: float) -> NotReady | None:
    long_ago, dispatcher = now - DONE_SECONDS, facts.dispatcher
    if facts.positions_at is not None and facts.positions_at < long_ago:
        return NotReady(f"partitions have waited for their positions for {now - facts.positions_at:.0f} s")
    if dispatcher.taken_at is not None and dispatcher.taken_at < long_ago:
        return NotReady(f"a handler has not finished for {now - dispatcher.taken_at:.0f} s")
    if dispatcher.waiting_since is not None and dispatcher.waiting_since < long_ago:
        return NotReady(f"none of the records that wait was done for {now - dispatcher.waiting_since:.0f} s")
    return None


def _doing(facts: InboxFacts) -> str:
    if not facts.partitions:
        return "has no partitions"
    return "idle" if facts.dispatcher.waiting_since is None else "handles records"


def is_alive(*, runs: bool, polled_at: float | None, now: float) -> bool:
    """Whether the inbox runs: its thread does, and it has polled lately, or not yet.

    Args:
        runs: whether the thread has not ended.
        polled_at: when it last polled; None before the first time.
        now: the time.
    """
    return runs and (polled_at is None or now - polled_at <= ALIVE_SECONDS)
