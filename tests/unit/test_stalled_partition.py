"""Which partitions are said to take no records, and how many replicas they have in sync, by what brokers answer."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import Producer

from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.stalled_partition import which_stalled, why_without_coordinator
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC, coordinator_partition

SETTINGS = Settings(dsn="postgresql://nowhere/none", bootstrap_servers="127.0.0.1:1")
PARTITION = coordinator_partition("outbox-0", 3)
ALL_IN_SYNC, ONE_IN_SYNC, NO_LEADER = (1, [1, 2, 3]), (1, [1]), (-1, [1])


class Brokers:
    """A client whose brokers answer with these partitions, each with its leader and its replicas in sync."""

    def __init__(self, topics: Mapping[str, Mapping[int, tuple[int, list[int]]]]) -> None:
        self._topics = topics

    def list_topics(self, topic: str | None = None, timeout: float = 0.0) -> Any:
        topics = {
            name: SimpleNamespace(
                partitions={
                    number: SimpleNamespace(id=number, leader=leader, isrs=in_sync, replicas=[1, 2, 3])
                    for number, (leader, in_sync) in partitions.items()
                }
            )
            for name, partitions in self._topics.items()
        }
        return SimpleNamespace(topics=topics)


def coordinator(monkeypatch: pytest.MonkeyPatch, answer: Mapping[int, Any], least: int | None, **suspect: bool) -> str:
    monkeypatch.setattr(KafkaAdmin, "least_in_sync", lambda *_: least)
    client = cast("Producer", Brokers({TRANSACTION_STATE_TOPIC: answer}))
    why = why_without_coordinator(client, SETTINGS, "outbox-0", lambda: True, is_suspect=suspect["is_suspect"])
    return str(why).rpartition("records: ")[2]


@pytest.mark.parametrize(
    ("found", "least", "is_suspect", "said"),
    [
        (ALL_IN_SYNC, 2, True, "None"),
        (NO_LEADER, None, False, f"no broker leads partition {PARTITION} now"),
        (ONE_IN_SYNC, 1, True, "None"),
        (ONE_IN_SYNC, 2, False, f"partition {PARTITION} has 1 replica(s) in sync, and its min.insync.replicas is 2"),
        (ONE_IN_SYNC, None, False, "None"),
        (
            ONE_IN_SYNC,
            None,
            True,
            f"partition {PARTITION} has 1 of 3 replicas in sync, and its min.insync.replicas may ask for more",
        ),
    ],
)
def test_a_coordinator_is_suspected_only_where_it_has_not_answered(
    monkeypatch: pytest.MonkeyPatch, found: tuple[int, list[int]], least: int | None, is_suspect: bool, said: str
) -> None:
    """Few roles may read `min.insync.replicas`. A transaction is not given up because a replica is out of sync."""
    partitions = dict.fromkeys(range(3), ALL_IN_SYNC) | {PARTITION: found}
    assert coordinator(monkeypatch, partitions, least, is_suspect=is_suspect) == said


def test_a_topic_of_transactions_that_we_may_not_describe_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert coordinator(monkeypatch, {}, 2, is_suspect=True) == "None"


def test_some_partitions_are_named_those_without_a_leader_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KafkaAdmin, "least_in_sync", lambda _, topic, __: 2 if topic == "a" else None)
    topics = {
        "a": {0: ALL_IN_SYNC, 1: ONE_IN_SYNC},
        "b": {0: NO_LEADER},
        "c": {0: ONE_IN_SYNC},
        "other": {0: NO_LEADER},
    }

    def named(topics: Mapping[str, Mapping[int, tuple[int, list[int]]]]) -> str | None:
        client = cast("Producer", Brokers(topics))
        return which_stalled(client, SETTINGS, lambda topic: topic != "other", lambda: True)

    assert named(topics) == (
        "topic b: no broker leads partition 0 now; "
        "topic a: partition 1 has 1 replica(s) in sync, and its min.insync.replicas is 2"
    )
    assert named({"c": topics["c"]}) is None
    many = named({"b": dict.fromkeys(range(9), NO_LEADER)})
    assert str(many).split("; ")[4:] == ["topic b: no broker leads partition 4 now", "and others"]
