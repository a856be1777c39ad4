"""Ids that are far apart, as snowflake ids are: a progress record that names many of them is too large for Kafka."""

from __future__ import annotations

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from tests.harvesting import assert_exactly_once_in_order, consume, drained

pytestmark = pytest.mark.integration
ROWS = 30_000


def insert_sparse(settings: Settings, topic: str, rows: int) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key, kafka_value) "
            "SELECT 1000000000000000000 + i * 4194304::bigint, %s, 'key-' || i %% 100, i "
            "FROM generate_series(1, %s) AS i",
            (topic, rows),
        )


def drains_in_one_term(settings: Settings, topic: str) -> None:
    insert_sparse(settings, topic, ROWS)
    events: list[HarvestEvent] = []
    with Harvester(settings, observe=events.append):
        drained(settings)
        assert not [event for event in events if isinstance(event, TermFinished)]
    assert_exactly_once_in_order(consume(settings, topic), 1, ROWS)


@pytest.mark.parametrize("limit", [1_000_000, 50_000])
def test_a_record_is_no_larger_than_the_client_takes(settings: Settings, topic: str, limit: int) -> None:
    drains_in_one_term(settings.model_copy(update={"kafka": {"message.max.bytes": limit}}), topic)


def test_a_record_is_no_larger_than_the_topic_takes(settings: Settings, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    small = {"cleanup.policy": "compact", "max.message.bytes": "100000"}
    [made] = admin.create_topics([NewTopic(KafkaNames.of(settings).progress_topic, 1, config=small)]).values()
    made.result(60)
    drains_in_one_term(settings, topic)
