"""Where an inbox goes on when partitions are assigned, and in which order it ends."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin import Settings
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import Inbox, consumer, positions
from outbox_plugin.inbox.key_queues import PartitionPosition
from outbox_plugin.inbox.positions import start_offsets

PARTITION = TopicPartition("t", 0)
ID, OTHER_ID = "A" * 22, "B" * 22


class OurPositions:
    """One row, which belongs to the topic with the first id."""

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, int]:
        return {PARTITION: 5000} if topic_ids.get("t") == ID else {}


class Committed:
    """A consumer whose group has committed as it is told to say, call after call; the last one stands."""

    def __init__(self, *answers: tuple[int, str | None, object]) -> None:
        self.answers = list(answers)
        self.assigned: list[KafkaTopicPartition] = []

    def committed(self, asked: Sequence[KafkaTopicPartition], timeout: float) -> list[Any]:
        offset, metadata, error = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [SimpleNamespace(topic="t", partition=0, offset=offset, metadata=metadata, error=error) for _ in asked]

    def incremental_assign(self, partitions: list[KafkaTopicPartition]) -> None:
        self.assigned += partitions


def found(group: Committed, *ids: dict[str, str]) -> dict[TopicPartition, int] | None:
    said = list(ids)
    ours: Any = OurPositions()
    kafka: Any = group
    return start_offsets(
        ours,
        kafka,
        [KafkaTopicPartition("t", 0)],
        lambda: said.pop(0) if len(said) > 1 else said[0],
        threading.Event(),
    )


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "TROUBLE_SECONDS", 0.0)


def test_an_assignment_waits_until_kafka_says_the_id_of_the_topic() -> None:
    assert found(Committed((4000, ID, None)), {}, {}, {"t": ID}) == {PARTITION: 5000}


def test_an_assignment_waits_for_the_committed_offset_of_each_partition() -> None:
    assert found(Committed((-1001, None, "not now"), (6000, ID, None)), {"t": ID}) == {PARTITION: 6000}


@pytest.mark.parametrize(
    ("metadata", "counts"), [(None, True), ("", True), ("by hand", True), (ID, True), (OTHER_ID, False)]
)
def test_a_committed_offset_counts_unless_it_is_of_another_topic(metadata: str | None, counts: bool) -> None:
    assert found(Committed((6000, metadata, None)), {"t": ID}) == {PARTITION: 6000 if counts else 5000}


def inbox() -> Any:
    return Inbox(
        Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1"),
        group="g",
        topics=["t"],
        handler=lambda connection, event: None,
    )


@pytest.mark.parametrize("silent", [True, False])
def test_a_stop_that_meets_an_assignment_handles_none_of_it(silent: bool) -> None:
    """Else the first record of the topic could be handled, and its offset be written over the group's position."""
    stopped, group = inbox(), Committed((5000, ID, None))

    def look_up(topics: object) -> Any:
        stopped._stop.set()
        return SimpleNamespace(recreated=set(), known=set())

    stopped._topic_ids, stopped._positions = SimpleNamespace(look_up=look_up), OurPositions()
    if not silent:
        stopped._stop.set()
    stopped._assigned(group, [KafkaTopicPartition("t", 0)])
    assert stopped.partitions == []
    assert [each.offset for each in group.assigned] == [OFFSET_END]


@pytest.mark.parametrize("ended", [True, False])
def test_the_last_positions_are_written_while_the_partitions_are_still_ours(
    monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    """And not beside housekeeping, which writes them too."""
    calls: list[str] = []

    def noted(name: str, answer: object = None) -> Any:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return answer

        return call

    housekeeping = SimpleNamespace(start=noted("start"), stop=noted("stop"), join=noted("join", ended))
    monkeypatch.setattr(consumer, "Housekeeping", lambda *args: housekeeping)
    ending = inbox()
    ending._stop.set()
    written: list[dict[TopicPartition, PartitionPosition]] = []

    def write_last(last: dict[TopicPartition, PartitionPosition]) -> None:
        calls.append("write")
        written.append(last)

    ending._positions = SimpleNamespace(write_last=write_last)
    ending._topic_ids = SimpleNamespace(of=lambda topic: ID)
    ending._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 7})
    kafka = SimpleNamespace(commit=noted("commit"), close=noted("close"))
    ending._consume(kafka, SimpleNamespace(start=noted("workers"), join=noted("workers end")))
    assert calls[3:] == ["commit", "join", *["write"] * ended, "close", "workers end"]
    assert written == [{PARTITION: PartitionPosition(ID, 7)}] * ended
