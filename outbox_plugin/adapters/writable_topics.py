"""Which topics a producer may write to now: those that are unknown are looked up together, and nobody waits for them.

A topic that cannot be written to at once is *away*: its rows are left unread for a moment, and those of other topics
go on. The moments grow from try to try. Nothing is produced to a topic that is away, because Kafka would keep the whole
transaction waiting: its coordinator writes a marker to every partition that a transaction has touched, and ends it, by
a commit or an abort, only when the last partition has taken its marker. Until then the transactional id is stuck.

A partition with fewer replicas in sync than its `min.insync.replicas` takes nothing either. That number takes a right
to read, which a harvester need not have, and clients do not say why a record is not acknowledged. So a topic that was
*silent*, and has a replica out of sync, is away until another set of replicas is in sync. It is tried again without
that, too, but more and more rarely, as each try holds up the rows of all topics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import TopicMetadata

from outbox_plugin.adapters.kafka_clients import FORBIDDEN_TOPIC, UNKNOWN_TOPIC, is_topic_name
from outbox_plugin.adapters.topic_metadata import look_up_topic
from outbox_plugin.core.backoff import Backoff
from outbox_plugin.errors import Away, LogUnavailable, Refusal

UNKNOWN_TOPIC_SECONDS = 2.0  # Brokers need a moment to create a topic on first use, and to tell each other of it.
AWAY_FIRST, AWAY_LAST = 0.1, 5.0  # Seconds until a topic that was away is looked up again.
SILENT_FIRST, SILENT_LAST = 30.0, 300.0  # Seconds until a topic that was silent is written to again.
# The time for all look-ups together; topics that were not looked up by then count as away. It is shorter where rows of
# other topics wait.
LOOK_UP_SECONDS, LOOK_UP_BESIDE_SECONDS = 0.25, 0.05
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class UnwritableTopics:
    """Which topics are refused, and which are away; all others may be written to."""

    refused: dict[str, Refusal] = field(default_factory=dict)
    away: dict[str, Away] = field(default_factory=dict)


@dataclass(slots=True)
class _Missed:
    """A topic that could not be written to, and when it is looked up again."""

    since: float
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(AWAY_FIRST, AWAY_LAST))


@dataclass(frozen=True, slots=True)
class _Replicas:
    """A topic's leaders and replicas in sync, by partition, and whether some replica is out of sync."""

    leaders: dict[int, int]
    in_sync: dict[int, frozenset[int]]
    are_out_of_sync: bool

    @classmethod
    def of(cls, metadata: TopicMetadata) -> _Replicas:
        partitions = metadata.partitions.values()
        return cls(
            {each.id: each.leader for each in partitions},
            {each.id: frozenset(each.isrs) for each in partitions},
            any(len(each.isrs) < len(each.replicas) for each in partitions),
        )


@dataclass(slots=True)
class _Silent:
    """A topic that has not acknowledged records: its replicas then, and when it is tried again."""

    replicas: _Replicas | None = None  # None until it has been looked up.
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(SILENT_FIRST, SILENT_LAST))


class _Stalled(NamedTuple):
    """A topic's replicas while records wait to be acknowledged, and since when they have been the same."""

    replicas: _Replicas
    since: float


