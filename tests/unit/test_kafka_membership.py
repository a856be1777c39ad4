"""What a member of the leader group makes of the leader topic, whoever writes to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import KafkaError

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_membership
from outbox_plugin.adapters.kafka_membership import RECEIVE_SECONDS, KafkaMembership, _HeartbeatErrorLog
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core.signing import Signer
from outbox_plugin.relay.supervisor import ASLEEP_SECONDS, LISTEN_SECONDS
from tests.clock import SimulatedTime

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


class Unsigned:
    """A record that no harvester has written, or an error in its place."""

    def __init__(self, offset: int, *, partition: int = 0, error: KafkaError | None = None) -> None:
        self._offset = offset
        self._partition = partition
        self._error = error

    def error(self) -> KafkaError | None:
        return self._error

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"0"

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> list[tuple[str, bytes]]:
        return []


class Flooded:
    """A listener whose topic gets records faster than they are read, for many seconds. Each takes a millisecond."""

    def __init__(self, clock: SimulatedTime) -> None:
        self._offsets = itertools.count()
        self._clock = clock
        self._ends_at = clock.monotonic() + 10.0

    def poll(self, seconds: float) -> Unsigned | None:
        self._clock.sleep(0.001)
        return Unsigned(next(self._offsets)) if self._clock.monotonic() < self._ends_at else None

    def close(self) -> None:
        """Nothing is open."""


class Heard:
    """A listener that returns these records."""

    def __init__(self, *records: Unsigned) -> None:
        self._records = iter(records)

    def poll(self, seconds: float) -> Unsigned | None:
        return next(self._records, None)

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def listening(listener: Any, shards: int = 1) -> Iterator[KafkaMembership]:
    membership = KafkaMembership(SETTINGS, KafkaNames.of(SETTINGS), shards, Signer(b"s" * 32), "us")
    membership._listener.close()
    membership._listener = listener
    try:
        yield membership
    finally:
        membership.leave(0.0)


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The partitions and reasons that were logged."""
    return [each.getMessage().split(" (")[1] for each in caplog.records if "cannot lead" in each.getMessage()]


def refusal(partition: int, error: KafkaError) -> str:
    return f"partition {partition}), and a harvester cannot lead without them: {error.str()}"


def test_a_refusal_is_logged_once_though_another_partition_takes_heartbeats(caplog: pytest.LogCaptureFixture) -> None:
    stamped, forbidden = KafkaError(KafkaError.INVALID_TIMESTAMP), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with listening(Heard()) as membership:
        for _ in range(2):
            for error in (stamped, stamped, forbidden, forbidden, None):
                for partition, outcome in enumerate((None, error)):
                    record: Any = Unsigned(0, partition=partition)
                    membership._writing.on_delivery(outcome, record)
    assert refusals(caplog) == [refusal(1, stamped), refusal(1, forbidden)] * 2


def test_a_partition_that_may_not_be_read_is_logged_once_though_another_may(caplog: pytest.LogCaptureFixture) -> None:
    forbidden = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    first = [Unsigned(offset) for offset in range(4)]
    second = [Unsigned(offset, partition=1, error=None if offset == 2 else forbidden) for offset in range(4)]
    with listening(Heard(*itertools.chain(*zip(first, second, strict=True))), shards=2) as membership:
        assert list(membership.receive(0.0)) == []
    assert refusals(caplog) == [refusal(1, forbidden)] * 2  # The second one came after a record of that partition.


def test_a_topic_that_is_flooded_does_not_keep_a_harvester_from_its_election(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody who may write to the topic could otherwise end all heartbeats, and every election."""
    monkeypatch.setattr(kafka_membership, "time", clock := SimulatedTime())
    with listening(Flooded(clock)) as membership:
        began = clock.monotonic()
        assert list(membership.receive(LISTEN_SECONDS)) == []
        assert clock.monotonic() - began < LISTEN_SECONDS + RECEIVE_SECONDS + 0.01
    assert LISTEN_SECONDS + RECEIVE_SECONDS < ASLEEP_SECONDS  # Else such a turn would count as a stop of the process.


def test_each_reason_for_which_heartbeats_are_refused_is_logged_once_until_all_go_through_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = _HeartbeatErrorLog("cannot be written to the topic g-leader")
    few, denied = KafkaError(KafkaError.NOT_ENOUGH_REPLICAS), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    for error in (few, denied, few, denied):
        for partition in range(3):
            log.on_delivery(error, Unsigned(0, partition=partition))  # type: ignore[arg-type]
    first, second = caplog.messages
    assert few.str() in first
    assert denied.str() in second
    log.on_delivery(None, Unsigned(0, partition=0))  # type: ignore[arg-type]
    log.on_delivery(few, Unsigned(0, partition=0))  # type: ignore[arg-type]
    assert len(caplog.records) == 2
    for partition in range(3):
        log.on_delivery(None, Unsigned(0, partition=partition))  # type: ignore[arg-type]
    log.on_delivery(few, Unsigned(0, partition=0))  # type: ignore[arg-type]
    assert len(caplog.records) == 3
