"""An inbox goes on where it was, also when the brokers have forgotten its offsets, and we what it has handled."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import closing

import psycopg
import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient

from outbox_plugin import Settings
from outbox_plugin.adapters.topic_ids import Answer, TopicIds
from outbox_plugin.core.leader_epochs import GroupPosition, HandledPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.errors import SchemaMissing
from outbox_plugin.inbox import Inbox
from outbox_plugin.inbox import positions as inbox_positions
from outbox_plugin.inbox.positions import PositionInTopic, Positions
from tests.harvesting import create_topic
from tests.inbox_support import effects, produce, query, record_effect
from tests.integration.test_inbox_identity import recreate, send, values
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 60.0


def events(number: int, value: str = "1") -> list[tuple[str | None, str | None]]:
    return [(f"k{each}", value) for each in range(number)]


def consume(settings: Settings, topic: str, group: str, expected: int) -> None:
    """Run an inbox until there are so many effects."""
    with Inbox(settings, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(settings)) >= expected, SOON)


def forget(settings: Settings, group: str) -> None:
    """The group's offsets and its events' identities outlive their time."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    [deleted] = admin.delete_consumer_groups([group]).values()
    deleted.result(30)
    query(settings, "DELETE FROM outbox_inbox")


def positions(settings: Settings) -> dict[int, int]:
    return dict(query(settings, "SELECT kafka_partition, next_offset FROM outbox_inbox_position"))


def ends(settings: Settings, topic: str) -> dict[int, int]:
    consumer = Consumer({"bootstrap.servers": settings.bootstrap_servers, "group.id": "-"})
    found = {each: consumer.get_watermark_offsets(KafkaTopicPartition(topic, each), timeout=10)[1] for each in range(3)}
    consumer.close()
    return found


