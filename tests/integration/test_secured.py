"""On servers that speak TLS, and a Kafka that allows nothing by default, each role may do what it is there for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Message
from confluent_kafka.admin import NewTopic
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import SecretStr
from pyspark.sql import SparkSession

from outbox_plugin import Event, Harvester, Outbox, Settings, operate
from outbox_plugin.access.acls import kafka_acls
from outbox_plugin.access.roles import Role
from outbox_plugin.adapters.broker_probe import all_brokers_answer
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.consuming import consume_range
from outbox_plugin.consuming.topic_state import topic_state
from outbox_plugin.coordination import Consumer
from outbox_plugin.core.coordinator_partition import TRANSACTION_STATE_TOPIC
from outbox_plugin.core.topic_ranges import plan
from outbox_plugin.dagster.topic_end_offsets import topic_ends
from outbox_plugin.errors import ServerRefused, UserError
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.schema.connection import connect, connect_async
from outbox_plugin.schema.migrate import migrate
from outbox_plugin.spark import OutboxWrite
from outbox_plugin.status.reader import read_status
from outbox_plugin.verification.on_spark import verify
from outbox_plugin.verification.topic_reader import verify_topic
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
from tests.inbox_support import effects, make_effect_table, produce, record_effect
from tests.spark_support import PACKAGES
from tests.stream_server import StreamServer
from tests.support import PATIENCE, eventually
from tests.tls_servers import Authority, SecuredKafka, TlsFront, bindings_of

pytestmark = pytest.mark.integration

Login = Callable[..., Settings]


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


def test_a_harvester_needs_no_right_to_find_out_whether_all_brokers_answer(login: Login, topic: str) -> None:
    """A broker that does not let it see what it asks for has answered."""
    settings = login(Role.HARVESTER, topics=[topic])
    eventually(lambda: all_brokers_answer(settings, topic), 30)


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


def test_a_harvester_may_see_why_no_broker_coordinates_its_transactions(
    login: Login, trusted: Settings, topic: str
) -> None:
    insert_numbered(trusted, topic, 1, 1)
    with Harvester(trusted):
        drained(trusted)  # From then on, Kafka has the topic.
    with closing(KafkaAdmin(login(Role.HARVESTER, topics=[topic]))) as admin:
        found = admin.client.list_topics(TRANSACTION_STATE_TOPIC, timeout=30).topics[TRANSACTION_STATE_TOPIC]
        assert (found.error, len(found.partitions) > 0) == (None, True)
        assert admin.least_in_sync(TRANSACTION_STATE_TOPIC, lambda: True) == 1


def test_a_topic_without_a_right_is_refused_and_the_others_flow(login: Login, trusted: Settings, topic: str) -> None:
    harvester = login(Role.HARVESTER, topics=[topic])
    insert(trusted, f"{topic}-other", [("k", "1")])
    insert_numbered(trusted, topic, 1, 100)
    with Harvester(harvester):
        eventually(lambda: backlog(trusted) == 1, 60)
        eventually(lambda: operate.parked_keys(trusted), 60)
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


@pytest.fixture
def front(settings: Settings, secured: SecuredKafka) -> Iterator[TlsFront]:
    port = int(conninfo_to_dict(settings.dsn.get_secret_value())["port"] or 0)
    with TlsFront(port, secured.authority.issue("localhost", of_server=True)).running() as front:
        yield front


def by_tls(settings: Settings, front: TlsFront, authority: Path) -> Settings:
    """`settings` with the DSN of one who trusts nobody but the authority."""
    dsn = settings.dsn.get_secret_value()
    verified = make_conninfo(dsn, host="localhost", port=front.port, sslmode="verify-full", sslrootcert=str(authority))
    return settings.model_copy(update={"dsn": SecretStr(verified)})


@pytest.fixture
def encrypted(login: Login, front: TlsFront, secured: SecuredKafka, topic: str, group: str) -> Settings:
    """A harvester's settings, whose every byte goes through TLS."""
    harvester = login(Role.HARVESTER, topics=[topic])
    inbox = kafka_acls(harvester, Role.INBOX, [topic], [f"{group}*"])
    secured.allow([acl.command(f"User:{group}-harvester") for acl in inbox])
    return by_tls(harvester, front, secured.authority.certificate)


def test_events_go_through_tls_from_the_emitter_to_the_handler(
    encrypted: Settings, trusted: Settings, topic: str, group: str
) -> None:
    migrate(encrypted, wake_up=True)
    make_effect_table(encrypted)
    with psycopg.connect(encrypted.dsn.get_secret_value()) as connection:
        Outbox().emit_many(connection, [Event(topic=topic, key=f"k{each}", value=each) for each in range(100)])
    with Harvester(encrypted), Inbox(encrypted, group=group, topics=[topic], handler=record_effect):
        eventually(lambda: len(effects(trusted)) == 100, 60)
        assert read_status(encrypted).errors == ()
    assert verify_topic(encrypted, topic).records == 100


def test_a_slow_statement_is_probed_through_tls(encrypted: Settings) -> None:
    """The probe opens a connection of its own, and must trust the same authority."""
    with closing(connect(encrypted)) as connection:
        assert connection.execute("SELECT pg_sleep(4)").fetchall() == [("",)]


