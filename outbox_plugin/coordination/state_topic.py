"""What must outlive the log: where groups go on, which are paused, and the form of the coordination topic.

It is kept in a compacted topic of one partition, beside the coordination topic: compaction leaves the latest record of
each key, and nothing expires. Records are text, `/` between fields, as in the protocol.

    key                                value
    position/GROUP/TOPIC/PARTITION     OFFSET/AT/TOPIC_IDS   the log said so at AT (milliseconds)
    pause/GROUP                        a ReleaseGroup        the last one of the log
    form                               WIDTH/TOPIC_ID/SINCE  partitions that count; since when the topic is this one
    clock                                                    written to learn the broker's time

TOPIC_IDS are the ids of the topic and of those of its name before it, with `,` between them, the latest first.

Of two positions with one key, the one with the later time of the log counts, whichever was written last: an instance
that was stopped for long may write late. Of two with one time, the last one counts. While the brokers' clock has been
set back, instances write the latest time that the log has had.

Of two pauses with one key, the one that was written last counts. Whoever has written one reads the log again, and if
it says more by now, writes that: so the last record is right, whatever the clocks say.

Compaction keeps the record that was written last, whatever its time. So an instance writes what the log says when it
writes, and, before it hands out records at most once, only while its lease lasts. If it is stopped between that look
and the write, or its write is on its way, for so long that another takes over, its record is behind the other's.
Nothing mends that.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_plugin.coordination.messages import MalformedMessage, ReleaseGroup, decode, encode
from outbox_plugin.coordination.partition_owners import Key, topic_ids_of

FORM_KEY, CLOCK_KEY = b"form", b"clock"


class KeptPosition(NamedTuple):
    """Where a group goes on: the log said so at `at` (seconds since the epoch).

    `topic_ids` are those of the topic and of the ones before it, the latest first; empty if they are not known.
    """

    offset: int
    at: float
    topic_ids: tuple[str, ...]


class CoordinationForm(NamedTuple):
    """The coordination topic: how many of its partitions count, its id, and since when it is this one.

    `since` is 0 for the first one: nobody can hold what an earlier one said.
    """

    width: int
    topic_id: str
    since: float


@dataclass
class KeptState:
    """The records of the state topic, as far as they were read."""

    positions: dict[Key, KeptPosition] = field(default_factory=dict)
    pauses: dict[str, ReleaseGroup] = field(default_factory=dict)
    form: CoordinationForm | None = None

    def of(self, group_id: str, topics: Collection[str]) -> KeptState:
        """The records about one group, and its positions in these topics."""
        return KeptState(
            {key: kept for key, kept in self.positions.items() if key.group_id == group_id and key.topic in topics},
            {group: pause for group, pause in self.pauses.items() if group == group_id},
            self.form,
        )

    def take_in(self, key: bytes | None, value: bytes | None) -> None:
        """Learn from a record; what is malformed is passed over."""
        with suppress(UnicodeDecodeError, ValueError, OverflowError, MalformedMessage):
            kind, *names = (key or b"").decode().split("/")
            text = (value or b"").decode()
            if kind == "position":
                group_id, topic, partition = names
                offset, at, topic_ids = text.split("/")
                tp = Key(group_id, topic, int(partition))
                found = KeptPosition(int(offset), int(at) / 1000, topic_ids_of(topic_ids))
                known = self.positions.get(tp)
                if found.offset >= 0 and (known is None or known.at <= found.at):
                    self.positions[tp] = found
            elif kind == "pause":
                message = decode(value)
                if isinstance(message, ReleaseGroup) and [message.group_id] == names:
                    self.pauses[message.group_id] = message
            elif kind == "form":
                width, topic_id, since = text.split("/")
                self.form = CoordinationForm(int(width), topic_id, int(since) / 1000)


def position_record(key: Key, position: KeptPosition) -> tuple[bytes, bytes]:
    """Key and value of a record that keeps a position."""
    value = f"{position.offset}/{int(position.at * 1000)}/{','.join(position.topic_ids)}"
    return "/".join(("position", key.group_id, key.topic, str(key.partition))).encode(), value.encode()


def pause_record(message: ReleaseGroup) -> tuple[bytes, bytes]:
    """Key and value of a record that keeps a group's last pause, or its end."""
    return f"pause/{message.group_id}".encode(), encode(message)


def form_record(form: CoordinationForm) -> tuple[bytes, bytes]:
    """Key and value of a record that keeps the form of the coordination topic."""
    return FORM_KEY, f"{form.width}/{form.topic_id}/{int(form.since * 1000)}".encode()
