"""What identifies an event, for inboxes, for the checks and for `outbox verify` alike. No I/O.

It is the first of these that its record has:

    the header `idempotency-key`, which is unique within the topic and the type (the header `event-type`)
    the headers `outbox-job` and `outbox-sequence`: its place in the Spark job that emitted it
    the record's place in Kafka: another record is another event
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

from outbox_plugin.core.headers import EVENT_TYPE_HEADER, IDEMPOTENCY_HEADER, JOB_HEADER, SEQUENCE_HEADER

Headers = Iterable[tuple[str, bytes | None]]

IDENTITY_BYTES = 1_000  # With the group's name, it must be less than a third of a page to fit into Postgres' index.
_SEQUENCE = re.compile(rb"[0-9]{1,18}")


class EventIdentity(NamedTuple):
    """The `key` of an event, and where it comes from: a header (`named`), or the place in its job (`placed`).

    Without either, the key is the record's place in Kafka, and a second record of the same event is not recognized.
    """

    key: str
    named: bool = False
    placed: bool = False


def event_identity(headers: Headers, place: str) -> EventIdentity:
    """The identity of a record's event among those of its topic and type.

    If Postgres cannot hold a name as text, or if the name is too long for its index, the key has the name's SHA-256.

    Args:
        headers: the record's, in their order.
        place: where the record is. No other record ever has this place, even if the topic is deleted and recreated.
    """
    job = sequence = None
    for name, value in headers:
        if name == IDEMPOTENCY_HEADER and value:
            return EventIdentity(_kept(value), named=True)
        if name == JOB_HEADER:
            job = value
        elif name == SEQUENCE_HEADER:
            sequence = value
    if job and sequence and _SEQUENCE.fullmatch(sequence):
        return EventIdentity(_kept(b"job %b %d" % (job, int(sequence))), placed=True)
    return EventIdentity(place)


def event_source(topic: str, headers: Headers) -> str:
    """The scope in which an idempotency key is unique: the topic, and the type if the record has one."""
    for name, value in headers:
        if name == EVENT_TYPE_HEADER:
            return f"{topic} {_kept(value)}" if value else topic
    return topic


def _kept(value: bytes) -> str:
    """`value` as text; its digest, if Postgres cannot hold it as text or if it is too long for an index."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _digest(value)
    return _digest(value) if "\0" in text or len(value) > IDENTITY_BYTES else text


def _digest(value: bytes) -> str:
    return f"sha256:{sha256(value).hexdigest()}"