def test_an_asyncio_connection_uses_tls_as_well(encrypted: Settings) -> None:
    async def slow() -> list[tuple[Any, ...]]:
        async with await connect_async(encrypted) as connection:
            return await (await connection.execute("SELECT pg_sleep(4)")).fetchall()

    assert asyncio.run(slow()) == [("",)]


def ends_in_one_line(settings: Settings, said: str) -> None:
    ended = run_outbox("harvest", env=environment(settings))
    assert ended.returncode == 2, ended.stderr
    [line] = ended.stderr.splitlines()
    assert said in line


def test_a_server_of_another_authority_is_refused(encrypted: Settings, front: TlsFront, tmp_path: Path) -> None:
    stranger = Authority(tmp_path).certificate
    ends_in_one_line(by_tls(encrypted, front, stranger), "certificate verify failed")
    kafka = {**encrypted.kafka, "ssl.ca.location": str(stranger)}
    ends_in_one_line(encrypted.model_copy(update={"kafka": kafka}), "certificate verify failed")


def test_an_inbox_does_not_start_with_the_wrong_authority(login: Login, topic: str, group: str, tmp_path: Path) -> None:
    inbox = login(Role.INBOX, topics=[topic], groups=[group])
    kafka = {**inbox.kafka, "ssl.ca.location": str(Authority(tmp_path).certificate)}
    wrong = inbox.model_copy(update={"kafka": kafka})
    with pytest.raises(ServerRefused, match="certificate verify failed") as caught:
        Inbox(wrong, group=group, topics=[topic], handler=record_effect).start()
    assert len(str(caught.value).splitlines()) == 1


def test_who_logs_in_with_a_wrong_password_is_not_told_that_kafka_is_away(login: Login, topic: str) -> None:
    monitor = login(Role.MONITOR, topics=[topic])
    assert topic_ends(monitor, [topic], time.monotonic() + 20 * PATIENCE) == {topic: 0}
    wrong = monitor.model_copy(update={"kafka": {**monitor.kafka, "sasl.password": "wrong"}})
    with pytest.raises(ServerRefused, match="uthentication failed"):
        topic_ends(wrong, [topic], time.monotonic() + 5.0)


def test_a_postgres_with_the_certificate_of_another_server_is_refused(
    encrypted: Settings, settings: Settings, secured: SecuredKafka
) -> None:
    port = int(conninfo_to_dict(settings.dsn.get_secret_value())["port"] or 0)
    with TlsFront(port, secured.authority.issue("elsewhere.example")).running() as impostor:
        ends_in_one_line(by_tls(encrypted, impostor, secured.authority.certificate), "elsewhere.example")


class NoTls(StreamServer):
    """Answers a client of TLS with something else, as what runs in the place of a broker that restarts."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(1)
            writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
            await writer.drain()


def test_running_consumers_tell_of_failing_tls_and_go_on(
    secured: SecuredKafka, login: Login, trusted: Settings, topic: str, group: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(secured.bootstrap_servers.rpartition(":")[2])
    inbox = login(Role.INBOX, topics=[topic], groups=[group])
    everything = [
        f"kafka-acls.sh --bootstrap-server $BOOTSTRAP_SERVERS --add --allow-principal User:{group}-inbox "
        f"--operation All --{resource}"
        for resource in ("topic '*'", "group '*'")
    ]
    secured.allow(everything)
    make_effect_table(trusted)
    polled: list[Message] = []

    def polls(consumer: Consumer) -> bool:
        polled.extend(filter(None, [consumer.poll(0.1)]))
        return True

    with (
        Inbox(inbox, group=group, topics=[topic], handler=record_effect),
        Consumer(
            [topic], f"{group}-shared", "one", bootstrap_servers=secured.bootstrap_servers, kafka=dict(inbox.kafka)
        ) as consumer,
    ):
        produce(trusted, topic, [("a", "1")])
        eventually(lambda: polls(consumer) and polled and len(effects(trusted)) == 1, 60)
        secured.kill()
        try:
            with NoTls(port).running():
                eventually(lambda: polls(consumer) and warned_of_tls(caplog) == {"inbox", "coordination.consumer"}, 60)
        finally:
            secured.launch()
            secured.wait()
        produce(trusted, topic, [("a", "2")])
        eventually(lambda: polls(consumer) and len(polled) > 1 and len(effects(trusted)) == 2, 120)


def warned_of_tls(caplog: pytest.LogCaptureFixture) -> set[str]:
    """The parts of the package that have logged that TLS fails."""
    return {each.name.removeprefix("outbox_plugin.") for each in caplog.records if "SSL" in each.getMessage()}


@pytest.mark.slow
@pytest.mark.spark
def test_spark_writes_and_reads_through_tls(
    spark: SparkSession, encrypted: Settings, trusted: Settings, topic: str
) -> None:
    """Its workers open connections of their own, and Java reads the authority's certificate too."""
    writer = encrypted.model_copy(update={"spark_packages": PACKAGES})
    events = spark.range(100).selectExpr("cast(id AS string) AS key", "cast(id AS string) AS value")
    OutboxWrite(writer, job_id="nightly").events(events, topic=topic).commit()
    with Harvester(encrypted):
        drained(trusted)
    verdict = verify(spark, writer, [topic], job="nightly")
    assert (verdict.records, verdict.in_order, verdict.missing) == (100, True, 0)
