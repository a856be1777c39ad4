"""Verifies the records of topics one by one. No I/O.

It uses the headers that the write side adds: `idempotency-key` identifies an event, and `outbox-sequence` is the
event's number within the job that `outbox-job` names (`core.event_identity` has the rules). A record without them is
only counted, and so is an event that `outbox replay` has emitted again: its header is `outbox-replay`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from itertools import islice

from outbox_plugin.core.event_identity import event_identity, event_source
from outbox_plugin.core.headers import JOB_HEADER, REPLAY_HEADER, SEQUENCE_HEADER
from outbox_plugin.verification.sequence_set import SequenceSet
from outbox_plugin.verification.verdict import MAX_EXAMPLES, TopicVerdict

_SEQUENCE = re.compile("[0-9]{1,18}")


class Verifier:
    """Verifies records one by one, those of each partition in the order of their offsets.

    It remembers a 128-bit hash of each event and each key. A collision among some millions of them is practically
    impossible.
    """

    def __init__(self, job: str | None = None) -> None:
        """Make a verifier; with `job`, only of that job's records."""
        self.verdict = TopicVerdict()
        self._job = job
        self._events: set[int] = set()
        self._last_sequence: dict[int, int] = {}  # By topic, partition, job and key.
        self._sequences: defaultdict[str, SequenceSet] = defaultdict(SequenceSet)  # By job.

    @property
    def jobs(self) -> list[str]:
        """The jobs whose records have been verified, and the job that the verifier is limited to."""
        return sorted({*self._sequences, *([self._job] if self._job else [])})

    def judge(
        self,
        location: str,
        key: bytes,
        headers: Iterable[tuple[str, bytes | str | None]],
        partition: tuple[str, int] = ("", 0),
    ) -> None:
        """Verify one record.

        Args:
            location: names the record in examples.
            key: the record's key.
            headers: the record's headers, in their order.
            partition: its topic and partition. The same identity in another topic is another event, and only records of
                one partition have an order.
        """
        pairs = [(name, value.encode() if isinstance(value, str) else value) for name, value in headers]
        texts = {name: _text(value) for name, value in pairs}
        job = texts.get(JOB_HEADER, "")
        if self._job is not None and job != self._job:
            return
        topic, number = partition
        self.verdict.records += 1
        text = texts.get(SEQUENCE_HEADER)
        sequence = int(text) if text is not None and _SEQUENCE.fullmatch(text) else None
        if job and sequence is not None:
            self._sequences[job].add(sequence)
        if REPLAY_HEADER in texts:
            self.verdict.replayed += 1
            return
        if self._is_duplicate(topic, pairs, location):
            return
        if sequence is None:
            self.verdict.unplaced += 1
            return
        self._judge_order(_hash(topic, str(number), job, key), sequence, key, location)

    def _is_duplicate(self, topic: str, headers: list[tuple[str, bytes | None]], location: str) -> bool:
        """Whether the record's event has been seen before. Counts duplicates, and records that identify no event."""
        identity = event_identity(headers, location)
        if not (identity.named or identity.placed):
            self.verdict.unnamed += 1
            return False
        event = _hash(identity.key, event_source(topic, headers))
        if event not in self._events:
            self._events.add(event)
            return False
        self.verdict.duplicates += 1
        if len(self.verdict.example_duplicates) < MAX_EXAMPLES:
            self.verdict.example_duplicates.append(f"{identity.key} at {location}")
        return True

    def _judge_order(self, ordering_key: int, sequence: int, key: bytes, location: str) -> None:
        if self._last_sequence.get(ordering_key, -1) > sequence:
            self.verdict.order_violations += 1
            if len(self.verdict.example_violations) < MAX_EXAMPLES:
                self.verdict.example_violations.append(f"key {key.decode(errors='replace')} at {location}")
        self._last_sequence[ordering_key] = sequence

    def count_missing(self, emitted_counts: Mapping[str, int]) -> None:
        """Count missing events: gaps among a job's sequence numbers, also at their end.

        Args:
            emitted_counts: how many events each job has emitted.
        """
        for job in sorted({*self._sequences, *emitted_counts}):
            sequences = self._sequences[job]
            last = max(sequences.last, emitted_counts.get(job, 0))
            self.verdict.missing += last - len(sequences)
            room = MAX_EXAMPLES - len(self.verdict.example_missing)
            self.verdict.example_missing += [f"{job} {number}" for number in islice(sequences.missing(last), room)]


def _hash(*parts: str | bytes) -> int:
    """A hash of the parts, which depends on where each of them ends."""
    hashed = blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else part
        hashed.update(b"%d:" % len(data))
        hashed.update(data)
    return int.from_bytes(hashed.digest())


def _text(value: bytes | str | None) -> str:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value or ""
