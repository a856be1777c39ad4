"""The five messages of the protocol, and their wire form (Marshal's own, so that both can share a topic).

A message is text, its fields joined by `/`: `Type/Version/Timestamp/InstanceID/ClientID/GroupID/Topic/PartitionID`, and
one more for those that carry an offset. An offset is that of the next record to be consumed. Timestamps are whole
seconds since the epoch, by the sender's clock. A ReleaseGroup names no topic; its last field is the time until
which the group stays released.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from hashlib import md5
from typing import NamedTuple

from outbox_plugin.errors import UserError

VERSION = 0
LARGEST = 2**63 - 1  # Other implementations have 64 bits for offsets and times.


class MalformedMessage(UserError, ValueError):
    """A message does not follow the protocol; `field` names the first field that is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"coordination message, {field}: {problem}")
        self.field = field


@dataclass(frozen=True, slots=True)
class _Message:
    version: int
    timestamp: int
    instance_id: str
    client_id: str
    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Heartbeat(_Message):
    """The holder of a partition is alive, and has consumed the records below `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class ClaimingPartition(_Message):
    """An instance claims a partition. If it is free, the earliest claim gets it."""


@dataclass(frozen=True, slots=True)
class ReleasingPartition(_Message):
    """The holder of a partition gives it up; the next one is to go on at `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class ClaimingMessages(_Message):
    """The holder of a partition is about to hand out what is below `offset`: nobody else may (at-most-once)."""

    offset: int


@dataclass(frozen=True, slots=True)
class ReleaseGroup(_Message):
    """All of a group is to release what it holds, and claim nothing before `expires`.

    `expires` is in seconds since the epoch; one in the past lets the group go on; None, until such a one comes.
    """

    expires: int | None = None


class Entry(NamedTuple):
    """A message in the log, and when the broker appended it (seconds since the epoch)."""

    partition: int
    offset: int
    at: float
    message: Message


Message = Heartbeat | ClaimingPartition | ReleasingPartition | ClaimingMessages | ReleaseGroup

_TYPES: dict[str, type[Message]] = {
    each.__name__: each for each in (Heartbeat, ClaimingPartition, ReleasingPartition, ClaimingMessages, ReleaseGroup)
}
_FIELDS = {each: tuple(field.name for field in fields(each)) for each in _TYPES.values()}
_WITH_OFFSET = frozenset({"Heartbeat", "ReleasingPartition", "ClaimingMessages"})
_NAMES = ("type", *(field.name for field in fields(_Message)))
_COMMON = len(_NAMES)


def encode(message: Message) -> bytes:
    """The wire form of `message`.

    Raises:
        MalformedMessage: a field holds what the wire form cannot carry, and no other instance would take.
    """
    values = {name: getattr(message, name) for name in _FIELDS[type(message)]}
    parts = [type(message).__name__, *map(str, values.values())]
    if isinstance(message, ReleaseGroup) and message.expires is None:
        parts.pop()
    try:
        body = "/".join(parts).encode()
    except UnicodeEncodeError:
        raise MalformedMessage("message", "is no text that UTF-8 can carry") from None
    for name, value in values.items():
        if isinstance(value, str) and "/" in value:
            raise MalformedMessage(name, f"contains `/`, which parts the fields (given: {value!r})")
    decode(body)
    return body


def decode(body: bytes | None) -> Message:
    """The message that `body` is the wire form of.

    Raises:
        MalformedMessage: it is none; the error names a field that is wrong.
    """
    try:
        text = (body or b"").decode()
        kind, version, timestamp, instance_id, client_id, group_id, topic, partition, *rest = text.split("/")
        made = _TYPES[kind]
    except (UnicodeDecodeError, ValueError, KeyError):
        raise _diagnosed((body or b"").split(b"/")) from None
    if len(rest) != (kind in _WITH_OFFSET) and (kind != "ReleaseGroup" or len(rest) > 1):
        raise _miscounted(kind, _COMMON + len(rest))
    if not (instance_id and client_id and group_id and (topic or kind == "ReleaseGroup")):
        raise MalformedMessage(_NAMES[text.split("/").index("", 1)], "is empty")
    return made(
        _number("version", version),
        _number("timestamp", timestamp),
        instance_id,
        client_id,
        group_id,
        topic,
        _number("partition", partition),
        *[_number("expires" if kind == "ReleaseGroup" else "offset", last) for last in rest],
    )


def _number(field: str, text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 20 and (number := int(text)) <= LARGEST:
        return number
    raise MalformedMessage(field, f"expected a whole number from 0 to 2^63 - 1 (given: {text[:40]!r})")


def _diagnosed(parts: list[bytes]) -> MalformedMessage:
    """What is wrong with a message that could not even be taken apart."""
    for name, part in zip((*_NAMES, "offset"), parts, strict=False):
        try:
            text = part.decode()
        except UnicodeDecodeError:
            return MalformedMessage(name, "is not UTF-8")
        if name == "type" and text not in _TYPES:
            return MalformedMessage(name, f"expected one of {', '.join(_TYPES)} (given: {text[:40]!r})")
    return _miscounted(parts[0].decode(), len(parts))


def _miscounted(kind: str, count: int) -> MalformedMessage:
    if count < _COMMON:
        return MalformedMessage(_NAMES[count], f"is missing: expected {_COMMON} fields or more, found {count}")
    if count == _COMMON:
        return MalformedMessage("offset", f"is missing: a {kind} carries one")
    return MalformedMessage("offset", f"{count} fields are too many for a {kind}")


def coordination_partition(topic: str, partitions: int) -> int:
    """Where claims on `topic` are talked about: a partition of a coordination topic that has `partitions` of them.

    As Marshal's own code does it, not its protocol's text: by the topic alone.
    """
    digest = md5(topic.encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "little") % partitions
