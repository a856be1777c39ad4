"""The ordering key: the unit whose rows keep their order, and which waits as a whole behind a bad row.

An ordering key is one key of one topic. Where the topic itself is wrong, it is the whole topic. The rows of a topic
that have no key, which an ALTER TABLE may have let in, are one ordering key too: all of them are bad, and no other
row waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from outbox_plugin.core.row import OutboxRow


class OrderingKey(NamedTuple):
    """A key of a topic. Where `key` is None, the whole topic; with `keyless`, the topic's rows without a key."""

    topic: str
    key: str | None
    keyless: bool = False

    @classmethod
    def of(cls, row: OutboxRow) -> OrderingKey:
        """The ordering key that the row has by its topic and key."""
        return cls(row.topic, row.key, row.key is None)

    @property
    def whole_topic(self) -> bool:
        """Whether it stands for all rows of the topic."""
        return self.key is None and not self.keyless

    @property
    def description(self) -> str:
        """Which of the topic's rows it stands for, for a message."""
        return "rows without a key" if self.keyless else "every key" if self.key is None else f"key {self.key}"


class OrderingKeys:
    """A set of ordering keys that is quick to ask about many rows."""

    def __init__(self, keys: Iterable[OrderingKey] = ()) -> None:
        self._all = frozenset(keys)
        self._topics = {key.topic for key in self._all if key.whole_topic}
        self._keys = {(key.topic, key.key) for key in self._all if not key.whole_topic}

    def __bool__(self) -> bool:
        return bool(self._all)

    def __contains__(self, row: OutboxRow) -> bool:
        return row.topic in self._topics or (row.topic, row.key) in self._keys

    def without_rows_of_these(self, rows: Sequence[OutboxRow]) -> Sequence[OutboxRow]:
        """The `rows` that have none of these keys."""
        return [row for row in rows if row not in self] if self._all else rows