class WritableTopics:
    """Which topics one producer may write to."""

    def __init__(
        self,
        reserved: Callable[[str], str | None],
        clock: Callable[[], float] = time.monotonic,
        should_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        """Nothing is known yet.

        Args:
            reserved: returns why a topic is not for events at all; None where it is.
            clock: in seconds.
            should_wait: returns whether waiting for an answer still makes sense; called now and then.
        """
        self._reserved = reserved
        self._clock = clock
        self._should_wait = should_wait
        self._known: dict[str, int] = {}  # How many partitions each has.
        self._missed: dict[str, _Missed] = {}
        self._silent: dict[str, _Silent] = {}
        self._stalled: dict[str, _Stalled] = {}

    def forget(self, topic: str) -> None:
        """A delivery to it has failed: look it up again before the next one."""
        self._known.pop(topic, None)

    def without_leader(self, producer: Producer, topics: set[str]) -> bool:
        """Whether one of `topics` is gone, or has a partition that no broker leads now; it is no longer known then.

        Also notes since when each topic has had the same leaders and replicas in sync: see `stays_out_of_sync`.
        """
        try:
            found = self._look_up(producer, list(topics), LOOK_UP_SECONDS)
        except LogUnavailable:
            return False
        now = self._clock()
        for topic, metadata in found.items():
            if metadata is not None:
                self._note(topic, metadata, now)
        leaderless = {topic for topic, metadata in found.items() if metadata and _without_leader(metadata)}
        gone = {topic for topic, metadata in found.items() if metadata and _is_unknown(metadata)}
        for topic in leaderless | gone:
            self.forget(topic)
        return bool(leaderless | gone)

    def stays_out_of_sync(self, topics: set[str], seconds: float) -> bool:
        """Whether one of `topics` has had the same replicas out of sync, and the same leaders, for so many seconds.

        Then too few replicas may be in sync. When a broker has just died, leaders and replicas in sync change, and what
        was sent is acknowledged soon after.
        """
        now = self._clock()
        stalled = [self._stalled[topic] for topic in topics if topic in self._stalled]
        return any(each.replicas.are_out_of_sync and now - each.since >= seconds for each in stalled)

    def begin(self) -> None:
        """Other records are sent now: how long topics were stalled does not count for them."""
        self._stalled.clear()

    def acknowledged(self, topics: Iterable[str]) -> None:
        """These topics have taken records: they are not silent."""
        for topic in topics if self._silent else ():
            self._silent.pop(topic, None)

    def _note(self, topic: str, metadata: TopicMetadata, now: float) -> None:
        replicas = _Replicas.of(metadata)
        stalled = self._stalled.get(topic)
        if stalled is None or stalled.replicas != replicas:
            self._stalled[topic] = _Stalled(replicas, now)

    def silent(self, topics: Iterable[str]) -> None:
        """These topics have not acknowledged records: where too few replicas may be in sync, they are away."""
        for topic in topics:
            self.forget(topic)
            self._silent.setdefault(topic, _Silent()).replicas = None

    def partitions(self, topic: str) -> int:
        """How many partitions the topic had when it was looked up; 0 if it was not."""
        return self._known.get(topic, 0)

    def look_up_partitions(self, producer: Producer, topic: str) -> int | None:
        """How many partitions the topic has now; None if Kafka does not say.

        Raises:
            LogUnavailable: Kafka does not answer.
        """
        found = self._look_up(producer, [topic], LOOK_UP_SECONDS)[topic]
        if found is None or found.error is not None:
            return None
        if topic in self._known:
            self._known[topic] = len(found.partitions)
        return len(found.partitions)

    def unwritable(self, producer: Producer, topics: set[str]) -> UnwritableTopics:
        """Which of `topics` may not be written to now. Waits for Kafka's answers, but never for a topic to appear.

        Raises:
            LogUnavailable: Kafka does not answer.
        """
        unknown = topics - self._known.keys()
        if not unknown:
            return _NOTHING_WRONG
        verdict, now = UnwritableTopics(), self._clock()
        due: list[str] = []
        for topic in unknown:
            missed = self._missed.get(topic)
            if reason := self._not_for_events(topic):
                verdict.refused[topic] = Refusal(f"topic {topic}: {reason}", whole_topic=True)
            elif missed is not None and now < missed.again_at:
                verdict.away[topic] = Away("it was not there a moment ago", missed.again_at - now)
            else:
                due.append(topic)
        seconds = LOOK_UP_SECONDS if unknown == topics else LOOK_UP_BESIDE_SECONDS
        for topic, found in self._look_up(producer, due, seconds).items():
            self._conclude(topic, found, verdict)
        for topic in due:
            if topic not in self._known and topic not in verdict.refused and topic not in verdict.away:
                verdict.away[topic] = Away("there was no time to look it up", AWAY_FIRST)
        return verdict

    def _not_for_events(self, topic: str) -> str | None:
        if not is_topic_name(topic):
            return "not a name that Kafka allows (1 to 249 letters, digits, dots, dashes and underscores)"
        return self._reserved(topic)

    def _look_up(self, producer: Producer, topics: Sequence[str], seconds: float) -> dict[str, TopicMetadata | None]:
        """Kafka's metadata of `topics`; None for a topic that the answer lacks.

        Some topics are asked about at a time. Once `seconds` have passed, the others are left out. Each answer is
        waited for, 10 seconds at most, even that about a topic alone.
        """

        def ask(topic: str) -> TopicMetadata | None:
            try:
                return look_up_topic(producer, topic, self._should_wait)
            except KafkaException as error:
                raise LogUnavailable(f"Kafka, looking up the topic {topic}: {error.args[0].str()}") from error

        if len(topics) < 2:
            return {topic: ask(topic) for topic in topics}
        found: dict[str, TopicMetadata | None] = {}
        deadline = self._clock() + seconds
        with ThreadPoolExecutor(_AT_ONCE, "outbox-topics") as pool:
            for first in range(0, len(topics), _AT_ONCE):
                some = topics[first : first + _AT_ONCE]
                found.update(zip(some, pool.map(ask, some), strict=True))
                if self._clock() > deadline:
                    break
        return found

    def _conclude(self, topic: str, found: TopicMetadata | None, verdict: UnwritableTopics) -> None:
        """Enter what was found of one topic."""
        problem = None if found is None else found.error
        code = None if problem is None else problem.code()
        if problem is not None and code in FORBIDDEN_TOPIC:
            self._missed.pop(topic, None)
            verdict.refused[topic] = Refusal(f"topic {topic}: {problem.str()}", whole_topic=True)
            return
        if problem is not None and code not in UNKNOWN_TOPIC and code != KafkaError.LEADER_NOT_AVAILABLE:
            raise LogUnavailable(f"Kafka, looking up the topic {topic}: {problem.str()}")
        reason = (
            str(problem.str()) if problem is not None else _without_leader(found) or self._out_of_sync(topic, found)
        )
        if reason is None:
            self._missed.pop(topic, None)
            self._known[topic] = len(found.partitions) if found is not None else 0
            return
        now = self._clock()
        missed = self._missed.setdefault(topic, _Missed(now))
        if problem is not None and code in UNKNOWN_TOPIC and now - missed.since >= UNKNOWN_TOPIC_SECONDS:
            del self._missed[topic]
            verdict.refused[topic] = Refusal(f"topic {topic}: {reason}", whole_topic=True)
            return
        seconds = missed.backoff.wait()
        missed.again_at = now + seconds
        verdict.away[topic] = Away(reason, seconds)

    def _out_of_sync(self, topic: str, found: TopicMetadata | None) -> str | None:
        """Why a topic that was silent is left alone for now; None where it may be tried again, or never was."""
        silent = self._silent.get(topic)
        if silent is None or found is None:
            return None
        replicas, now = _Replicas.of(found), self._clock()
        if not replicas.are_out_of_sync:
            del self._silent[topic]
            return None
        if silent.replicas is None:
            silent.replicas, silent.again_at = replicas, now + silent.backoff.wait()
        elif silent.replicas.in_sync != replicas.in_sync or now >= silent.again_at:
            return None
        return (
            "it acknowledges nothing, and has replicas out of sync: fewer may be in sync than its min.insync.replicas"
        )


_NOTHING_WRONG = UnwritableTopics()


def _is_unknown(found: TopicMetadata) -> bool:
    return found.error is not None and found.error.code() in UNKNOWN_TOPIC


def _without_leader(found: TopicMetadata | None) -> str | None:
    """Why a topic cannot be written to as a whole; None where each of its partitions has a leader."""
    if found is None:
        return "Kafka's answer does not mention it"
    leaderless = sorted(each.id for each in found.partitions.values() if each.leader < 0)
    if not leaderless:
        return None
    return f"no broker leads partition {_listed(leaderless)} now"


def _listed(numbers: Iterable[int]) -> str:
    some = [str(number) for number in numbers]
    return ", ".join(some[:5]) + (f" and {len(some) - 5} more" if len(some) > 5 else "")
