"""Ranges consumed in this process: each record's effect once, however often a range is run, and nothing left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions

from outbox_plugin import Settings
from outbox_plugin.consuming import Received, TopicRange, consume_range, set_position
from outbox_plugin.consuming.positions import lock_and_advance, read_position
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.core.topic_ranges import Planned, plan
from outbox_plugin.errors import HandlerMisuse, LogUnavailable, RangeRefused, ServerRefused, TopicReplaced
from outbox_plugin.schema.statements import statement
from tests.harvesting import create_topic, environment
from tests.inbox_support import make_effect_table, produce, query
from tests.postgres_sessions import sessions_waiting_for_a_lock
from tests.support import eventually

pytestmark = pytest.mark.integration

CONSUMER = "totals"


def add(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
    for record in records:
        connection.execute(
            "INSERT INTO effect (event, key, value) VALUES (%s, %s, %s)",
            (record.idempotency_key, record.key_text, (record.value or b"").decode()),
        )


def planned(settings: Settings, topic: str, most: int = 1000) -> Planned:
    return plan(CONSUMER, topic, read_position(settings, CONSUMER, topic), topic_state(settings, topic), most)


def next_range(settings: Settings, topic: str, most: int = 1000) -> TopicRange:
    found = planned(settings, topic, most).range
    assert found is not None
    return found


def numbered(first: int, count: int) -> list[tuple[str, str]]:
    return [(f"key-{number % 7}", str(number)) for number in range(first, first + count)]


def values(settings: Settings) -> list[int]:
    return sorted(int(value) for (value,) in query(settings, "SELECT value FROM effect"))


@pytest.fixture
def table(settings: Settings) -> Settings:
    make_effect_table(settings)
    return settings


def commit(settings: Settings, topic: str, values: Sequence[str], *, abort: bool = False) -> None:
    """Write a transaction of Kafka's, which ends with a mark that takes an offset."""
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers, "transactional.id": f"{topic}-test"})
    producer.init_transactions(20)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, "key", partition=0)
    producer.flush(20)
    before = topic_state(settings, topic).end[0]
    (producer.abort_transaction if abort else producer.commit_transaction)(20)
    producer.close()
    eventually(lambda: topic_state(settings, topic).end[0] == before + len(values) + 1, 20)  # The mark comes after it.


def test_ranges_follow_each_other_and_a_repeated_one_does_nothing(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 100))
    ranges = []
    while (found := planned(table, topic, 30).range) is not None:
        done = consume_range(table, found, add)
        assert (done.records, done.again, done.lost) == (found.offsets, False, 0)
        ranges.append(found)
    assert len(ranges) == 4
    for each in ranges:
        assert consume_range(table, each, add).again
    assert values(table) == list(range(100))


def test_what_a_handler_wrote_before_it_failed_is_undone_and_the_range_is_consumed_later(
    table: Settings, topic: str
) -> None:
    produce(table, topic, numbered(0, 50))
    wanted = next_range(table, topic)

    def fails(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records[:20])
        raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        consume_range(table, wanted, fails)
    assert values(table) == []
    assert next_range(table, topic) == wanted
    consume_range(table, wanted, add)
    assert values(table) == list(range(50))


def test_runs_of_one_range_at_the_same_time_have_one_effect(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 200))
    wanted = next_range(table, topic)
    with ThreadPoolExecutor(4) as runs:
        done = list(runs.map(lambda _: consume_range(table, wanted, add), range(4)))
    assert sorted(each.again for each in done) == [False, True, True, True]
    assert values(table) == list(range(200))


