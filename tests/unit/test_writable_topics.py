"""Looking topics up: all together, nobody waits for one to appear, and a topic without a leader is left alone."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_plugin.adapters.reserved_topics import ReservedTopics
from outbox_plugin.adapters.writable_topics import (
    LOOK_UP_SECONDS,
    SILENT_FIRST,
    SILENT_LAST,
    UNKNOWN_TOPIC_SECONDS,
    WritableTopics,
)
from outbox_plugin.errors import LogUnavailable
from outbox_plugin.settings import Settings

MISSING = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
FORBIDDEN = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
LEADERLESS = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)


class Brokers:
    """Stands for a producer. `topics` has the leaders of partitions, or an error; a look-up takes `seconds`."""

    def __init__(self, topics: dict[str, list[int] | KafkaError], seconds: float = 0.001) -> None:
        self.topics = topics
        self.now = 0.0
        self.asked: list[str] = []
        self.unmentioned: set[str] = set()
        self.in_sync = [1, 2, 3]  # The replicas that are, of those three that each partition has.
        self._seconds = seconds
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def list_topics(self, topic: str, timeout: float) -> Any:
        with self._lock:
            self.now += self._seconds
            self.asked.append(topic)
        if topic in self.unmentioned:
            return SimpleNamespace(topics={})
        found = self.topics.get(topic, MISSING)
        if isinstance(found, KafkaException):
            raise found
        error = found if isinstance(found, KafkaError) else None
        leaders = [] if isinstance(found, KafkaError) else found
        partitions = {
            number: SimpleNamespace(id=number, leader=leader, replicas=[1, 2, 3], isrs=list(self.in_sync))
            for number, leader in enumerate(leaders)
        }
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions=partitions)})


def refused_and_away(topics: WritableTopics, brokers: Brokers, *names: str) -> tuple[set[str], set[str]]:
    """Which of `names` are refused, and which are away."""
    verdict = topics.unwritable(brokers, set(names))  # type: ignore[arg-type]
    return set(verdict.refused), set(verdict.away)


def test_a_topic_is_looked_up_once() -> None:
    brokers = Brokers({"orders": [1, 2]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    assert refused_and_away(topics, brokers, "orders") == refused_and_away(topics, brokers, "orders") == (set(), set())
    assert brokers.asked == ["orders"]


def test_unknown_topics_are_refused_after_their_patience_and_hold_nobody_up() -> None:
    missing = [f"missing-{number}" for number in range(8)]
    brokers = Brokers({"orders": [1]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    assert refused_and_away(topics, brokers, "orders", *missing) == (set(), set(missing))
    assert brokers.now < 0.1
    asked = len(brokers.asked)
    assert refused_and_away(topics, brokers, "orders", *missing) == (set(), set(missing))
    assert len(brokers.asked) == asked, "a topic that was just missed is not looked up again at once"
    while brokers.now < 3 * UNKNOWN_TOPIC_SECONDS:
        brokers.now += 0.1
        refused, away = refused_and_away(topics, brokers, *missing)
        if brokers.now < UNKNOWN_TOPIC_SECONDS:
            assert (refused, away) == (set(), set(missing))
        if refused:
            break
    assert refused == set(missing)


def test_ever_new_names_take_a_bounded_time() -> None:
    brokers = Brokers({"orders": [1]}, seconds=0.01)
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused, away = refused_and_away(topics, brokers, *(f"new-{number}" for number in range(1_000)))
    assert (len(refused), len(away)) == (0, 1_000)
    assert brokers.now < 2 * LOOK_UP_SECONDS


def test_a_topic_that_appears_within_the_patience_is_written_to() -> None:
    brokers = Brokers({})
    topics = WritableTopics(lambda _: None, brokers.clock)
    assert refused_and_away(topics, brokers, "orders") == (set(), {"orders"})
    brokers.topics["orders"] = [1]
    brokers.now += 1.0
    assert refused_and_away(topics, brokers, "orders") == (set(), set())


@pytest.mark.parametrize("leaders", [[1, -1, 2], LEADERLESS])
def test_a_topic_without_a_leader_is_away_for_as_long_as_that_lasts(leaders: list[int] | KafkaError) -> None:
    brokers = Brokers({"orders": leaders})
    topics = WritableTopics(lambda _: None, brokers.clock)
    for _ in range(100):
        assert refused_and_away(topics, brokers, "orders") == (set(), {"orders"})
        brokers.now += 6.0
    brokers.topics["orders"] = [1, 3, 2]
    assert refused_and_away(topics, brokers, "orders") == (set(), set())


def test_a_topic_that_an_answer_does_not_mention_is_away() -> None:
    brokers = Brokers({"orders": [1]})
    brokers.unmentioned.add("orders")
    topics = WritableTopics(lambda _: None, brokers.clock)
    assert refused_and_away(topics, brokers, "orders") == (set(), {"orders"})
    brokers.unmentioned.clear()
    brokers.now += 6.0
    assert refused_and_away(topics, brokers, "orders") == (set(), set())


def test_a_topic_that_has_lost_a_leader_is_noticed_where_nothing_is_acknowledged() -> None:
    brokers = Brokers({"orders": [1, 2], "payments": [1]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused_and_away(topics, brokers, "orders", "payments")
    assert not topics.without_leader(brokers, {"orders", "payments"})  # type: ignore[arg-type]
    brokers.topics["orders"] = [1, -1]
    assert topics.without_leader(brokers, {"orders", "payments"})  # type: ignore[arg-type]
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), {"orders"})


def test_a_topic_that_was_deleted_is_noticed_where_nothing_is_acknowledged() -> None:
    brokers = Brokers({"orders": [1], "payments": [1]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused_and_away(topics, brokers, "orders", "payments")
    brokers.topics["orders"] = MISSING
    assert topics.without_leader(brokers, {"orders", "payments"})  # type: ignore[arg-type]
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), {"orders"})


def test_a_silent_topic_with_replicas_out_of_sync_is_away_until_others_are_in_sync() -> None:
    brokers = Brokers({"orders": [1, 2], "payments": [1]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused_and_away(topics, brokers, "orders", "payments")
    brokers.in_sync = [1]
    topics.silent(["orders"])
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), {"orders"})
    brokers.now += SILENT_FIRST - 1.0
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), {"orders"})
    brokers.in_sync = [1, 2]
    brokers.now += 0.9
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), set())


def test_a_silent_topic_is_tried_again_more_and_more_rarely() -> None:
    brokers = Brokers({"orders": [1, 2]})
    brokers.in_sync = [1]
    topics = WritableTopics(lambda _: None, brokers.clock)
    waited = []
    for _ in range(8):
        topics.silent(["orders"])
        began = brokers.now
        while refused_and_away(topics, brokers, "orders") == (set(), {"orders"}):
            brokers.now += 0.5
        waited.append(brokers.now - began)
    assert waited == pytest.approx(sorted(waited))
    assert waited[0] == pytest.approx(SILENT_FIRST, abs=6.0)
    assert waited[-1] == pytest.approx(SILENT_LAST, abs=6.0)


def test_a_silent_topic_with_all_replicas_in_sync_is_tried_again_at_once() -> None:
    brokers = Brokers({"orders": [1, 2]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused_and_away(topics, brokers, "orders")
    topics.silent(["orders"])
    assert refused_and_away(topics, brokers, "orders") == (set(), set())


def test_a_topic_that_is_forgotten_is_looked_up_again() -> None:
    brokers = Brokers({"orders": [1], "payments": [1]})
    topics = WritableTopics(lambda _: None, brokers.clock)
    refused_and_away(topics, brokers, "orders", "payments")
    brokers.topics["orders"] = [-1]
    topics.forget("orders")
    assert refused_and_away(topics, brokers, "orders", "payments") == (set(), {"orders"})
    topics.forget("payments")
    brokers.topics["payments"] = [-1]
    assert refused_and_away(topics, brokers, "payments") == (set(), {"payments"})


@pytest.mark.parametrize("name", ["not there", "", ".", "..", "x" * 250, "ä"])
def test_what_is_no_name_is_refused_without_a_question(name: str) -> None:
    brokers = Brokers({})
    assert refused_and_away(WritableTopics(lambda _: None, brokers.clock), brokers, name) == ({name}, set())
    assert brokers.asked == []


def test_a_forbidden_topic_is_refused_at_once() -> None:
    brokers = Brokers({"orders": FORBIDDEN})
    assert refused_and_away(WritableTopics(lambda _: None, brokers.clock), brokers, "orders") == ({"orders"}, set())


def test_no_answer_is_nobodys_bad_row() -> None:
    brokers = Brokers({"orders": KafkaException(KafkaError(KafkaError._TIMED_OUT))})  # type: ignore[dict-item]
    topics = WritableTopics(lambda _: None, brokers.clock, should_wait=lambda: False)
    with pytest.raises(LogUnavailable, match="looking up the topic orders"):
        refused_and_away(topics, brokers, "orders")


def test_the_topics_of_harvesters_and_of_kafka_are_not_for_events() -> None:
    settings = Settings(dsn="postgresql://db/shop", bootstrap_servers="k:1", group="shop", leader_topic="turns")
    asked: list[int] = []

    def groups() -> set[str]:
        asked.append(1)
        return {"shop", "sales"}

    reserved = ReservedTopics(settings, groups)
    ours = ("turns", "shop-progress", "shop-leader", "sales-progress", "sales-leader")
    kafkas = ("__consumer_offsets", "__transaction_state", "__marshal", "__anything")
    assert all(reserved(topic) for topic in (*ours, *kafkas))
    assert not any(reserved(topic) for topic in ("orders", "order-progress", "market-leader", "_orders", "shop"))
    asked.clear()
    reserved("orders")
    assert not asked, "the database is asked about names of its form only"


def test_a_reserved_topic_is_refused_without_a_question_to_kafka() -> None:
    brokers = Brokers({"shop-progress": [1]})
    topics = WritableTopics(lambda topic: "ours" if topic == "shop-progress" else None, brokers.clock)
    assert refused_and_away(topics, brokers, "shop-progress") == ({"shop-progress"}, set())
    assert brokers.asked == []


def test_replicas_that_stay_out_of_sync_are_told_from_a_broker_that_has_just_died() -> None:
    """When a broker dies, its records stall until others lead its partitions, and the replicas in sync have changed."""
    brokers = Brokers({"orders": [1, 2]})
    topics = WritableTopics(lambda _: None, brokers.clock)

    def look() -> bool:
        brokers.now += 1.0
        assert not topics.without_leader(brokers, {"orders"})  # type: ignore[arg-type]
        return topics.stays_out_of_sync({"orders"}, 5.0)

    assert not any(look() for _ in range(9))
    brokers.topics["orders"], brokers.in_sync = [2, 2], [2, 3]
    assert not any(look() for _ in range(4))
    brokers.in_sync = [2]
    assert not any(look() for _ in range(5))
    assert look()
    topics.begin()
    assert not look()


def test_a_topic_that_takes_records_is_not_silent() -> None:
    brokers = Brokers({"orders": [1, 2]})
    brokers.in_sync = [1]
    topics = WritableTopics(lambda _: None, brokers.clock)
    for _ in range(2):
        topics.silent(["orders"])
        assert refused_and_away(topics, brokers, "orders") == (set(), {"orders"})
        brokers.now += 1.5 * SILENT_FIRST
        assert refused_and_away(topics, brokers, "orders") == (set(), set())
        topics.acknowledged(["orders"])
