"""Heartbeats as records of the leader topic: signed and numbered when they are sent, verified when they are heard."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

from outbox_plugin.core.copied_heartbeats import CopyFilter
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.signing import Headers, Signer, Slot


class LeaderRecord(NamedTuple):
    """A record of the leader topic, whoever wrote it. `shard` is the partition's number."""

    shard: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers | None


class HeartbeatCodec:
    """Encodes and decodes the heartbeats of one member of the leader group."""

    def __init__(self, topic: str, signer: Signer, own_instance: str | None = None) -> None:
        """Nothing has been heard yet.

        Args:
            topic: the leader topic.
            signer: has the secret of the outbox.
            own_instance: the name under which this member sends, which was never used before; None if it only listens.
        """
        self._topic = topic
        self._signer = signer
        self._copy_filter = CopyFilter(own_instance)
        self._beats = count(1)

    def encode(self, heartbeat: LeaderHeartbeat) -> tuple[bytes, bytes, Headers]:
        """Key, value and headers of the record that carries the heartbeat to its shard's partition."""
        shard = heartbeat.shard
        numbered = replace(heartbeat, beat=next(self._beats), after=self._copy_filter.end(shard))
        key, value = str(shard).encode(), numbered.encode()
        return key, value, self._signer.sign(Slot("heartbeat", self._topic, shard), key, value)

    def decode(self, record: LeaderRecord) -> LeaderHeartbeat | None:
        """The heartbeat that the record is, new or not; None unless a harvester of this outbox has signed it."""
        slot = Slot("heartbeat", self._topic, record.shard)
        if not self._signer.verifies(slot, record.key, record.value, record.headers):
            return None
        heartbeat = LeaderHeartbeat.parse(record.value)
        return heartbeat if heartbeat is not None and heartbeat.shard == record.shard else None

    def is_new(self, record: LeaderRecord, heartbeat: LeaderHeartbeat | None) -> bool:
        """Take in a record and its decoded heartbeat. Returns whether it is a heartbeat, and no copy of an earlier one.

        Call it for every record of a partition, in their order.
        """
        is_new = heartbeat is not None and self._copy_filter.is_new(heartbeat, record.offset)
        self._copy_filter.passed(record.shard, record.offset)
        return is_new
