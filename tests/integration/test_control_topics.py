"""The group's own topics: what happens when somebody deletes one, or recreates it in another form."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from outbox_plugin import Harvester, Settings
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.relay.events import HarvestEvent, TermFinished
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    delete_topic,
    drained,
    insert_numbered,
    last_progress,
    named_by_progress,
)
from tests.support import eventually

pytestmark = pytest.mark.integration


@pytest.fixture
def bootstrap_servers(strict: str) -> str:
    return strict


def test_a_progress_topic_that_would_expire_is_made_to_stay(settings: Settings) -> None:
    """As one that the broker made by itself, or somebody who did not know better."""
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    topic = KafkaNames.of(settings).progress_topic
    [made] = admin.create_topics([NewTopic(topic, num_partitions=1, config={"cleanup.policy": "delete"})]).values()
    made.result(60)

    def policy() -> str:
        [asked] = admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]).values()
        return str(asked.result(60)["cleanup.policy"].value)

    with Harvester(settings):
        eventually(lambda: policy() == "compact", 20)  # The broker that answers may learn of it later.


@pytest.mark.parametrize("which", ["leader_topic", "progress_topic"])
def test_a_control_topic_that_is_deleted_is_recreated(settings: Settings, which: str) -> None:
    topic = create_topic(settings, f"{settings.group}-events")
    events: list[HarvestEvent] = []
    with Harvester(settings, observe=events.append):
        insert_numbered(settings, topic, 1, 10)
        drained(settings)
        delete_topic(settings, getattr(KafkaNames.of(settings), which))
        insert_numbered(settings, topic, 11, 10)
        eventually(lambda: any(isinstance(event, TermFinished) for event in events), 60)
        insert_numbered(settings, topic, 21, 10)
        drained(settings)
    assert_exactly_once_in_order(consume(settings, topic), 1, 30)


def test_a_progress_topic_that_somebody_recreates_under_a_leader_is_noticed(settings: Settings) -> None:
    """The leader's records would not count there: a successor would find none where one is expected."""
    topic = create_topic(settings, f"{settings.group}-events")
    progress = KafkaNames.of(settings).progress_topic
    events: list[HarvestEvent] = []
    with Harvester(settings, observe=events.append):
        insert_numbered(settings, topic, 1, 10)
        drained(settings)
        eventually(lambda: named_by_progress(settings) == 0, 60)  # From now on the leader writes nothing.
        delete_topic(settings, progress)
        create_topic(settings, progress)
        eventually(lambda: any(isinstance(event, TermFinished) for event in events), 60)
        insert_numbered(settings, topic, 11, 10)
        drained(settings)
        assert last_progress(settings) is not None
    assert_exactly_once_in_order(consume(settings, topic), 1, 20)
