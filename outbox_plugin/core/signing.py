"""Signatures on the group's own records: who may write to a control topic cannot speak for a harvester.

A harvester signs its heartbeats and its progress records with a secret that the database keeps, and which only a role
that may harvest can read. The signature is HMAC-SHA256 (RFC 2104, RFC 6234) and travels in a record header. It covers
what the record is for and where it stands as well as its bytes, so a copy proves nothing in another topic, partition,
or under another key, and a heartbeat proves nothing as a progress record. Each outbox has a secret of its own.

A signature does not say *when* a record was written. `core.copied_heartbeats` tells copies of heartbeats from their
originals, and `core.last_progress` copies of progress records.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

HEADER = "outbox-signature"
SECRET_BYTES = 32
Purpose = Literal["heartbeat", "progress"]
Headers = Sequence[tuple[str, str | bytes | None]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a record stands and what it is for. `shard` is the partition's number."""

    purpose: Purpose
    topic: str
    shard: int


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs and verifies the records of one outbox."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != SECRET_BYTES:
            raise ValueError(f"expected a secret of {SECRET_BYTES} bytes (given: {len(self.secret)})")

    def sign(self, slot: Slot, key: bytes, value: bytes) -> list[tuple[str, str | bytes | None]]:
        """The headers that prove that a harvester of this outbox has written a record.

        Args:
            slot: where the record goes; a signature is valid only there.
            key: the record's key.
            value: the record's value.
        """
        return [(HEADER, self._signature(slot, key, value))]

    def verifies(self, slot: Slot, key: bytes | None, value: bytes | None, headers: Headers | None) -> bool:
        """Whether the `headers` hold this outbox's signature of the record.

        False if the key, the value or the header is missing, or if the header occurs twice.

        Args:
            slot: where the record is.
            key: the record's key.
            value: the record's value.
            headers: the record's headers.
        """
        given = [content for name, content in headers or () if name == HEADER]
        if key is None or value is None or len(given) != 1 or not isinstance(given[0], bytes):
            return False
        return hmac.compare_digest(given[0], self._signature(slot, key, value))

    def _signature(self, slot: Slot, key: bytes, value: bytes) -> bytes:
        parts = (slot.purpose.encode(), slot.topic.encode(), str(slot.shard).encode(), key, value)
        signed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)  # No byte can move between two parts.
        return hmac.digest(self.secret, signed, "sha256")
