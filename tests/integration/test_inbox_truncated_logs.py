"""A partition is cut while no inbox runs: other records stand at offsets that the group has handled."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin import Settings
from outbox_plugin.adapters.topic_ids import TopicIds
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.leader_epochs import GroupPosition
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.inbox.consumer_config import consumer_config
from outbox_plugin.inbox.dispatcher import Dispatcher
from outbox_plugin.inbox.kafka_records import committed_offset
from outbox_plugin.inbox.positions import Positions
from tests.inbox_support import effects, make_effect_table, poll_loop, query, record_effect
from tests.partition_truncation import KafkaToCut, append, cut, cut_and_launch, numbered, replace_end
from tests.support import eventually

pytestmark = pytest.mark.integration

SOON = 60.0
WEEK = timedelta(days=7)
# Every record counts as one whose key is forgotten. No key is deleted meanwhile.
SHORT_KEEP = timedelta(minutes=30)


@pytest.fixture
def ready(settings: Settings, kafka_to_cut: KafkaToCut) -> Settings:
    """Settings for that broker, and a database with a table for effects."""
    make_effect_table(settings)
    return settings.model_copy(update={"bootstrap_servers": kafka_to_cut.bootstrap_servers})


@pytest.fixture
def topic(kafka_to_cut: KafkaToCut, group: str) -> str:
    """A topic with one partition."""
    name = f"{group}-events"
    admin = AdminClient({"bootstrap.servers": kafka_to_cut.bootstrap_servers})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(60)
    return name


def refuse_key(settings: Settings, key: str) -> None:
    """Have Postgres record no event with this key, until the function is dropped."""
    query(
        settings,
        "CREATE FUNCTION refuse_key() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "RAISE EXCEPTION 'busy' USING ERRCODE = 'serialization_failure'; END $$",
    )
    query(
        settings,
        "CREATE TRIGGER refuse_key BEFORE INSERT ON outbox_inbox FOR EACH ROW "
        f"WHEN (NEW.idempotency_key = '{key}') EXECUTE FUNCTION refuse_key()",
    )


def consume(settings: Settings, topic: str, group: str, expected: list[str], keep: timedelta = WEEK) -> None:
    """Run an inbox until these effects are there, and no others."""
    with Inbox(settings, group=group, topics=[topic], handler=record_effect, keep=keep) as inbox:
        eventually(lambda: len(effects(settings)) >= len(expected) or not inbox.alive, SOON)
    assert sorted(value for _, _, value in effects(settings)) == sorted(expected)


def consume_ten(settings: Settings, topic: str, group: str) -> None:
    """Write ten records, and have the group handle them."""
    append(settings.bootstrap_servers, topic, numbered("old", 0, 10))
    consume(settings, topic, group, numbered("old", 0, 10))


@pytest.mark.parametrize("more", [2, 4, 9], ids=["below the position", "up to the position", "beyond the position"])
def test_records_that_were_written_after_a_cut_are_handled(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str, more: int
) -> None:
    """Also those at offsets that were handled; nothing has its effect twice."""
    consume_ten(ready, topic, group)
    replace_end(kafka_to_cut, topic, 6, 6 + more)
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 6, 6 + more)])
    append(ready.bootstrap_servers, topic, ["last"])
    query(ready, "DELETE FROM outbox_inbox")  # Where a group went on after a cut, it does not look for the cut again.
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 6, 6 + more), "last"])


@pytest.mark.parametrize("running", [False, True], ids=["while no inbox runs", "under a running inbox"])
def test_a_record_without_a_name_is_not_taken_for_the_one_that_stood_at_its_offset(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str, running: bool
) -> None:
    """Its place in Kafka names it, and after a cut another record stands there."""
    expected = [*numbered("old", 0, 10), *numbered("new", 6, 16)]
    append(ready.bootstrap_servers, topic, numbered("old", 0, 10), named=False)
    with Inbox(ready, group=group, topics=[topic], handler=record_effect) as inbox:
        eventually(lambda: len(effects(ready)) == 10, SOON)
        if not running:
            inbox.stop()
        cut(kafka_to_cut, topic, 6)
        append(ready.bootstrap_servers, topic, numbered("new", 6, 16), named=False)
        if running:
            eventually(lambda: len(effects(ready)) >= len(expected), SOON)
    consume(ready, topic, group, expected)


def test_events_that_were_handled_while_kafka_was_away_do_not_hide_a_cut(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """The inbox handles what it has received: its position in Postgres moves on, and its offset in Kafka does not."""
    released = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if event.offset >= 3:
            released.wait(SOON)
        record_effect(connection, event)

    def committed() -> int:
        with closing(Consumer({"bootstrap.servers": ready.bootstrap_servers, "group.id": group})) as consumer:
            return consumer.committed([KafkaTopicPartition(topic, 0)], SOON)[0].offset

    append(ready.bootstrap_servers, topic, numbered("old", 0, 3))
    with Inbox(ready, group=group, topics=[topic], handler=handle) as inbox:
        eventually(lambda: len(effects(ready)) == 3, SOON)
        eventually(lambda: committed() == 3, SOON)
        append(ready.bootstrap_servers, topic, numbered("old", 3, 10))
        eventually(lambda: inbox._dispatcher.locked(lambda queues: queues.held) == 7, SOON)
        kafka_to_cut.kill()
        released.set()
        eventually(lambda: query(ready, "SELECT next_offset FROM outbox_inbox_position") == [(10,)], SOON)
    cut_and_launch(kafka_to_cut, topic, 6)
    append(ready.bootstrap_servers, topic, numbered("new", 6, 14))
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 6, 14)])


def test_an_inbox_that_was_killed_while_it_read_a_cut_partition_again_reads_on(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """Its offset in Kafka had gone back already, and its position in Postgres had not."""
    consume_ten(ready, topic, group)
    replace_end(kafka_to_cut, topic, 6, 14)
    gone_back = committed_offset(TopicPartition(topic, 0), GroupPosition(3, 0), topic_state(ready, topic).topic_id)
    with closing(Consumer({"bootstrap.servers": ready.bootstrap_servers, "group.id": group})) as consumer:
        consumer.commit(offsets=[gone_back], asynchronous=False)
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 6, 14)])


@pytest.mark.parametrize(("end", "more"), [(9, 1), (5, 2)], ids=["ends at the position", "ends before the position"])
def test_events_whose_keys_are_forgotten_have_no_effect_again_after_a_cut(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str, end: int, more: int
) -> None:
    """Records from before the cut have the epoch of those that the group has handled. Others are new, however old."""
    consume_ten(ready, topic, group)
    query(ready, "DELETE FROM outbox_inbox")
    replace_end(kafka_to_cut, topic, end, end + more)
    expected = [*numbered("old", 0, 10), *numbered("new", end, end + more)]
    consume(ready, topic, group, expected, keep=SHORT_KEEP)


def test_an_inbox_that_is_restarted_while_it_reads_a_cut_partition_again_goes_on_leaving_out_old_records(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """Its position has gone back to one of them, and their keys are forgotten meanwhile."""
    consume_ten(ready, topic, group)
    replace_end(kafka_to_cut, topic, 6, 14)
    refuse_key(ready, "old 04")
    expected = [*numbered("old", 0, 10), *numbered("new", 6, 14)]
    consume(ready, topic, group, expected)
    assert query(ready, "SELECT next_offset FROM outbox_inbox_position") == [(4,)]
    query(ready, "DROP FUNCTION refuse_key CASCADE")
    query(ready, "DELETE FROM outbox_inbox WHERE starts_with(idempotency_key, 'old')")
    append(ready.bootstrap_servers, topic, ["last"])
    consume(ready, topic, group, [*expected, "last"], keep=SHORT_KEEP)


def test_an_old_record_after_an_offset_that_went_back_has_no_effect_again(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """The inbox was killed before its position in Postgres went back, too: that is the bound of what it has handled."""
    consume_ten(ready, topic, group)
    query(ready, "DELETE FROM outbox_inbox")
    replace_end(kafka_to_cut, topic, 6, 14)
    gone_back = committed_offset(TopicPartition(topic, 0), GroupPosition(3, 0), topic_state(ready, topic).topic_id)
    with closing(Consumer({"bootstrap.servers": ready.bootstrap_servers, "group.id": group})) as consumer:
        consumer.commit(offsets=[gone_back], asynchronous=False)
    expected = [*numbered("old", 0, 10), *numbered("new", 6, 14)]
    consume(ready, topic, group, expected, keep=SHORT_KEEP)


def test_a_group_whose_offsets_kafka_has_forgotten_notices_a_cut(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """Its position in Postgres has a leader epoch, too."""
    consume_ten(ready, topic, group)
    query(ready, "DELETE FROM outbox_inbox")
    admin = AdminClient({"bootstrap.servers": ready.bootstrap_servers})
    admin.delete_consumer_groups([group])[group].result(SOON)
    replace_end(kafka_to_cut, topic, 6, 14)
    expected = [*numbered("old", 0, 10), *numbered("new", 6, 14)]
    consume(ready, topic, group, expected, keep=SHORT_KEEP)


def test_a_cut_under_a_running_inbox_repeats_no_effect_whose_key_is_forgotten(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """librdkafka goes back to the partition's beginning."""
    append(ready.bootstrap_servers, topic, numbered("old", 0, 10))
    expected = [*numbered("old", 0, 10), *numbered("new", 6, 14)]
    with Inbox(ready, group=group, topics=[topic], handler=record_effect, keep=SHORT_KEEP):
        eventually(lambda: len(effects(ready)) == 10, SOON)
        query(ready, "DELETE FROM outbox_inbox")
        replace_end(kafka_to_cut, topic, 6, 14)
        eventually(lambda: len(effects(ready)) >= len(expected), SOON)
    assert sorted(value for _, _, value in effects(ready)) == sorted(expected)


