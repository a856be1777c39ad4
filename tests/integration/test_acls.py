"""On a Kafka that allows nothing by default, a role that has what `outbox grants --kafka` prints may do its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import NewTopic

from outbox_plugin import Harvester, Settings, operate
from outbox_plugin.access.acls import kafka_acls
from outbox_plugin.access.roles import Role
from outbox_plugin.consuming import consume_range
from outbox_plugin.consuming.topics import topic_state
from outbox_plugin.core.ranges import plan
from outbox_plugin.errors import UserError
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.status import read_status
from outbox_plugin.verification import verify_topic
from tests.consuming import effects, make_effect_table, produce, record_effect
from tests.harvesting import (
    assert_exactly_once_in_order,
    backlog,
    consume,
    drained,
    environment,
    insert,
    insert_numbered,
    run_outbox,
)
from tests.secured import SecuredKafka, bindings_of
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

Login = Callable[..., Settings]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    kafka = SecuredKafka(tmp_path_factory.mktemp("secured"))
    kafka.launch()
    kafka.wait()
    yield kafka
    kafka.stop()


@pytest.fixture
def topic(secured: SecuredKafka, group: str) -> str:
    name = f"{group}-events"
    [made] = secured.admin.create_topics([NewTopic(name, num_partitions=3)]).values()
    made.result(20 * PATIENCE)
    eventually(lambda: name in secured.admin.list_topics(timeout=20).topics, 20)
    return name


@pytest.fixture
def trusted(settings: Settings, secured: SecuredKafka) -> Settings:
    """The outbox as one who may do everything."""
    return settings.model_copy(update={"bootstrap_servers": secured.internal})


@pytest.fixture
def login(settings: Settings, secured: SecuredKafka, group: str) -> Login:
    """Adds a user with the rights of a role, and gives the settings with which it logs in."""

    def make(role: Role, **changes: Any) -> Settings:
        user = f"{group}-{role}"
        options = {name: changes.pop(name, ()) for name in ("topics", "groups")}
        known = settings.model_copy(update={"bootstrap_servers": secured.bootstrap_servers, **changes})
        secured.allow([acl.command(f"User:{user}") for acl in kafka_acls(known, role, **options)])
        return known.model_copy(update={"kafka": secured.add_user(user)})

    return make


def record_each(connection: psycopg.Connection[Any], records: Sequence[Received]) -> None:
    for record in records:
        record_effect(connection, record)


def leads(settings: Settings) -> bool:
    return read_status(settings).shards[0].leader is not None


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_relays_and_makes_its_topics(login: Login, trusted: Settings, topic: str, delivery: str) -> None:
    """Also for more shards, which need partitions, and by a successor."""
    harvester = login(Role.HARVESTER, topics=[topic], delivery=delivery)
    insert_numbered(trusted, topic, 1, 500)
    with Harvester(harvester):
        drained(trusted)
    with Harvester(harvester.model_copy(update={"shards": 3})):
        insert_numbered(trusted, topic, 501, 500)
        drained(trusted)
    assert_exactly_once_in_order(consume(trusted, topic), 1, 1000)


def test_a_harvester_with_a_certificate_relays(
    settings: Settings, trusted: Settings, secured: SecuredKafka, group: str, topic: str
) -> None:
    harvester = settings.model_copy(update={"bootstrap_servers": secured.mtls, "kafka": secured.certify(group)})
    acls = kafka_acls(harvester, Role.HARVESTER, [f"{group}-ev*"])
    secured.allow([acl.command(f"User:CN={group}") for acl in acls])
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(harvester):
        drained(trusted)
    assert_exactly_once_in_order(consume(trusted, topic), 1, 100)


def test_a_topic_without_a_right_is_refused_and_the_others_flow(login: Login, trusted: Settings, topic: str) -> None:
    harvester = login(Role.HARVESTER, topics=[topic])
    insert(trusted, f"{topic}-other", [("k", "1")])
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(harvester):
        eventually(lambda: backlog(trusted) == 1, 60)
        eventually(lambda: operate.parked_lanes(trusted), 60)
    assert_exactly_once_in_order(consume(trusted, topic), 1, 100)


def test_a_monitor_and_an_operator_see_who_leads_and_a_monitor_verifies(
    login: Login, trusted: Settings, topic: str
) -> None:
    monitor, operator = login(Role.MONITOR, topics=[topic]), login(Role.OPERATOR)
    insert_numbered(trusted, topic, 1, 10)
    with Harvester(trusted):
        drained(trusted)
        for role in (monitor, operator):
            eventually(partial(leads, role), 30)
            assert read_status(role).errors == ()
    assert verify_topic(monitor, topic).in_order


def test_an_inbox_handles_events(login: Login, trusted: Settings, topic: str, group: str) -> None:
    make_effect_table(trusted)
    inbox = login(Role.INBOX, topics=[topic], groups=[group])
    produce(trusted, topic, [("a", "1"), ("b", "2")])
    with Inbox(inbox, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(trusted)) == 2, 60)


def test_a_range_is_consumed(login: Login, trusted: Settings, topic: str, group: str) -> None:
    make_effect_table(trusted)
    inbox = login(Role.INBOX, topics=[topic], groups=[group])
    produce(trusted, topic, [("a", "1"), ("b", "2")])
    wanted = plan("totals", topic, None, topic_state(inbox, topic), 100).range
    assert wanted is not None
    consume_range(inbox, wanted, record_each)
    assert len(effects(trusted)) == 2


def test_the_command_prints_them(settings: Settings) -> None:
    env = environment(settings)
    named = ("--role", "harvester", "--kafka", "--to", "User:CN=relay, O=Shop")
    printed = run_outbox("grants", *named, "--topic", "orders", "--topic", "shop.*", env=env)
    assert printed.returncode == 0, printed.stderr
    bindings = [binding for line in printed.stdout.splitlines() for binding in bindings_of(line)]
    assert {binding.principal for binding in bindings} == {"User:CN=relay, O=Shop"}
    assert {binding.name for binding in bindings} >= {"orders", "shop.", f"{settings.group}-leader"}
    assert (
        "does not use Kafka" in run_outbox("grants", "--role", "emitter", "--kafka", "--to", "User:a", env=env).stdout
    )
    refused = run_outbox("grants", *named, env=env)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert run_outbox("grants", "--role", "operator", "--kafka", "--to", "me", env=env).returncode == 2


def test_topics_and_groups_must_be_named(settings: Settings) -> None:
    with pytest.raises(UserError, match="--topic"):
        kafka_acls(settings, Role.HARVESTER)
    with pytest.raises(UserError, match="--group"):
        kafka_acls(settings, Role.INBOX, ["orders"])
