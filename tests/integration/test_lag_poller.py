"""The poller of lags on a real broker that is killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.observe import lag_poller
from outbox_plugin.observe.lag_poller import LagPoller
from tests.harvesting import create_topic
from tests.processes import launched
from tests.support import eventually


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    """A broker that can be killed and started again."""
    broker = EmbeddedKafka(tmp_path / "kafka", print)
    with launched(broker):
        yield broker


def test_lags_are_found_again_once_a_broker_is_back(broker: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its partitions have leaders of later epochs then, and had none for a while."""
    monkeypatch.setattr(lag_poller, "POLL_SECONDS", 0.2)
    settings = Settings(dsn="postgresql://nowhere/db", bootstrap_servers=broker.bootstrap_servers)
    topic = create_topic(settings, "orders")
    lags = {TopicPartition(topic, partition): 0 for partition in range(3)}
    found: list[object] = []
    with closing(LagPoller(settings, lambda: lags, found.append, lambda _: None)):
        eventually(lambda: lags in found, 30)
        broker.kill()
        broker.launch()
        broker.wait()
        found.clear()
        eventually(lambda: lags in found, 30)