@pytest.mark.parametrize("more", [3, 0], ids=["and others follow", "and nothing follows"])
def test_records_before_a_cut_that_were_fetched_and_not_polled_are_handled(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str, more: int
) -> None:
    """librdkafka goes back to the cut, and drops them."""
    append(ready.bootstrap_servers, topic, numbered("old", 0, 10))
    dispatcher, queued = Dispatcher(4), set[bytes | None]()
    with closing(Consumer(consumer_config(ready, group))) as consumer, closing(TopicIds(ready)) as topic_ids:
        loop = poll_loop(consumer, Positions(ready, group), topic_ids, dispatcher=dispatcher)
        loop._assignments.assigned([KafkaTopicPartition(topic, 0)])

        def has_queued(number: int) -> bool:
            if (message := consumer.poll(0.1)) is not None:
                loop.add([message])
            taken = dispatcher.locked(lambda queues: queues.take(100, 0.0))
            queued.update(record.value for each in taken for record in each.records)
            return len(queued) >= number

        eventually(lambda: has_queued(3), SOON)
        replace_end(kafka_to_cut, topic, 7, 7 + more)
        eventually(lambda: has_queued(7 + more), SOON)
    assert queued == {each.encode() for each in (*numbered("old", 0, 7), *numbered("new", 7, 7 + more))}


