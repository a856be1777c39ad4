"""Whether a harvester is ready, shard by shard: it leads and makes progress, or it stands by and could take over.

Threads that are alive prove nothing, so each rule asks when something was last *done*. The rules, in their order:

    what is known                                                   verdict
    the supervisor has not looked at the shard, or not lately       not ready
    Postgres has not answered lately, or its last answer failed     not ready
    leads, and moved lately                                         ready
    leads, and moved too long ago                                   not ready
    stands by, and somebody was known to lead lately                ready
    stands by, and nobody was known to lead lately                  not ready

A leader has *moved* when it has sent rows, when it had none to send, or when it was paused. A term that begins counts,
too, but no second one before the leader has moved in another way. A standby learns from heartbeats that somebody
leads, and heartbeats come through Kafka. So a standby that hears none either cannot reach Kafka, or should have taken
over and did not.

`now` and all times are seconds of one monotonic clock of this process.
"""

from __future__ import annotations

from dataclasses import dataclass

from outbox_plugin.core.readiness import NotReady, Readiness, Ready

STEP_SECONDS = 10.0  # The supervisor steps ten times a second.
POSTGRES_SECONDS = 15.0  # It is asked every 5 s, and an answer is waited for up to about 5 s.
LED_SECONDS = 10.0  # A takeover takes up to three seconds.
MOVED_SECONDS = 60.0  # A sweep finds a row whose id is out of order after 30 s, and a transaction may take as long.
ALIVE_SECONDS = 60.0  # A hand-over to others takes up to 20 s, and the supervisor makes no step meanwhile.


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a harvester knows of one shard. A time is None where nothing of the kind has happened.

    Args:
        stepped_at: when the supervisor last looked at the shard.
        leads: whether this harvester leads it.
        led_at: when it was last known that somebody leads it, this harvester or another.
        moved_at: when this harvester, as its leader, last sent rows, had none to send, or was paused.
        postgres_at: when Postgres last answered this harvester.
        postgres_error: why it does not now; None where its last answer was one.
        trouble: what hindered the shard last. It is shown with a verdict, which it may explain.
        paused: whether an operator has paused the shard.
    """

    stepped_at: float | None = None
    leads: bool = False
    led_at: float | None = None
    moved_at: float | None = None
    postgres_at: float | None = None
    postgres_error: str | None = None
    trouble: str | None = None
    paused: bool = False


def readiness(facts: ShardFacts, now: float) -> Readiness:
    """Whether a harvester is ready, as far as one shard is concerned; see the table above."""
    if facts.stepped_at is None:
        return NotReady("the harvester is starting")
    if _is_past(facts.stepped_at, STEP_SECONDS, now):
        return NotReady(f"the supervisor has done nothing for {now - facts.stepped_at:.0f} s")
    if facts.postgres_error is not None:
        return NotReady(facts.postgres_error)
    if facts.postgres_at is None:
        return NotReady("Postgres has not answered yet")
    if _is_past(facts.postgres_at, POSTGRES_SECONDS, now):
        return NotReady(f"Postgres has not answered for {now - facts.postgres_at:.0f} s")
    return _leads(facts, now) if facts.leads else _stands_by(facts, now)


def _leads(facts: ShardFacts, now: float) -> Readiness:
    if facts.moved_at is not None and not _is_past(facts.moved_at, MOVED_SECONDS, now):
        return Ready("leads, paused" if facts.paused else "leads")
    since = f"for {now - facts.moved_at:.0f} s" if facts.moved_at is not None else "yet"
    return NotReady(_with_trouble(f"leads, and has sent none of the rows that wait {since}", facts))


def _stands_by(facts: ShardFacts, now: float) -> Readiness:
    if facts.led_at is None:
        return NotReady(_with_trouble("no leader has been heard yet", facts))
    if _is_past(facts.led_at, LED_SECONDS, now):
        return NotReady(_with_trouble(f"no leader has been heard for {now - facts.led_at:.0f} s", facts))
    return Ready("stands by")


def _is_past(time: float, seconds: float, now: float) -> bool:
    return now - time > seconds


def _with_trouble(reason: str, facts: ShardFacts) -> str:
    return f"{reason}: {facts.trouble}" if facts.trouble else reason


def is_alive(*, runs: bool, stepped_at: float | None, now: float) -> bool:
    """Whether the supervisor works.

    Args:
        runs: whether its thread is alive.
        stepped_at: when it last made a step; None if it has made none yet, which is no fault.
        now: the present time, on the same clock, in seconds.
    """
    return runs and (stepped_at is None or not _is_past(stepped_at, ALIVE_SECONDS, now))
