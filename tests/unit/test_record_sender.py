"""Rows as Postgres can hold them, handed to a real producer without a broker: bad ones are named, none raises."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin.adapters.record_sender import RecordSender
from outbox_plugin.core.row import OutboxRow, Rows, WholeRecord
from outbox_plugin.core.row_faults import fault_of, faults_of
from outbox_plugin.errors import SchemaMissing, TopicsAway

QUIET = logging.getLogger("outbox_plugin.tests.librdkafka")
QUIET.setLevel(logging.CRITICAL + 1)

# What a TEXT holds: any character but NUL, and no lone surrogate.
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
elements = st.none() | texts
arrays = st.lists(elements, max_size=3) | st.lists(st.lists(elements, min_size=2, max_size=2), max_size=2)
of_sql: st.SearchStrategy[tuple[Any, ...]] = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),  # create_time; infinity is at the ends.
    st.sampled_from(["orders", "payments"]),
    st.none() | texts,
    st.none() | texts | st.binary(max_size=8),
    st.none() | arrays,
    st.none() | arrays,
)


class Unreachable:
    """A producer without a broker; `taken` has what it took."""

    def __init__(self) -> None:
        self._producer = Producer({"bootstrap.servers": "127.0.0.1:1", "logger": QUIET})
        self.taken: list[tuple[Any, ...]] = []

    def produce(self, *arguments: Any) -> None:
        self._producer.produce(*arguments)
        self.taken.append(arguments)

    def close(self) -> None:
        self._producer.purge()
        self._producer.close()


@pytest.fixture(scope="module")
def producer() -> Iterator[Unreachable]:
    with closing(Unreachable()) as producer:
        yield producer


class FailedDelivery:
    """The record of `GOOD`, as a delivery report has it."""

    def topic(self) -> str:
        return "orders"

    def key(self) -> bytes:
        return b"k"

    def value(self) -> bytes:
        return b"v"


def handed_over(producer: Unreachable, rows: list[OutboxRow]) -> RecordSender:
    producer.taken.clear()
    records = RecordSender(lambda _: None)
    records.reset()
    records.produce(producer, Rows([tuple(row) for row in rows]))  # type: ignore[arg-type]
    return records


GOOD = OutboxRow(0, 5, "orders", "k", "v", ["h"], ["x"], 9)


@given(found=st.lists(of_sql, max_size=5), place=st.integers(0, 5))
def test_whatever_rows_postgres_holds_the_good_ones_go_and_the_bad_ones_are_named(
    producer: Unreachable, found: list[tuple[Any, ...]], place: int
) -> None:
    rows = [OutboxRow._make((number, *fields, 9)) for number, fields in enumerate(found, start=1)]
    rows.insert(place, GOOD)
    records = handed_over(producer, rows)
    bad = {row.id: fault for row in rows if (fault := fault_of(row))}
    assert faults_of(Rows([tuple(row) for row in rows])) == bad
    assert {id_: refusal.reason for id_, refusal in records.refusals.items()} == bad
    assert [(taken[0], taken[1], taken[2]) for taken in producer.taken] == [
        (row.topic, row.value, row.key) for row in rows if row.id not in bad
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"header_keys": [["a", "b"]], "header_values": ["x"]}, "the header keys are an array of arrays"),
        ({"header_keys": [["a", "b"]], "header_values": [["x", "y"]]}, "the header keys are an array of arrays"),
        ({"header_values": [["x"]]}, "the header values are an array of arrays"),
        ({"header_keys": [None]}, "the key of header 1 is NULL"),
        ({"header_keys": ["a", ""], "header_values": ["x", "y"]}, "the key of header 2 is empty"),
        ({"header_keys": ["a", "b"]}, "2 header keys, but 1 header values"),
        ({"header_keys": None}, "the array of header keys is NULL"),
        ({"header_values": None}, "the array of header values is NULL"),
        ({"header_keys": [7]}, "the key of header 1 is a int"),
        ({"header_values": [7]}, "the value of header 1 is a int"),
        ({"key": None}, "kafka_key is NULL"),
        ({"key": 7}, "kafka_key is a int"),
        ({"create_time": None}, "create_time is NULL"),
        ({"value": {"a": 1}}, "kafka_value is a dict"),
        ({"value": "\ud800"}, "no record can be made of it: UnicodeEncodeError"),
    ],
)
def test_a_row_that_cannot_be_a_record_says_why(producer: Unreachable, change: dict[str, Any], reason: str) -> None:
    bad = GOOD._replace(id=1, **change)
    records = handed_over(producer, [GOOD, bad, GOOD._replace(id=2)])
    assert list(records.refusals) == [1]
    assert records.refusals[1].reason.startswith(reason)
    assert len(producer.taken) == 2


def test_a_header_may_have_no_value(producer: Unreachable) -> None:
    assert not handed_over(producer, [GOOD._replace(header_values=[None])]).refusals  # type: ignore[list-item]


def test_rows_without_a_topic_ask_for_their_table_to_be_mended(producer: Unreachable) -> None:
    rows = [GOOD, GOOD._replace(id=1, topic=None)]  # type: ignore[arg-type]
    with pytest.raises(SchemaMissing, match="row 1: kafka_topic is NULL"):
        RecordSender(lambda _: None).unwritable_topics(producer, rows)  # type: ignore[arg-type]


def test_what_failed_is_found_among_rows_of_which_some_are_bad(producer: Unreachable) -> None:
    records = handed_over(producer, [GOOD, GOOD._replace(id=1, key=7)])  # type: ignore[arg-type]
    records.on_delivery(KafkaError(KafkaError.INVALID_RECORD), FailedDelivery())  # type: ignore[arg-type]
    assert records.interpret_failures().refusals.keys() == {0, 1}


def test_a_clock_that_is_off_is_no_rows_fault(producer: Unreachable) -> None:
    """A topic bounds how far records' times may be from the broker's. A batch of several is told as invalid records."""
    records = handed_over(producer, [GOOD])
    for code in (KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP):
        records.on_delivery(KafkaError(code), FailedDelivery())  # type: ignore[arg-type]
    sent = records.interpret_failures()
    assert not sent.refusals
    assert {error.code() for error in sent.failures} == {KafkaError.INVALID_RECORD, KafkaError.INVALID_TIMESTAMP}


def test_one_refused_timestamp_is_searched_among_all_records_of_its_batch(producer: Unreachable) -> None:
    """librdkafka reports the same error for all of them."""
    rows = [GOOD._replace(id=number, value=WholeRecord(f"k{number}", b"v", None, number)) for number in (1, 2)]
    failed = [
        SimpleNamespace(topic=lambda: "orders", key=key, value=lambda: b"v") for key in (lambda: b"k1", lambda: b"k2")
    ]
    records = handed_over(producer, rows)
    for message in failed:
        records.on_delivery(KafkaError(KafkaError.INVALID_TIMESTAMP), message)  # type: ignore[arg-type]
    sent = records.interpret_failures()
    assert not sent.refusals
    assert not sent.off_clock
    assert sent.failed == {1, 2}
    assert sent.narrowed
    records.reset()
    records.produce(producer, Rows([tuple(rows[1])]))  # type: ignore[arg-type]
    records.on_delivery(KafkaError(KafkaError.INVALID_TIMESTAMP), failed[1])  # type: ignore[arg-type]
    assert records.interpret_failures().refusals.keys() == {2}
    records.reset()
    records.produce(producer, Rows([tuple(row) for row in rows]))  # type: ignore[arg-type]
    assert len(producer.taken) == 5  # Together: the producer would have been flushed between them.


class OneTopic(Unreachable):
    """Its one topic has such leaders; `asked` counts how often they were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.leaders, self.asked = [1], 0

    def list_topics(self, topic: str, timeout: float) -> Any:
        self.asked += 1
        partitions = {number: SimpleNamespace(id=number, leader=leader) for number, leader in enumerate(self.leaders)}
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=partitions)})


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError._PURGE_QUEUE, KafkaError._TRANSPORT])
def test_a_topic_whose_delivery_failed_is_held_back_if_it_has_lost_its_leader(code: int) -> None:
    with closing(OneTopic()) as producer:
        records = RecordSender(lambda _: None)
        for _ in range(2):
            records.check_topics(producer, [GOOD])  # type: ignore[arg-type]
        assert producer.asked == 1
        records.produce(producer, [GOOD])  # type: ignore[arg-type]
        producer.leaders = [-1]
        records.on_delivery(KafkaError(code), FailedDelivery())  # type: ignore[arg-type]
        sent = records.interpret_failures()
        assert (sent.refusals, sent.failed) == ({}, frozenset({GOOD.id}))
        with pytest.raises(TopicsAway, match="no broker leads partition 0"):
            records.check_topics(producer, [GOOD])  # type: ignore[arg-type]


