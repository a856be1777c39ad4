"""What a topic proves; each kind of fault is found."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from outbox_plugin import Settings
from outbox_plugin.adapters import kafka_reader, topic_metadata
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.verification import topic_ends, topic_reader
from outbox_plugin.verification.sequence_set import SequenceSet
from outbox_plugin.verification.topic_reader import verify_topics
from outbox_plugin.verification.verdict import TopicVerdict
from outbox_plugin.verification.verifier import Verifier
from tests.clock import SimulatedTime

SETTINGS = Settings(dsn="postgresql://db/x", bootstrap_servers="kafka:9092")
CLOCK = SimulatedTime()


@pytest.fixture(autouse=True)
def _time_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (topic_ends, kafka_reader, topic_metadata):
        monkeypatch.setattr(module, "time", CLOCK)


def judged(*records: tuple[str, str, str, str], job: str | None = None) -> TopicVerdict:
    """Records as (key, job, sequence, idempotency key)."""
    verifier = Verifier(job)
    for offset, (key, of_job, sequence, event) in enumerate(records):
        headers = {"outbox-job": of_job, "outbox-sequence": sequence, "idempotency-key": event}
        verifier.judge(f"t/0 offset {offset}", key.encode(), [(name, text.encode()) for name, text in headers.items()])
    return verifier.verdict


def test_once_and_in_order() -> None:
    verdict = judged(("a", "j", "1", "x"), ("b", "j", "2", "y"), ("a", "j", "10", "z"))
    assert (verdict.records, verdict.in_order) == (3, True)


def test_a_swapped_pair_of_one_key_is_found() -> None:
    verdict = judged(("a", "j", "2", "x"), ("a", "j", "1", "y"))
    assert (verdict.order_violations, verdict.in_order) == (1, False)
    assert verdict.example_violations == ["key a at t/0 offset 1"]


def test_keys_are_independent_and_so_are_jobs() -> None:
    assert judged(("a", "j", "2", "x"), ("b", "j", "1", "y"), ("a", "later", "1", "z")).in_order


def test_a_duplicate_is_found_and_is_no_disorder() -> None:
    verdict = judged(("a", "j", "1", "x"), ("a", "j", "2", "y"), ("a", "j", "1", "x"))
    assert (verdict.records, verdict.duplicates, verdict.order_violations) == (3, 1, 0)
    assert verdict.example_duplicates == ["x at t/0 offset 2"]


def test_only_the_job_that_is_asked_for_counts() -> None:
    assert judged(("a", "old", "1", "x"), ("a", "new", "1", "y"), ("a", "old", "1", "x"), job="new") == TopicVerdict(1)


def test_what_cannot_be_judged_is_said() -> None:
    verifier = Verifier()
    verifier.judge("t/0 offset 0", b"k", [("idempotency-key", b"x")])
    verifier.judge("t/0 offset 1", b"k", [("outbox-job", b"j"), ("outbox-sequence", b"1")])
    verifier.judge("t/0 offset 2", b"k", [("outbox-job", b"j")])
    assert verifier.verdict == TopicVerdict(3, unnamed=1, unplaced=2)


def test_an_event_of_a_job_that_came_twice_is_found_without_a_key() -> None:
    verifier = Verifier()
    for offset, sequence in enumerate((b"1", b"2", b"1")):
        verifier.judge(f"t/0 offset {offset}", b"k", [("outbox-job", b"j"), ("outbox-sequence", sequence)])
    assert (verifier.verdict.duplicates, verifier.verdict.unnamed) == (1, 0)
    assert verifier.verdict.example_duplicates == ["job j 1 at t/0 offset 2"]


@pytest.mark.parametrize("first", [[("idempotency-key", b"x")], [("outbox-job", b"j"), ("outbox-sequence", b"1")], []])
def test_a_replay_repeats_events_on_purpose(first: list[tuple[str, bytes | None]]) -> None:
    """As often as somebody asks for it, and behind all later events."""
    verifier = Verifier()
    later: list[tuple[str, bytes | None]] = [("outbox-job", b"j"), ("outbox-sequence", b"2")]
    again = [*first, ("outbox-replay", b"17")]
    for offset, headers in enumerate((first, later, again, again)):
        verifier.judge(f"t/0 offset {offset}", b"k", headers)
    assert (verifier.verdict.records, verifier.verdict.replayed, verifier.verdict.in_order) == (4, 2, True)
    assert verifier.verdict.unnamed == (0 if first else 1)


def test_one_key_of_two_types_is_two_events() -> None:
    verifier = Verifier()
    for kind in (b"Placed", b"Paid"):
        verifier.judge("t/0 offset 0", b"k", [("idempotency-key", b"7"), ("event-type", kind)])
    assert verifier.verdict.duplicates == 0


def test_records_of_others_are_only_counted() -> None:
    verifier = Verifier()
    verifier.judge("t/0 offset 0", b"", [])
    verifier.judge("t/0 offset 1", b"", [("something", None)])
    assert verifier.verdict == TopicVerdict(2, unnamed=2, unplaced=2)


def test_records_of_two_partitions_have_no_order() -> None:
    verifier = Verifier()
    for partition, place in ((0, b"2"), (1, b"1")):
        verifier.judge("where", b"k", [("outbox-job", b"j"), ("outbox-sequence", place)], ("t", partition))
    assert verifier.verdict.in_order


def test_an_event_of_another_topic_is_another_one() -> None:
    verifier = Verifier()
    for topic in ("orders", "payments"):
        verifier.judge("where", b"k", [("idempotency-key", b"7")], (topic, 0))
    assert verifier.verdict.duplicates == 0


def test_what_is_missing_is_known_by_its_place_and_by_what_was_emitted() -> None:
    verifier = Verifier()
    for place in (1, 2, 4, 5):
        headers = [("outbox-job", b"j"), ("outbox-sequence", b"%d" % place)]
        verifier.judge(f"t/0 offset {place}", b"k", headers)
    verifier.count_missing({"j": 7, "unseen": 1})
    assert verifier.verdict.missing == 4
    assert verifier.verdict.example_missing == ["j 3", "j 6", "j 7"]


@given(st.sets(st.integers(1, 2_000)), st.integers(0, 2_100))
def test_places_are_a_set_of_numbers(numbers: set[int], last: int) -> None:
    places = SequenceSet()
    for number in numbers:
        places.add(number)
    places.add(0)
    assert (len(places), places.last) == (len(numbers), max(numbers, default=0))
    assert list(places.missing(last)) == [number for number in range(1, last + 1) if number not in numbers]


def test_a_record_takes_little_memory() -> None:
    """Some millions fit, whatever their keys and places are."""
    verifier = Verifier()
    tracemalloc.start()
    try:
        for number in range(20_000):
            headers = [
                ("idempotency-key", b"event-%d" % number + b"x" * 900),
                ("outbox-job", b"j"),
                ("outbox-sequence", b"%d" % (number * 10**12 + 1)),
            ]
            verifier.judge(f"t/0 offset {number}", b"key-%d" % number + b"x" * 900, headers)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / 20_000 < 500


def test_the_ends_are_those_that_committed_records_reach() -> None:
    """Kafka answers a commit before each partition shows its records."""
    answers = iter([{0: 3, 1: 0}, {0: 9, 1: 0}, {0: 12, 1: 7}])
    assert topic_ends.reached_ends({0: 9, 1: 7}, lambda: next(answers)) == {0: 9, 1: 7}


def test_a_transaction_that_stays_open_is_not_waited_for() -> None:
    began = CLOCK.monotonic()
    assert topic_ends.reached_ends({0: 9, 1: 7}, lambda: {0: 9, 1: 2}) == {0: 9, 1: 2}
    assert CLOCK.monotonic() - began == pytest.approx(topic_ends.COMMIT_SECONDS, abs=0.1)


class Unreachable:
    """A Kafka that answers nothing."""

    asked: list[float] = []  # noqa: RUF012 - of one test.

    def __init__(self, config: object) -> None:
        """Nothing is to be done."""

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        self.asked.append(timeout)
        CLOCK.sleep(timeout)
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def close(self) -> None:
        """Nothing is to be done."""


def test_all_topics_together_are_waited_for_no_longer_than_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_ends, "Consumer", Unreachable)
    monkeypatch.setattr(topic_ends, "LIST_SECONDS", 8.0)
    monkeypatch.setattr(topic_ends, "WAIT_SECONDS", 20.0)
    monkeypatch.setattr(Unreachable, "asked", [])
    topic_ends.wait_for_commits(SETTINGS, [f"t-{number}" for number in range(20)])
    assert Unreachable.asked == [8.0, 8.0, 4.0]


def test_an_open_transaction_is_waited_for_until_the_deadline_alone() -> None:
    began = CLOCK.monotonic()
    assert topic_ends.reached_ends({0: 9}, lambda: {0: 2}, began + 1.0) == {0: 2}
    assert CLOCK.monotonic() - began == pytest.approx(1.0, abs=0.1)


class SilentPartition:
    """A Kafka where one partition is written without end, and another one never answers."""

    def __init__(self, config: object) -> None:
        self._offset = 0

    def list_topics(self, topic: str, timeout: float) -> SimpleNamespace:
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None, 1: None})})

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = 0.0, *, cached: bool = False
    ) -> tuple[int, int]:
        return 0, 1

    def assign(self, partitions: list[TopicPartition]) -> None:
        """Nothing is to be done."""

    def consume(self, most: int, seconds: float) -> list[SimpleNamespace]:
        self._offset += 1
        assert self._offset < 10_000, "the silent partition is waited for without end"
        CLOCK.sleep(0.001)
        return [
            SimpleNamespace(
                error=lambda: None,
                topic=lambda: "orders",
                partition=lambda: 0,
                offset=lambda: self._offset - 1,
                leader_epoch=lambda: 0,
                key=lambda: b"k",
                headers=list,
            )
        ]

    def close(self) -> None:
        """Nothing is to be done."""


def test_a_partition_that_is_silent_is_given_up_also_beside_one_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topic_reader, "Consumer", SilentPartition)
    monkeypatch.setattr(topic_ends, "Consumer", SilentPartition)
    monkeypatch.setattr(topic_reader, "SILENCE_SECONDS", 2.0)
    began = CLOCK.monotonic()
    with pytest.raises(LogUnavailable, match="was not read to its end"):
        verify_topics(SETTINGS, ["orders"])
    assert CLOCK.monotonic() - began == pytest.approx(2.0, abs=0.2)