def test_a_claim_waits_for_the_transaction_that_looks_at_the_position(settings: Settings) -> None:
    """Also where that one has not moved the position yet, as between the two statements of another claim."""
    first, second = (TopicRange(CONSUMER, "orders", "id", {0: begin}, {0: begin + 10}) for begin in (0, 10))
    dsn = settings.dsn.get_secret_value()

    def advanced() -> bool:
        with psycopg.connect(dsn) as connection:
            return lock_and_advance(connection, settings.table, second)

    with psycopg.connect(dsn) as connection:
        assert lock_and_advance(connection, settings.table, first)
    with ThreadPoolExecutor(1) as runs, psycopg.connect(dsn) as connection:
        lock = statement("position", "lock", settings.table)
        connection.execute(lock, {"consumer": CONSUMER, "backfill": "", "topic": "orders"})
        other = runs.submit(advanced)
        eventually(lambda: other.done() or sessions_waiting_for_a_lock(settings), 60)
        assert not other.done()
        assert lock_and_advance(connection, settings.table, second)
        connection.commit()
        assert not other.result(60)


def test_a_range_that_grew_consumes_only_the_rest(table: Settings, topic: str) -> None:
    """As when a failed run is executed again by hand, and the sensor has requested a larger range meanwhile."""
    produce(table, topic, numbered(0, 50))
    first = next_range(table, topic)
    produce(table, topic, numbered(50, 50))
    larger = next_range(table, topic)
    consume_range(table, first, add)
    assert consume_range(table, larger, add).records == 50
    assert consume_range(table, first, add).again
    assert values(table) == list(range(100))


def test_a_range_behind_a_hole_is_refused(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 60))
    first = next_range(table, topic, 30)
    consume_range(table, first, add)
    second = next_range(table, topic, 30)
    set_position(table, CONSUMER, topic, "beginning")
    with pytest.raises(RangeRefused, match="would never be consumed"):
        consume_range(table, second, add)
    assert len(values(table)) == 30


def test_a_range_of_marks_alone_moves_the_position_and_calls_nobody(table: Settings, topic: str) -> None:
    commit(table, topic, ["1", "2"])
    consume_range(table, next_range(table, topic), add)
    commit(table, topic, ["3"], abort=True)
    wanted = next_range(table, topic)
    assert wanted.offsets == 2  # The aborted record, and the mark.

    def never(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        raise AssertionError("there is nothing to handle")

    done = consume_range(table, wanted, never)
    assert (done.records, done.again) == (0, False)
    assert planned(table, topic).range is None
    assert values(table) == [1, 2]


def test_an_open_transaction_is_not_part_of_a_range(table: Settings, topic: str) -> None:
    commit(table, topic, ["1"])
    producer = Producer({"bootstrap.servers": table.bootstrap_servers, "transactional.id": f"{topic}-open"})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(topic, "2", "key", partition=0)
    producer.flush(20)
    produce_at = Producer({"bootstrap.servers": table.bootstrap_servers})
    produce_at.produce(topic, "3", "key", partition=0)
    produce_at.flush(20)
    wanted = next_range(table, topic)
    assert wanted.text() == "0:0-2"
    consume_range(table, wanted, add)
    assert values(table) == [1]
    producer.commit_transaction(20)
    eventually(lambda: topic_state(table, topic).end[0] == 5, 20)
    consume_range(table, next_range(table, topic), add)
    assert values(table) == [1, 2, 3]
    producer.close()
    produce_at.close()


def test_records_that_kafka_has_deleted_are_counted(table: Settings, topic: str) -> None:
    for number in range(20):
        commit(table, topic, [str(number)])
    consume_range(table, next_range(table, topic, 10), add)
    wanted = next_range(table, topic, 20)  # Requested, but not yet run.
    admin = AdminClient({"bootstrap.servers": table.bootstrap_servers})
    [future] = admin.delete_records([TopicPartition(topic, 0, 24)]).values()
    future.result(60)
    assert planned(table, topic).lost == 14
    done = consume_range(table, wanted, add)
    assert (done.lost, done.records) == (14, 3)
    while (found := planned(table, topic).range) is not None:
        consume_range(table, found, add)
    assert values(table) == [*range(5), *range(12, 20)]
    position = read_position(table, CONSUMER, topic)
    assert position is not None
    assert position.lost == 14
    set_position(table, CONSUMER, topic, "here")
    assert read_position(table, CONSUMER, topic) == type(position)(position.topic_id, position.next_offsets, 0)


def test_a_recreated_topic_stops_the_consumer_until_it_is_told_where_to_begin(table: Settings, group: str) -> None:
    topic = create_topic(table, f"{group}-anew", 1)
    produce(table, topic, numbered(0, 10))
    old = next_range(table, topic)
    consume_range(table, old, add)
    admin = AdminClient({"bootstrap.servers": table.bootstrap_servers})
    [future] = admin.delete_topics([topic]).values()
    future.result(60)
    eventually(lambda: topic not in admin.list_topics(timeout=30).topics, 20)
    create_topic(table, topic, 1)
    produce(table, topic, numbered(10, 15))
    with pytest.raises(TopicReplaced, match="recreated"):
        planned(table, topic)
    with pytest.raises(TopicReplaced, match="recreated"):
        consume_range(table, TopicRange(CONSUMER, topic, topic_state(table, topic).topic_id, {0: 0}, {0: 15}), add)
    assert set_position(table, CONSUMER, topic, "beginning") == f"{CONSUMER} goes on at the beginning of {topic}"
    with pytest.raises(TopicReplaced):
        consume_range(table, old, add)
    consume_range(table, next_range(table, topic), add)
    assert values(table) == list(range(25))


def test_a_topic_that_is_widened_is_consumed_in_full(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 20))
    consume_range(table, next_range(table, topic), add)
    admin = AdminClient({"bootstrap.servers": table.bootstrap_servers})
    [future] = admin.create_partitions([NewPartitions(topic, 6)]).values()
    future.result(60)
    eventually(lambda: len(topic_state(table, topic).end) == 6, 20)
    produce(table, topic, [(f"key-{number}", str(number)) for number in range(20, 80)])
    wanted = next_range(table, topic)
    assert len(wanted.begin) > 3
    consume_range(table, wanted, add)
    assert values(table) == list(range(80))


