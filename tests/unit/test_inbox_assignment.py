"""Where an inbox goes on when partitions are assigned, and in which order it ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, KafkaError
from confluent_kafka import TopicPartition as KafkaTopicPartition

from outbox_plugin import Settings
from outbox_plugin.core.leader_epochs import GroupPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import ServerRefused
from outbox_plugin.inbox import Inbox, assignments
from outbox_plugin.inbox.key_queues import KeyQueues
from outbox_plugin.inbox.positions import FoundPositions, PartitionPositions, PositionInTopic, find_positions
from tests.inbox_support import poll_loop

PARTITION = TopicPartition("t", 0)
ID, OTHER_ID = "A" * 22, "B" * 22


class OurPositions:
    """One row, which belongs to the topic with the first id. Some partitions are still handled by another inbox."""

    def __init__(self, still_handled: Collection[TopicPartition] = ()) -> None:
        self.busy = {*still_handled}

    def still_handled(self, partitions: Collection[TopicPartition]) -> set[TopicPartition]:
        return self.busy.intersection(partitions)

    def read_now(self, topic_ids: Mapping[str, str]) -> dict[TopicPartition, GroupPosition]:
        return {PARTITION: GroupPosition(5000)} if topic_ids.get("t") == ID else {}


class Committed:
    """A consumer whose group has committed as it is told to say, call after call; the last one stands."""

    def __init__(self, *answers: tuple[int, str | None, object]) -> None:
        self.answers = list(answers)
        self.assigned: list[KafkaTopicPartition] = []
        self.paused: set[str] = set()

    def committed(self, asked: Sequence[KafkaTopicPartition], timeout: float) -> list[Any]:
        offset, metadata, error = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            SimpleNamespace(
                topic=each.topic, partition=0, offset=offset, metadata=metadata, error=error, leader_epoch=2
            )
            for each in asked
        ]

    def incremental_assign(self, partitions: list[KafkaTopicPartition]) -> None:
        self.assigned += partitions

    def incremental_unassign(self, partitions: list[KafkaTopicPartition]) -> None:
        self.assigned = [each for each in self.assigned if each not in partitions]

    def pause(self, partitions: list[KafkaTopicPartition]) -> None:
        self.paused |= {each.topic for each in partitions}

    def resume(self, partitions: list[KafkaTopicPartition]) -> None:
        self.paused -= {each.topic for each in partitions}


def found(group: Committed, *ids: dict[str, str]) -> FoundPositions:
    """Ask once for each of the answers with ids."""
    ours: Any = OurPositions()
    kafka: Any = group
    answers = [find_positions(ours, kafka, [PARTITION], lambda topics, each=each: each) for each in ids]  # type: ignore[misc]
    assert not any(answers[:-1])
    return answers[-1]


def test_an_assignment_waits_until_kafka_says_the_id_of_the_topic() -> None:
    assert found(Committed((4000, "", None)), {}, {}, {"t": ID}) == {PARTITION: GroupPosition(5000)}


def test_an_assignment_waits_for_the_committed_offset_of_each_partition() -> None:
    assert found(Committed((-1001, None, "not now"), (6000, ID, None)), {"t": ID}, {"t": ID}) == {
        PARTITION: GroupPosition(6000, 2)
    }


@pytest.mark.parametrize("metadata", [None, "", "by hand"])
def test_a_committed_offset_of_another_consumer_counts_without_its_epoch(metadata: str | None) -> None:
    """A consumer that knows nothing of epochs may have committed an offset behind a transaction marker."""
    assert found(Committed((6000, metadata, None)), {"t": ID}) == {PARTITION: GroupPosition(6000)}


def test_a_committed_offset_of_another_topic_does_not_count() -> None:
    assert found(Committed((6000, OTHER_ID, None)), {"t": ID}) == {PARTITION: GroupPosition(5000)}


def partitions(loop: Any) -> list[TopicPartition]:
    """Those whose records are handled."""
    return loop._dispatcher.locked(KeyQueues.partitions)  # type: ignore[no-any-return]


@pytest.mark.parametrize("silent", [True, False])
def test_a_stop_that_meets_an_assignment_handles_none_of_it(silent: bool) -> None:
    """Else the first record of the topic could be handled, and its offset be written over the group's position."""
    group = Committed((5000, ID, None))

    def look_up(topics: object) -> Any:
        stopped._stop.set()
        return SimpleNamespace(recreated=set(), known=set())

    stopped = poll_loop(group, OurPositions(), SimpleNamespace(look_up=look_up, known=dict))
    if not silent:
        stopped._stop.set()
    stopped._assignments.assigned([KafkaTopicPartition("t", 0)])
    assert partitions(stopped) == []
    assert [each.offset for each in group.assigned] == [OFFSET_END]


