"""Whether a consumer is ready: it makes progress, or it has nothing to do. Decides only.

Threads that are alive prove nothing, so each rule asks when something was last *done*. The rules, in their order:

    what is known                                                              verdict
    the coordination topic is not followed, or was not lately                  not ready
    Kafka has not answered yet, or not lately                                  not ready
    the coordination topic has not confirmed a claim within its lease          not ready
    holds partitions, and nobody has polled lately: a handler hangs            not ready
    anything else                                                              ready

`now` and all times are seconds of one monotonic clock of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outbox_plugin.core.readiness import NotReady, Readiness, Ready
from outbox_plugin.core.topic_partition import TopicPartition

FOLLOWED_SECONDS = 10.0  # The topic is read twenty times a second.
KAFKA_SECONDS = 15.0  # It is asked every 5 s, and an answer is waited for up to 5 s.
POLLED_SECONDS = 60.0
ALIVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ConsumerFacts:
    """What an instance knows of itself. A time is None where nothing of the kind has happened.

    Attributes:
        followed_at: when it last read the coordination topic.
        polled_at: when it was last polled.
        confirmed_at: when the last message that counted was sent, of the held partition whose is the oldest.
        offsets: the held partitions, and where another instance would go on in each.
        all_confirmed: whether all of them are certainly held now.
    """

    followed_at: float | None = None
    polled_at: float | None = None
    confirmed_at: float | None = None
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    all_confirmed: bool = True


def readiness(facts: ConsumerFacts, kafka_at: float | None, kafka_error: str | None, now: float) -> Readiness:
    """Whether a consumer is ready; see the table above.

    Args:
        facts: what its instance knows.
        kafka_at: when Kafka last answered.
        kafka_error: why it did not the last time; None where it did.
        now: monotonic seconds.
    """
    if facts.followed_at is None:
        return NotReady("the consumer is starting")
    if (seconds := now - facts.followed_at) > FOLLOWED_SECONDS:
        return NotReady(f"the coordination topic has not been read for {seconds:.0f} s")
    if kafka_at is None or now - kafka_at > KAFKA_SECONDS:
        lacks = "yet" if kafka_at is None else f"for {now - kafka_at:.0f} s"
        return NotReady(f"Kafka has not answered {lacks}" + (f": {kafka_error}" if kafka_error else ""))
    if not facts.offsets:
        return Ready("has no partitions")
    if not facts.all_confirmed:
        return NotReady("the coordination topic does not confirm what it holds")
    if facts.polled_at is not None and (seconds := now - facts.polled_at) > POLLED_SECONDS:
        return NotReady(f"nobody has polled for {seconds:.0f} s")
    return Ready(f"holds {len(facts.offsets)} partitions")


def is_alive(*, runs: bool, followed_at: float | None, now: float) -> bool:
    """Whether the coordination topic is followed: the thread runs, and has read lately, or not yet.

    Args:
        runs: whether the thread has not ended.
        followed_at: when the topic was last read; None before the first time.
        now: the time.
    """
    return runs and (followed_at is None or now - followed_at <= ALIVE_SECONDS)
