"""A topic that we may describe but not write to: its rows are put aside, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.embedded.kafka import EmbeddedKafka
from tests.harvesting import backlog, consume, create_topic, insert
from tests.processes import launched
from tests.support import eventually

pytestmark = pytest.mark.integration


class AuthorizingKafka(EmbeddedKafka):
    """Whoever comes may do everything with what has no rule of its own."""

    def properties(self, port: int, data: str) -> str:
        rules = "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
        return super().properties(port, data) + rules + "allow.everyone.if.no.acl.found=true\n"


@pytest.fixture(scope="module")
def authorizing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    kafka = AuthorizingKafka(tmp_path_factory.mktemp("authorizing"), print)
    with launched(kafka):
        yield kafka.bootstrap_servers


@pytest.fixture(params=["exactly-once", "at-least-once"])
def either(settings: Settings, authorizing: str, request: pytest.FixtureRequest) -> Settings:
    return settings.model_copy(update={"bootstrap_servers": authorizing, "delivery": request.param})


def let_only_describe(settings: Settings, topic: str) -> None:
    """Everybody may describe the topic and read it, and nobody may write to it."""
    rules = [
        AclBinding(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:*", "*", operation, AclPermissionType.ALLOW
        )
        for operation in (AclOperation.DESCRIBE, AclOperation.READ)
    ]
    admin = AdminClient({"bootstrap.servers": settings.bootstrap_servers})
    for made in admin.create_acls(rules).values():
        made.result(60)
    with closing(KafkaAdmin(settings)) as ours:
        eventually(lambda: ours.writable({topic}) == set(), 20)


def test_rows_of_other_topics_leave(either: Settings, group: str, tmp_path: Path) -> None:
    good, forbidden = create_topic(either, f"{group}-good"), create_topic(either, f"{group}-forbidden")
    let_only_describe(either, forbidden)
    insert(either, forbidden, [("key", "1")])
    insert(either, good, [(f"key-{number}", "1") for number in range(100)])
    with Harvester(either):
        eventually(lambda: backlog(either) == 1, 60)
        [parked] = operate.parked_keys(either)
        assert (parked.topic, parked.key) == (forbidden, None)
        insert(either, good, [(f"key-{number}", "2") for number in range(100)])
        eventually(lambda: backlog(either) == 1, 30)
    assert len(consume(either, good)) == 200