def test_a_cut_shows_where_a_transaction_marker_stands_at_the_offset_that_was_handled_last(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str
) -> None:
    """No record can be fetched from there."""
    consume_ten(ready, topic, group)
    cut(kafka_to_cut, topic, 6)
    config = {"bootstrap.servers": ready.bootstrap_servers, "transactional.id": group}
    with closing(Producer(config)) as producer:
        producer.init_transactions()
        for transaction in (numbered("new", 6, 9), numbered("new", 9, 11)):  # The first marker has the offset 9.
            producer.begin_transaction()
            for value in transaction:
                producer.produce(topic, value, value, partition=0, headers=[("idempotency-key", value.encode())])
            producer.commit_transaction()
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 6, 11)])


def test_records_that_retention_has_deleted_are_not_taken_for_a_cut(
    ready: Settings, kafka_to_cut: KafkaToCut, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The first record that is left has a greater epoch than the position, as after any start of the broker."""
    consume_ten(ready, topic, group)
    cut(kafka_to_cut, topic, 10)
    append(ready.bootstrap_servers, topic, numbered("deleted", 10, 13))
    admin = AdminClient({"bootstrap.servers": ready.bootstrap_servers})
    for deleted in admin.delete_records([KafkaTopicPartition(topic, 0, 13)]).values():
        deleted.result(SOON)
    append(ready.bootstrap_servers, topic, numbered("new", 13, 15))
    consume(ready, topic, group, [*numbered("old", 0, 10), *numbered("new", 13, 15)])
    assert "was truncated" not in caplog.text
