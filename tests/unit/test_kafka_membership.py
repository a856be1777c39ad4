"""What a member of the leader group makes of the leader topic, whoever writes to it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_membership import RECEIVE_SECONDS, KafkaMembership
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.core.signing import Signer
from outbox_plugin.relay.supervisor import ASLEEP_SECONDS, LISTEN_SECONDS

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


class Unsigned:
    """A record that no harvester has written."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes:
        return b"0"

    def value(self) -> bytes:
        return b"{}"

    def headers(self) -> list[tuple[str, bytes]]:
        return []


class Flooded:
    """A listener whose topic gets records faster than they are read, for many seconds."""

    def __init__(self) -> None:
        self._offsets = itertools.count()
        self._ends_at = time.monotonic() + 10.0

    def poll(self, seconds: float) -> Unsigned | None:
        return Unsigned(next(self._offsets)) if time.monotonic() < self._ends_at else None

    def close(self) -> None:
        """Nothing is open."""


@contextmanager
def flooded() -> Iterator[KafkaMembership]:
    membership = KafkaMembership(SETTINGS, KafkaNames.of(SETTINGS), 1, Signer(b"s" * 32), "us")
    membership._listener.close()
    listener: Any = Flooded()
    membership._listener = listener
    try:
        yield membership
    finally:
        membership.leave(0.0)


def test_a_topic_that_is_flooded_does_not_keep_a_harvester_from_its_election() -> None:
    """Anybody who may write to the topic could otherwise end all heartbeats, and every election."""
    with flooded() as membership:
        began = time.monotonic()
        assert list(membership.receive(LISTEN_SECONDS)) == []
        assert time.monotonic() - began < 5.0
    assert LISTEN_SECONDS + RECEIVE_SECONDS < ASLEEP_SECONDS  # Else such a turn would count as a stop of the process.
