"""Judges the records of topics one by one. No I/O."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice

from outbox_plugin.core.event_identity import event_identity, event_source
from outbox_plugin.core.headers import JOB_HEADER, SEQUENCE_HEADER
from outbox_plugin.verification.sequence_set import SequenceSet
from outbox_plugin.verification.verdict import EXAMPLES, TopicVerdict

_SEQUENCE = re.compile("[0-9]{1,18}")


class Verifier:
    """Judges records one by one, each partition's in the order of its offsets. Pure: it reads nothing itself.

    Of an event and of a key it remembers a hash of 128 bits, in which no two of some millions agree.
    """

    def __init__(self, job: str | None = None) -> None:
        """With `job`, only that job's records count."""
        self.verdict = TopicVerdict()
        self._job = job
        self._seen: set[int] = set()
        self._last: dict[int, int] = {}
        self._places: defaultdict[str, SequenceSet] = defaultdict(SequenceSet)

    @property
    def jobs(self) -> list[str]:
        """The jobs that have been seen, and the one that is asked for."""
        return sorted({*self._places, *([self._job] if self._job else [])})

    def see(
        self,
        where: str,
        key: bytes,
        headers: Iterable[tuple[str, bytes | str | None]],
        partition: tuple[str, int] = ("", 0),
    ) -> None:
        """Judge one record.

        Args:
            where: tells a reader where the record is.
            key: the record's key.
            headers: the record's, in their order.
            partition: topic and partition. An event is another one in another topic, and only the records of one
                partition have an order.
        """
        pairs = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
        named = {name: _text(value) for name, value in pairs}
        job = named.get(JOB_HEADER, "")
        if self._job is not None and job != self._job:
            return
        topic, number = partition
        verdict = self.verdict
        verdict.records += 1
        sequence = named.get(SEQUENCE_HEADER)
        place = int(sequence) if sequence is not None and _SEQUENCE.fullmatch(sequence) else None
        if job and place is not None:
            self._places[job].add(place)
        known = event_identity(pairs, where)
        if known.named or known.placed:
            event = _hash(known.key, event_source(topic, pairs))
            if event in self._seen:
                verdict.duplicates += 1
                if len(verdict.example_duplicates) < EXAMPLES:
                    verdict.example_duplicates.append(f"{known.key} at {where}")
                return
            self._seen.add(event)
        else:
            verdict.unnamed += 1
        if place is None:
            verdict.unplaced += 1
            return
        lane = _hash(topic, str(number), job, key)
        if self._last.get(lane, -1) > place:
            verdict.order_violations += 1
            if len(verdict.example_violations) < EXAMPLES:
                verdict.example_violations.append(f"key {key.decode(errors='replace')} at {where}")
        self._last[lane] = place

    def miss(self, emitted: dict[str, int]) -> None:
        """Count as missing what the jobs have emitted, and what leaves a gap among their places."""
        for job in sorted({*self._places, *emitted}):
            places = self._places[job]
            whole = max(places.last, emitted.get(job, 0))
            self.verdict.missing += whole - len(places)
            room = EXAMPLES - len(self.verdict.example_missing)
            self.verdict.example_missing += [f"{job} {place}" for place in islice(places.missing(whole), room)]


def _hash(*parts: str | bytes) -> int:
    """Of the parts and where each ends."""
    hashed = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return int.from_bytes(hashed.digest())


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value or ""
