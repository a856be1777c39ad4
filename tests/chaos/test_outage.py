"""A server that goes away later: the harvester stays up, says so, and goes on when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox_plugin import Settings
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.embedded.stack import EmbeddedStack
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.status.reader import read_status
from tests.harvesting import assert_exactly_once_in_order, consume, create_topic, drained, harvesters, insert_numbered
from tests.support import eventually

pytestmark = pytest.mark.chaos

TOPIC = "events"


@pytest.fixture
def own_servers(tmp_path: Path) -> Iterator[EmbeddedStack]:
    """Servers of the test's own, which it may kill."""
    stack = EmbeddedStack(tmp_path / "stack")
    stack.start()
    yield stack
    stack.stop()


@pytest.fixture
def settings(own_servers: EmbeddedStack) -> Settings:
    settings = Settings(dsn=own_servers.postgres.dsn, bootstrap_servers=own_servers.kafka.bootstrap_servers)
    migrate(settings)
    create_topic(settings, TOPIC)
    return settings


def test_postgres_and_kafka_killed_and_started_again(
    own_servers: EmbeddedStack, settings: Settings, tmp_path: Path
) -> None:
    kafka = own_servers.kafka
    assert isinstance(kafka, EmbeddedKafka)
    with harvesters(settings, tmp_path) as [harvester]:
        eventually(harvester.leads, 60)
        insert_numbered(settings, TOPIC, 0, 20_000)
        eventually(lambda: read_status(settings).shards[0].published > 0, 60)

        own_servers.postgres.kill()
        eventually(lambda: "Postgres" in (read_status(settings, 10).shards[0].trouble or ""), 60)
        status = read_status(settings, 10)
        assert status.backlog is None
        assert "Postgres" in status.errors[0]
        assert harvester.alive
        own_servers.postgres.launch()
        own_servers.postgres.wait()
        drained(settings)
        eventually(lambda: read_status(settings).shards[0].trouble is None, 60)
        assert (read_status(settings).parked_keys, read_status(settings).dead_letters) == (0, 0)

        insert_numbered(settings, TOPIC, 20_000, 20_000)
        kafka.kill()
        insert_numbered(settings, TOPIC, 40_000, 20_000)
        status = read_status(settings, 10)
        assert status.backlog is not None
        assert "Kafka" in status.errors[0]
        eventually(lambda: "leading no more" in harvester.log.split("leading as")[-1], 60)
        assert harvester.alive
        kafka.launch()
        kafka.wait()
        drained(settings)
        assert (read_status(settings).parked_keys, read_status(settings).dead_letters) == (0, 0)
        assert "Traceback" not in harvester.log
        assert harvester.terminate() == 0
    assert_exactly_once_in_order(consume(settings, TOPIC), 0, 60_000)
