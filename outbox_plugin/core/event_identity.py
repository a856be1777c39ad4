"""What tells an event from every other one, for inboxes, for the checks and for `outbox verify` alike. No I/O.

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

IDENTITY_BYTES = 1_000  # With the group's name, less than a third of a page: Postgres' index takes no more.
_SEQUENCE = re.compile(rb"[0-9]{1,18}")


class EventIdentity(NamedTuple):
    """The `key` of an event; whether a header names it (`named`), or the place in its job does (`placed`).

    Only a record that is named or placed is known for a second one of its event.
    """

    key: str
    named: bool = False
    placed: bool = False


def event_identity(headers: Headers, place: str) -> EventIdentity:
    """What tells the event of a record from every other one of its topic and type.

    A name that Postgres cannot hold as text, or that its index is too narrow for, is stood for by its SHA-256.

    Args:
        headers: the record's, in their order.
        place: where the record is, which no other record ever is, also where the topic was deleted and recreated.
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
    """What an idempotency key is unique in: the topic, and the type where the record has one."""
    for name, value in headers:
        if name == EVENT_TYPE_HEADER:
            return f"{topic} {_kept(value)}" if value else topic
    return topic


def _kept(value: bytes) -> str:
    """`value` as text; or its digest, where Postgres cannot hold that as text, or its index is too narrow for it."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return _digest(value)
    return _digest(value) if "\0" in text or len(value) > IDENTITY_BYTES else text


def _digest(value: bytes) -> str:
    return f"sha256:{sha256(value).hexdigest()}"
