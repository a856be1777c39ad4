"""The topics of coordination are waited for while a broker is busy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_plugin.coordination import coordination_topics, log
from outbox_plugin.coordination.coordination_topics import STATE_SUFFIX, check_name, ensure_topics
from outbox_plugin.errors import LogUnavailable, ServerRefused, UserError
from tests.support import PATIENCE

SETTINGS: Any = SimpleNamespace(bootstrap_servers="127.0.0.1:1")


def answered(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


class BusyCluster:
    """Makes topics at once, and shows them after so many seconds. Each request takes one."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self._shown_at = seconds

    def describe_topics(self, topics: Any, **_: Any) -> dict[str, Future[Any]]:
        self.now += 1.0
        shown: Any = SimpleNamespace(partitions=[0], topic_id="id")
        unknown = KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        return {each: answered(shown if self.now > self._shown_at else unknown) for each in ("t", "t" + STATE_SUFFIX)}

    def create_topics(self, topics: list[Any]) -> dict[str, Future[Any]]:
        exists = KafkaException(KafkaError(KafkaError.TOPIC_ALREADY_EXISTS))
        return {each.topic: answered(exists if self.now > 1 else None) for each in topics}

    def describe_configs(self, resources: Any, **_: Any) -> dict[Any, Future[Any]]:
        return {}


def test_topics_that_appear_once_a_broker_has_made_thousands_of_partitions_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It shows a new topic when all that was made before is there. 5,500 partitions took one 39 s."""
    cluster: Any = BusyCluster(60)
    monkeypatch.setattr(coordination_topics, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    assert ensure_topics(cluster, "t", SETTINGS).keys() == {"t", "t" + STATE_SUFFIX}


def test_topics_that_do_not_appear_are_not_waited_for_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster: Any = BusyCluster(float("inf"))
    monkeypatch.setattr(coordination_topics, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    with pytest.raises(LogUnavailable, match="the topic t was created, and does not appear"):
        ensure_topics(cluster, "t", SETTINGS)
    assert cluster.now < 200


def test_a_broker_that_does_not_answer_to_a_creation_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is waited for no longer than any other: librdkafka may give none for a minute."""
    cluster: Any = BusyCluster(1)
    cluster.create_topics = lambda topics: {each.topic: Future() for each in topics}
    monkeypatch.setattr(coordination_topics, "REQUEST_TIMEOUT_SECONDS", 0.01)
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(ensure_topics(cluster, "t", SETTINGS)), daemon=True)
    asking.start()
    asking.join(10 * PATIENCE)
    assert found


def test_a_creation_that_is_refused_is_told() -> None:
    cluster: Any = BusyCluster(1)
    refused = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
    cluster.create_topics = lambda topics: {each.topic: answered(refused) for each in topics}
    with pytest.raises(ServerRefused):
        ensure_topics(cluster, "t", SETTINGS)


@pytest.mark.parametrize("name", ["", ".", "..", "bad/name", "ä", "t" * 244, "t\n"])
def test_a_name_that_kafka_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"^coordination topic: expected a name of 1 to 243 letters, digits, dots"):
        check_name(name)


@pytest.mark.parametrize("name", ["t", "...", "__marshal", "t" * 243])
def test_a_name_that_kafka_allows(name: str) -> None:
    check_name(name)


def test_a_start_says_soon_that_the_brokers_take_no_record(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new topic may need long. So may a broker that is dead or hangs, and a start would be silent for two minutes."""
    ever: Any = object.__new__(log.CoordinationLog)
    ever.topic, ever._trouble = "claims", None
    ever._writer = SimpleNamespace(produce=lambda *_, **__: None, flush=lambda _: time.sleep(0.01), poll=lambda _: None)
    monkeypatch.setattr(log, "APPEAR_SECONDS", 0.1)
    with pytest.raises(LogUnavailable):
        ever._ask_for_time()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_partition_that_a_broker_does_not_tell_of_is_not_taken_for_read() -> None:
    """The client leaves its asked time in the place of the offset, which lies behind the partition's end."""
    silent = SimpleNamespace(
        partition=0, offset=1_700_000_000_000, error=KafkaError(KafkaError.REQUEST_TIMED_OUT, "silent")
    )
    followed: Any = object.__new__(log.CoordinationLog)
    followed.topic, followed._settings, followed.bounds = "claims", SETTINGS, lambda *_: (0, 7)
    followed._reader = SimpleNamespace(offsets_for_times=lambda *_: [silent], assign=lambda _: None)
    with pytest.raises(LogUnavailable, match="silent"):
        list(followed.follow([0], 1_700_000_000.0))