def test_a_topic_that_does_not_answer_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "ASK_SECONDS", 0.0)
    group, known, other = Committed((6000, ID, None)), {"t"}, TopicPartition("other", 0)
    topic_ids = SimpleNamespace(
        look_up=lambda topics: SimpleNamespace(recreated=set(), known=known & {*topics}),
        of=lambda topic: ID,
        known=lambda: dict.fromkeys(known, ID),
    )
    loop = poll_loop(group, OurPositions(), topic_ids)
    assigned = loop._assignments
    assigned.assigned([KafkaTopicPartition(*tp) for tp in (PARTITION, other)])
    assert partitions(loop) == [PARTITION]
    assert [(each.topic, each.offset) for each in group.assigned] == [("t", 5999), ("other", OFFSET_END)]
    assigned.start_waiting()
    assert (partitions(loop), group.paused) == ([PARTITION], {"other"})
    known.add("other")
    assigned._ask_at = 0.0
    assigned.start_waiting()
    assert (partitions(loop), group.paused) == ([PARTITION, other], set())
    assert [(each.topic, each.offset) for each in group.assigned] == [("t", 5999), ("other", 5999)]


def test_a_partition_that_another_inbox_still_handles_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignments, "ASK_SECONDS", 0.0)
    group, other = Committed((6000, ID, None)), TopicPartition("other", 0)
    positions = OurPositions([other])
    topic_ids = SimpleNamespace(
        look_up=lambda topics: SimpleNamespace(recreated=set(), known={*topics}),
        of=lambda topic: ID,
        known=lambda: {"t": ID, "other": ID},
    )
    loop = poll_loop(group, positions, topic_ids)
    assigned = loop._assignments
    assigned.assigned([KafkaTopicPartition(*tp) for tp in (PARTITION, other)])
    assert (partitions(loop), group.paused) == ([PARTITION], {"other"})
    positions.busy.clear()
    assigned._ask_at = 0.0
    assigned.start_waiting()
    assert (partitions(loop), group.paused) == ([PARTITION, other], set())


def test_a_partition_that_is_given_up_waits_for_no_position_any_more() -> None:
    group = Committed((6000, ID, None))
    topic_ids = SimpleNamespace(look_up=lambda topics: SimpleNamespace(recreated=set(), known=set()), known=dict)
    given_up = poll_loop(group, OurPositions(), topic_ids)._assignments
    given_up.assigned([KafkaTopicPartition(*PARTITION)])
    assert not given_up.all_have_positions
    given_up.lost([KafkaTopicPartition(*PARTITION)])
    assert (given_up.all_have_positions, group.assigned) == (True, [])


@pytest.mark.parametrize("way", ["revoked", "lost"])
def test_a_partition_that_is_given_up_is_paused_no_more(way: str) -> None:
    """Not in librdkafka either, whose pauses outlive an assignment: else it would not be fetched when it comes back."""
    group = Committed((6000, ID, None))
    topic_ids = SimpleNamespace(look_up=lambda topics: SimpleNamespace(recreated=set(), known=set()), known=dict)
    loop = poll_loop(group, OurPositions(), topic_ids)
    loop._assignments.assigned([KafkaTopicPartition(*PARTITION)])
    assert (loop._pauses.count, group.paused) == (1, {"t"})
    getattr(loop._assignments, way)([KafkaTopicPartition(*PARTITION)])
    assert (loop._pauses.count, group.paused, group.assigned) == (0, set(), [])


def test_an_inbox_waits_for_a_topic_and_ends_where_kafka_refuses_it(caplog: pytest.LogCaptureFixture) -> None:
    def polled(code: int) -> None:
        error = KafkaError(code, "said so")
        loop.add([SimpleNamespace(error=lambda: error)])

    loop = poll_loop(Committed((0, None, None)), OurPositions(), SimpleNamespace())
    polled(KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", "Kafka, while consuming: said so")
    ]
    for code in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED):
        with pytest.raises(ServerRefused, match=r"OUTBOX_BOOTSTRAP_SERVERS.*: said so"):
            polled(code)


@pytest.mark.parametrize("ended", [True, False])
def test_the_last_positions_are_written_while_the_partitions_are_still_ours(ended: bool) -> None:
    """And not beside housekeeping, which writes them too."""
    calls: list[str] = []

    def noted(name: str, answer: object = None) -> Any:
        def call(*args: object, **kwargs: object) -> object:
            calls.append(name)
            return answer

        return call

    housekeeping = SimpleNamespace(start=noted("start"), stop=noted("stop"), wait_until_ended=noted("join", ended))
    settings = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
    ending: Any = Inbox(settings, group="g", topics=["t"], handler=lambda connection, event: None)
    ending._handover = SimpleNamespace(locked=lambda busy: nullcontext())
    written: list[PartitionPositions] = []

    def write_now(reached: Callable[[], PartitionPositions]) -> None:
        calls.append("write")
        written.append(reached())

    ending._dispatcher._queues.assign([PARTITION], {"t": ID}, {PARTITION: 7})
    kafka = SimpleNamespace(commit=noted("commit"), committed=noted("answer"), close=noted("close"))
    positions = SimpleNamespace(write_now=write_now)
    topic_ids = SimpleNamespace(of=lambda topic: ID, close=lambda: None)
    loop = poll_loop(kafka, positions, topic_ids, dispatcher=ending._dispatcher)
    loop._stop.set()
    ending._consume(loop, SimpleNamespace(start=noted("workers"), join=noted("workers end")), housekeeping)
    assert calls[3:] == ["commit", "answer", "join", *["write"] * ended, "close", "workers end"]
    assert written == [{PARTITION: PositionInTopic(ID, GroupPosition(7))}] * ended