def commit(settings: Settings, topic: str, group: str, offsets: dict[int, int]) -> None:
    """Set the group's offsets, as an operator may while no member is there."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    wanted = ConsumerGroupTopicPartitions(group, [KafkaTopicPartition(topic, *each) for each in offsets.items()])
    [altered] = admin.alter_consumer_group_offsets([wanted]).values()
    altered.result(30)


def test_an_inbox_whose_offsets_the_broker_has_forgotten_goes_on_where_it_was(
    ready: Settings, topic: str, group: str
) -> None:
    sent = produce(ready, topic, events(40))
    consume(ready, topic, group, 40)
    forget(ready, group)
    more = produce(ready, topic, events(5, "2"))
    consume(ready, topic, group, 45)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent + more)


def test_so_does_one_whose_first_position_was_the_brokers(ready: Settings, topic: str, group: str) -> None:
    """As after an upgrade, where no record has come since."""
    sent = produce(ready, topic, events(40))
    consume(ready, topic, group, 40)
    query(ready, "DELETE FROM outbox_inbox_position")
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: positions(ready) == ends(ready, topic), SOON)
    forget(ready, group)
    more = produce(ready, topic, events(5, "2"))
    consume(ready, topic, group, 45)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent + more)


def test_a_running_inbox_writes_its_positions(ready: Settings, topic: str, group: str) -> None:
    """So it goes on close to where it was when it was killed."""
    with Inbox(ready, group=group, topics=[topic], handler=record_effect):
        for number in (1, 2):
            produce(ready, topic, events(30))
            eventually(lambda number=number: len(effects(ready)) == 30 * number, SOON)  # type: ignore[misc]
            eventually(lambda: positions(ready) == ends(ready, topic), 5.0)


def test_a_position_goes_back_with_its_partition(ready: Settings, topic: str, group: str) -> None:
    """An unclean election of a leader cuts it: records that are new behind the cut would be passed over else."""
    positions = Positions(ready, group)
    with psycopg.connect(ready.dsn.get_secret_value()) as connection:
        for offset in (7, 5):
            reached = {TopicPartition(topic, 0): PositionInTopic("id", GroupPosition(offset, 3))}
            positions.write(connection, lambda reached=reached: reached)  # type: ignore[misc]
            assert positions.read(connection, {topic: "id"}) == {(topic, 0): GroupPosition(offset, 3)}


def test_an_inbox_of_an_earlier_version_moves_the_offset_alone(ready: Settings, topic: str, group: str) -> None:
    """The epoch stays true where it was reached, and is not that of another offset, or of another topic."""
    positions = Positions(ready, group)
    with psycopg.connect(ready.dsn.get_secret_value()) as connection:
        earlier = HandledPosition(20, 2)
        reached = {TopicPartition(topic, 0): PositionInTopic("id", GroupPosition(7, 3, (earlier,)))}
        positions.write(connection, lambda: reached)
        assert positions.read(connection, {topic: "id"}) == {(topic, 0): (7, 3, (earlier,))}
        connection.execute("UPDATE outbox_inbox_position SET next_offset = 9")
        assert positions.read(connection, {topic: "id"}) == {(topic, 0): (9, None, (earlier, (7, 3)))}
        connection.execute("UPDATE outbox_inbox_position SET next_offset = 5, topic_id = 'another'")
        assert positions.read(connection, {topic: "another"}) == {(topic, 0): (5, None, ())}


def test_positions_in_a_topic_that_was_recreated_are_not_those_in_the_old_one(
    ready: Settings, topic: str, group: str
) -> None:
    send(ready, topic, ["old"] * 5)
    consume(ready, topic, group, 5)
    recreate(ready, topic)
    send(ready, topic, ["new"] * 9)  # More: the old position would be within them.
    consume(ready, topic, group, 14)
    assert values(ready) == ["new"] * 9 + ["old"] * 5
    forget(ready, group)
    send(ready, topic, ["newer"])
    consume(ready, topic, group, 15)
    assert values(ready) == ["new"] * 9 + ["newer"] + ["old"] * 5


def test_the_offset_counts_that_is_further_on(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, events(40))
    consume(ready, topic, group, 40)
    query(ready, "DELETE FROM outbox_inbox")
    commit(ready, topic, group, dict.fromkeys(range(3), 0))  # Less than our own.
    produce(ready, topic, events(1, "next"))
    consume(ready, topic, group, 41)
    assert values(ready) == ["1"] * 40 + ["next"]
    produce(ready, topic, events(40, "skipped"))
    commit(ready, topic, group, ends(ready, topic))
    produce(ready, topic, events(1, "last"))
    consume(ready, topic, group, 42)
    assert values(ready) == ["1"] * 40 + ["last", "next"]


def test_an_inbox_waits_for_its_positions_and_stops_all_the_same(ready: Settings, topic: str, group: str) -> None:
    produce(ready, topic, events(3))
    inbox = Inbox(ready, group=group, topics=[topic], handler=record_effect)
    with psycopg.connect(ready.dsn.get_secret_value()) as holder:
        inbox.start()
        holder.execute("LOCK TABLE outbox_inbox_position")
        eventually(lambda: sessions_waiting_for_a_lock(ready), SOON)
        began = time.monotonic()
        inbox.stop()
        assert time.monotonic() - began < 10 * PATIENCE


def test_a_topic_that_does_not_answer_holds_up_no_other(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, answers, look_up = f"{topic}-silent", threading.Event(), TopicIds.look_up
    create_topic(ready, silent)

    def without_silent(topic_ids: TopicIds, topics: Iterable[str]) -> Answer:
        answer = look_up(topic_ids, topics)
        return answer if answers.is_set() else Answer(answer.recreated, answer.known - {silent})

    monkeypatch.setattr(TopicIds, "look_up", without_silent)
    sent = produce(ready, topic, events(40)) + produce(ready, silent, events(20, "2"))
    with Inbox(ready, group=group, topics=[topic, silent], handler=record_effect):
        eventually(lambda: len(effects(ready)) == 40, SOON)
        sent += produce(ready, topic, events(5, "3"))
        eventually(lambda: len(effects(ready)) == 45, SOON)
        answers.set()
        eventually(lambda: len(effects(ready)) == 65, SOON)
        sent += produce(ready, silent, events(5, "4"))
        eventually(lambda: len(effects(ready)) == 70, SOON)
    assert sorted(event for event, _, _ in effects(ready)) == sorted(sent)


def test_an_inbox_says_at_start_that_its_table_of_positions_is_missing(ready: Settings, topic: str, group: str) -> None:
    query(ready, "DROP TABLE outbox_inbox_position")
    with pytest.raises(SchemaMissing, match="run `outbox migrate` first"):
        Inbox(ready, group=group, topics=[topic], handler=record_effect).start()


@pytest.mark.parametrize("even_unchanged", [True, False])
def test_what_a_process_that_was_stopped_writes_late_is_written_over(
    ready: Settings, topic: str, group: str, even_unchanged: bool
) -> None:
    """Although the group stands still: else it would begin there, once Kafka has forgotten its offsets."""
    owner = Positions(ready, group)
    reached = {TopicPartition(topic, 0): PositionInTopic("A" * 22, GroupPosition(100, 4, (HandledPosition(140, 3),)))}
    assert owner.write_now(lambda: reached)
    written = query(ready, "SELECT next_offset, leader_epochs FROM outbox_inbox_position")
    assert Positions(ready, group).write_now(
        lambda: {TopicPartition(topic, 0): PositionInTopic("A" * 22, GroupPosition(50, 3))}
    )
    if even_unchanged:
        assert owner.write_now(lambda: reached)
    else:
        with psycopg.connect(ready.dsn.get_secret_value()) as connection:
            owner.write(connection, lambda: reached, unchanged=False)
            assert query(ready, "SELECT next_offset FROM outbox_inbox_position") == [(50,)]
            owner.write(connection, lambda: reached)
    assert query(ready, "SELECT next_offset, leader_epochs FROM outbox_inbox_position") == written


def test_an_inbox_does_not_wait_for_long_while_its_positions_are_written(
    ready: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where Postgres takes a statement of another thread's, and answers nothing."""
    monkeypatch.setattr(inbox_positions, "ANSWER_SECONDS", 0.1)
    positions = Positions(ready, group)
    reached = {TopicPartition(topic, 0): PositionInTopic("A" * 22, GroupPosition(100, 4))}
    began, ended = threading.Event(), threading.Event()

    def slowly() -> dict[TopicPartition, PositionInTopic]:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            ended.wait(PATIENCE)
        return reached

    with psycopg.connect(ready.dsn.get_secret_value(), autocommit=True) as connection:
        other = threading.Thread(target=positions.write, args=(connection, slowly))
        other.start()
        assert began.wait(PATIENCE)
        assert not positions.write_now(slowly)
        ended.set()
        other.join()
        assert positions.write_now(slowly)


def test_the_offsets_of_very_many_partitions_are_committed(ready: Settings, group: str) -> None:
    """A broker refuses a commit of more than 1 MiB. With names this long, that is one of 60 partitions."""
    partitions, named_at_length = 60, f"{group}-{'g' * 20_000}"
    topic = create_topic(ready, f"{group}-wide", partitions)
    producer = Producer({"bootstrap.servers": ready.bootstrap_servers, "enable.idempotence": True})
    for partition in range(partitions):
        producer.produce(topic, "1", "k", partition)
    assert producer.flush(30) == 0
    producer.close()
    asked = [KafkaTopicPartition(topic, each) for each in range(partitions)]
    consume(ready, topic, named_at_length, partitions)
    consumer = Consumer({"bootstrap.servers": ready.bootstrap_servers, "group.id": named_at_length})
    with closing(consumer):
        assert [each.offset for each in consumer.committed(asked, 30)] == [1] * partitions