def test_what_kafka_deleted_of_a_new_partition_before_it_was_consumed_is_counted(table: Settings, topic: str) -> None:
    produce(table, topic, [("key", str(number)) for number in range(20)])  # Two partitions of three hold nothing.
    consume_range(table, next_range(table, topic), add)
    position = read_position(table, CONSUMER, topic)
    assert position is not None
    assert len(position.next_offsets) == 3
    admin = AdminClient({"bootstrap.servers": table.bootstrap_servers})
    [future] = admin.create_partitions([NewPartitions(topic, 4)]).values()
    future.result(60)
    eventually(lambda: len(topic_state(table, topic).end) == 4, 20)
    with closing(Producer({"bootstrap.servers": table.bootstrap_servers})) as producer:
        for number in range(20, 30):
            producer.produce(topic, str(number), "key", partition=3)
        assert producer.flush(20) == 0
    [future] = admin.delete_records([TopicPartition(topic, 3, 6)]).values()
    future.result(60)
    assert consume_range(table, next_range(table, topic), add).lost == 6
    assert values(table) == [*range(20), *range(26, 30)]
    position = read_position(table, CONSUMER, topic)
    assert position is not None
    assert position.lost == 6


def test_a_backfill_consumes_again_and_once(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 30))
    wanted = next_range(table, topic)
    consume_range(table, wanted, add)
    again = TopicRange(CONSUMER, topic, wanted.topic_id, wanted.begin, wanted.end, backfill="after the fix")
    assert [consume_range(table, again, add).again for _ in range(2)] == [False, True]
    assert len(values(table)) == 60
    assert planned(table, topic).range is None