def test_the_partitions_of_a_topic_are_counted_once_for_many_records_of_one_that_it_lacks() -> None:
    with closing(OneTopic()) as producer:
        records = RecordSender(lambda _: None)
        rows = [GOOD._replace(id=id_, value=WholeRecord("k", "v", id_ % 3, None)) for id_ in range(90)]
        records.check_topics(producer, rows)  # type: ignore[arg-type]
        producer.leaders = [1, 1]
        records.reset()
        records.produce(producer, rows)  # type: ignore[arg-type]
        assert producer.asked == 2
        assert records.refusals.keys() == {id_ for id_ in range(90) if id_ % 3 == 2}
        records.reset()
        records.produce(producer, rows)  # type: ignore[arg-type]
        assert producer.asked == 3


class Silent(Unreachable):
    """Its flush ends before anything is answered."""

    def flush(self, _: float) -> int:
        return len(self.taken)


def test_records_that_were_sent_together_are_not_blamed_one_by_one_for_a_late_answer() -> None:
    """The answer about the first two comes while the last group has one row of their topic."""
    sizes = {1: 20_000, 2: 40_000, 3: 30_000, 4: 45_000}
    rows = [GOOD._replace(id=number, key=f"k{number}", value=f"{number}" * size) for number, size in sizes.items()]
    with closing(Silent()) as producer:
        records = RecordSender(lambda _: None)
        records._limits["orders"] = 65_536
        records.reset()
        records.produce(producer, Rows([tuple(row) for row in rows]))  # type: ignore[arg-type]
        for row in rows[:2]:
            report = SimpleNamespace(topic=lambda: "orders", key=row.key.encode, value=str(row.value).encode)
            records.on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), report)  # type: ignore[arg-type]
        sent = records.interpret_failures()
    assert (sent.refusals, sent.narrowed) == ({}, True)
    assert records.refusals_by_size() == {}


def test_a_late_answer_about_a_row_is_not_taken_for_one_about_its_twin() -> None:
    """A report lacks the headers, by which the first row is too large and its twin in the last group is not."""
    large = GOOD._replace(id=1, header_values=["x" * 90_000])
    with closing(Silent()) as producer:
        records = RecordSender(lambda _: None)
        records._limits["orders"] = 65_536
        records.reset()
        records.produce(producer, Rows([tuple(large), tuple(GOOD._replace(id=2))]))  # type: ignore[arg-type]
        records.on_delivery(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), FailedDelivery())  # type: ignore[arg-type]
        sent = records.interpret_failures()
    assert (sent.refusals, records.refusals_by_size()) == ({}, {})
