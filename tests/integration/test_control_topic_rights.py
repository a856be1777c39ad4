"""Without a right on the group's own topics, a harvester names the right, and goes on once it has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AclBinding, AclBindingFilter, AclOperation, NewTopic

from outbox_plugin import Harvester, Settings
from outbox_plugin.access.acls import kafka_acls
from outbox_plugin.access.roles import Role
from tests.harvesting import (
    assert_exactly_once_in_order,
    consume,
    create_topic,
    drained,
    environment,
    harvesters,
    insert_numbered,
    run_outbox,
)
from tests.support import PATIENCE, eventually
from tests.tls_servers import SecuredKafka, bindings_of

pytestmark = pytest.mark.integration


@pytest.fixture
def trusted(settings: Settings, secured: SecuredKafka) -> Settings:
    """The outbox as one who may do everything, with its group's topics."""
    trusted = settings.model_copy(update={"bootstrap_servers": secured.internal})
    with Harvester(trusted):
        pass
    return trusted


@pytest.fixture
def topic(trusted: Settings, group: str) -> str:
    return create_topic(trusted, f"{group}-events")


class Rights:
    """The ACLs of a user who may do what a harvester must."""

    def __init__(self, kafka: SecuredKafka, settings: Settings, topic: str) -> None:
        user = f"{settings.group}-harvester"
        known = settings.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
        self._kafka = kafka
        self._all = [
            binding
            for acl in kafka_acls(known, Role.HARVESTER, [topic])
            for binding in bindings_of(acl.command(f"User:{user}"))
        ]
        self.settings = known.model_copy(update={"kafka": kafka.add_user(user)})
        self.give(self._all)

    def of(self, topic: str, operation: AclOperation | None) -> list[AclBinding]:
        """Those on a topic, of one operation or of all."""
        return [each for each in self._all if each.name == topic and operation in (None, each.operation)]

    def take(self, bindings: list[AclBinding]) -> None:
        filters = [
            AclBindingFilter(
                each.restype,
                each.name,
                each.resource_pattern_type,
                each.principal,
                each.host,
                each.operation,
                each.permission_type,
            )
            for each in bindings
        ]
        for done in self._kafka.admin.delete_acls(filters).values():
            done.result(20 * PATIENCE)

    def give(self, bindings: list[AclBinding]) -> None:
        self._kafka.add_acls(bindings)


@pytest.fixture
def rights(secured: SecuredKafka, trusted: Settings, topic: str) -> Rights:
    return Rights(secured, trusted, topic)


@pytest.mark.parametrize(
    ("which", "operation", "said"),
    [
        ("leader", AclOperation.READ, "lacks the right Read on the topic"),
        ("leader", AclOperation.WRITE, "lacks the right Write on the topic"),
        ("leader", None, "may not make the topic"),
        ("progress", AclOperation.READ, "lacks the right Read on the topic"),
        ("progress", AclOperation.WRITE, "lacks the right Write on the topic"),
    ],
)
def test_a_start_without_a_right_is_refused_in_one_line(
    rights: Rights, group: str, which: str, operation: AclOperation | None, said: str
) -> None:
    topic = f"{group}-{which}"
    rights.take(rights.of(topic, operation))
    ended = run_outbox("harvest", env=environment(rights.settings))
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert f"{said} {topic}" in line
    assert "outbox grants" in line


@pytest.mark.parametrize(
    ("operation", "said"),
    [(AclOperation.READ, "heartbeats may not be read"), (AclOperation.WRITE, "heartbeats cannot be written")],
)
def test_a_leader_that_loses_a_right_says_so_and_goes_on_once_it_has_it_again(
    rights: Rights, trusted: Settings, topic: str, group: str, tmp_path: Path, operation: AclOperation, said: str
) -> None:
    with harvesters(rights.settings, tmp_path) as [leader]:
        eventually(leader.leads, 20)
        rights.take(lost := rights.of(f"{group}-leader", operation))
        eventually(lambda: said in leader.log, 20)
        eventually(lambda: not leader.leads(), 20)
        insert_numbered(trusted, topic, 1, 100)
        rights.give(lost)
        drained(trusted)
        assert leader.log.count(said) == 1
    assert_exactly_once_in_order(consume(trusted, topic), 1, 100)


def test_a_leader_topic_that_takes_no_heartbeat_is_named(
    settings: Settings, secured: SecuredKafka, group: str, tmp_path: Path
) -> None:
    settings = settings.model_copy(update={"bootstrap_servers": secured.internal})
    too_small = NewTopic(f"{group}-leader", num_partitions=1, config={"max.message.bytes": "200"})
    [made] = secured.admin.create_topics([too_small]).values()
    made.result(20 * PATIENCE)
    with harvesters(settings, tmp_path) as [harvester]:
        eventually(lambda: f"heartbeats cannot be written to the topic {group}-leader" in harvester.log, 20)
        assert "size" in harvester.log