def _handler(*before: str) -> Callable[[psycopg.Connection[Any], Sequence[Received]], None]:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        add(connection, records)
        for each in before:
            connection.execute(each.encode())

    return handle


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (["COMMIT"], "ended the transaction"),
        (["COMMIT AND CHAIN"], "ended the transaction"),
        (["ROLLBACK", "BEGIN"], "ended the transaction"),
        (["PREPARE TRANSACTION 'its own'", "BEGIN"], "ended the transaction"),
    ],
)
def test_a_handler_that_ends_the_transaction_is_told_so_and_the_range_is_consumed_again(
    table: Settings, topic: str, done: list[str], said: str
) -> None:
    produce(table, topic, numbered(0, 3))
    wanted = next_range(table, topic)
    with pytest.raises(HandlerMisuse, match=said):
        consume_range(table, wanted, _handler(*done))
    assert query(table, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []
    query(table, "TRUNCATE effect")
    assert consume_range(table, wanted, add).records == 3
    assert values(table) == [0, 1, 2]


def test_a_range_whose_handler_commits_and_then_fails_is_consumed_again(table: Settings, topic: str) -> None:
    """The position has not moved, so what the handler had not written yet is not left out."""
    produce(table, topic, numbered(0, 3))
    wanted = next_range(table, topic)
    with pytest.raises(psycopg.errors.UndefinedTable):
        consume_range(table, wanted, _handler("TRUNCATE effect", "COMMIT", "SELECT * FROM not_there"))
    assert consume_range(table, wanted, add).records == 3
    assert values(table) == [0, 1, 2]


@pytest.mark.parametrize("begins", [(), ("BEGIN",)])
def test_what_a_handler_has_prepared_before_it_failed_does_not_keep_the_position_locked(
    table: Settings, topic: str, begins: tuple[str, ...]
) -> None:
    produce(table, topic, numbered(0, 3))
    wanted = next_range(table, topic)
    with pytest.raises(psycopg.errors.UndefinedTable):
        consume_range(table, wanted, _handler("PREPARE TRANSACTION 'its own'", *begins, "SELECT * FROM not_there"))
    assert query(table, "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []
    assert consume_range(table, wanted, add).records == 3
    assert values(table) == [0, 1, 2]


def test_a_handler_that_goes_on_after_a_failed_statement_is_told_so(table: Settings, topic: str) -> None:
    def handle(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
        with suppress(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM not_there")

    produce(table, topic, numbered(0, 3))
    with pytest.raises(HandlerMisuse, match="after a failed statement"):
        consume_range(table, next_range(table, topic), handle)


def test_a_record_without_a_name_is_named_by_its_place_in_this_incarnation_of_the_topic(
    table: Settings, topic: str
) -> None:
    """As an inbox names it."""
    producer = Producer({"bootstrap.servers": table.bootstrap_servers})
    producer.produce(topic, "1", "key", partition=0)
    assert producer.flush(20) == 0
    producer.close()
    consume_range(table, next_range(table, topic), add)
    assert query(table, "SELECT event FROM effect") == [(f"{topic_state(table, topic).topic_id}/0/0",)]


def test_a_topic_that_is_not_there_and_a_broker_that_is_away_are_said(settings: Settings, group: str) -> None:
    with pytest.raises(ServerRefused, match=f"the topic {group}-none cannot be read"):
        topic_state(settings, f"{group}-none")
    with pytest.raises(LogUnavailable):
        topic_state(settings.model_copy(update={"bootstrap_servers": "127.0.0.1:1"}), "orders", 1.0)


SCRIPT = """
import os, sys, time
from outbox_plugin import Settings
from outbox_plugin.consuming import TopicRange, consume_range
from tests.integration.test_consuming import add, next_range

def slow(connection, records):
    add(connection, records[:-1])
    print("half-way", flush=True)
    time.sleep(float(sys.argv[2]))
    add(connection, records[-1:])

settings = Settings()
print(consume_range(settings, next_range(settings, sys.argv[1]), slow).records)
"""


def test_a_run_that_is_killed_half_way_has_no_effect_and_leaves_no_hole(table: Settings, topic: str) -> None:
    produce(table, topic, numbered(0, 100))
    checkout = Path(__file__).resolve().parents[2]

    def started(seconds: float) -> subprocess.Popen[str]:
        env = {**environment(table), "PYTHONPATH": str(checkout)}
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, topic, str(seconds)], env=env, stdout=subprocess.PIPE, text=True
        )

    with started(600) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == "half-way\n"
        with started(0) as second:  # Beside the first one: it waits for its transaction.
            os.kill(killed.pid, signal.SIGKILL)
            out, _ = second.communicate(timeout=180)
    assert out.split() == ["half-way", "100"]
    assert values(table) == list(range(100))
