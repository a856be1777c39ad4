"""The port for operators, of real inboxes: metrics, and whether they are ready."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin import Harvester, Settings
from outbox_plugin.bench.proxy import DIRECTIONS, Proxy
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.errors import InvalidSetting, SchemaMissing
from outbox_plugin.inbox import Inbox, Received, Retry, inbox_readiness, poll_loop
from outbox_plugin.observe import lag_poller
from tests.harvesting import create_topic, insert
from tests.inbox_support import effects, make_effect_table, produce, query, record_effect, record_effects
from tests.processes import paused
from tests.scraping import HOST, get, listening, metrics, not_ready, ready
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 30.0
IMPATIENT = Retry(attempts=3, first_seconds=0.05, most_seconds=0.1)
PATIENT = Retry(attempts=1_000_000, first_seconds=0.02, most_seconds=0.05)


@pytest.fixture
def ours(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with a port and a table for effects. Kafka is asked often."""
    make_effect_table(settings)
    monkeypatch.setattr(lag_poller, "POLL_SECONDS", 0.1)
    return listening(settings)


def lag(settings: Settings, group: str) -> float | None:
    """The lag of all partitions together; None where none is shown."""
    lags = [value for (name, *_), value in metrics(settings, group).items() if name == "outbox_inbox_lag_messages"]
    return sum(lags) if lags else None


def refuse_poison(events: list[Received]) -> None:
    if any(event.value == b"poison" for event in events):
        raise ValueError("poison")


def handle(connection: psycopg.Connection[Any], event: Received) -> None:
    refuse_poison([event])
    record_effect(connection, event)


def handle_batch(connection: psycopg.Connection[Any], events: list[Received]) -> None:
    refuse_poison(events)
    record_effects(connection, events)


async def handle_async(connection: psycopg.AsyncConnection[Any], event: Received) -> None:
    refuse_poison([event])
    await connection.execute(
        "INSERT INTO effect (event, key, value) VALUES (%s, %s, '')", (event.idempotency_key, event.key_text)
    )


@pytest.mark.parametrize(("handler", "batch_size"), [(handle, None), (handle_batch, 50), (handle_async, None)])
def test_what_was_handled_skipped_tried_again_and_dead_lettered_is_counted(
    ours: Settings, topic: str, group: str, handler: Any, batch_size: int | None
) -> None:
    threads_before = set(threading.enumerate())
    events = [(f"k{number % 7}", "good") for number in range(20)]
    sent = produce(ours, topic, events)
    produce(ours, topic, events[:5], identities=sent[:5])
    produce(ours, topic, [("k3", "poison")])

    def found() -> dict[str, float]:
        names = ("handled_messages_total", "skipped_messages_total", "retries_total", "dead_lettered_messages_total")
        values = metrics(ours, group)
        return {name: values.get((f"outbox_inbox_{name}", topic), 0) for name in names}

    with Inbox(ours, group=group, topics=[topic], handler=handler, batch_size=batch_size, retry=IMPATIENT):
        eventually(lambda: sum(found().values()) == 28, SOON)
        eventually(lambda: lag(ours, group) == 0, SOON)
        eventually(lambda: get(ours, "/readyz") == (200, f"inbox {group}: ready: idle\n"), SOON)
        assert found() == {
            "handled_messages_total": 20,
            "skipped_messages_total": 5,
            "retries_total": 2,
            "dead_lettered_messages_total": 1,
        }
        values = metrics(ours, group)
        assert values[("outbox_inbox_handling_duration_seconds_count",)] >= 3  # Each attempt to handle the poison.
        assert values[("outbox_inbox_paused_partitions",)] == 0
        eventually(lambda: metrics(ours, group)[("outbox_inbox_ready",)] == 1, SOON)
        assert get(ours, "/livez") == (200, f"inbox {group}: alive\n")
    assert len(effects(ours)) == 20
    socket.create_server((HOST, int(ours.listen or 0))).close()
    eventually(
        lambda: not [each for each in set(threading.enumerate()) - threads_before if each.name.startswith("outbox-")],
        10,
    )


class Gate:
    """A handler that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def handle(self, connection: psycopg.Connection[Any], event: Received) -> None:
        assert self.opened.wait(60 * PATIENCE)
        record_effect(connection, event)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end, so that an inbox can stop after a failure."""
    gate = Gate()
    yield gate
    gate.opened.set()


def test_an_inbox_whose_handler_hangs_is_not_ready_until_it_goes_on(
    ours: Settings, topic: str, group: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_readiness, "DONE_SECONDS", 1.0)
    try:
        with Inbox(ours, group=group, topics=[topic], handler=gate.handle):
            eventually(lambda: "ready: idle" in ready(ours), SOON)
            assert metrics(ours, group)["outbox_inbox_dead_lettered_messages_total", topic] == 0
            produce(ours, topic, [("k", "1")] * 10)
            eventually(lambda: "a handler has not finished for" in not_ready(ours), SOON)
            eventually(lambda: lag(ours, group) == 10, SOON)
            assert metrics(ours, group)[("outbox_inbox_ready",)] == 0
            assert get(ours, "/livez")[0] == 200
            gate.opened.set()
            eventually(lambda: "ready: idle" in ready(ours), SOON)
            eventually(lambda: lag(ours, group) == 0, SOON)
            assert metrics(ours, group)["outbox_inbox_handled_messages_total", topic] == 10
    finally:
        gate.opened.set()


def test_an_inbox_whose_records_all_fail_is_not_ready_until_one_is_done(
    ours: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_readiness, "DONE_SECONDS", 1.0)
    mended = threading.Event()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        if not mended.is_set():
            raise ConnectionError("a service is away")
        record_effect(connection, event)

    produce(ours, topic, [("a", "1"), ("b", "1")])
    with Inbox(ours, group=group, topics=[topic], handler=handle, retry=PATIENT):
        eventually(lambda: "none of the records that wait was done for" in not_ready(ours), SOON)
        mended.set()
        eventually(lambda: "ready: idle" in ready(ours), SOON)


def test_partitions_that_are_not_fetched_are_counted(
    ours: Settings, group: str, topic: str, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll_loop, "MEMORY_LIMIT", replace(poll_loop.MEMORY_LIMIT, records=100))
    produce(ours, topic, [("k", "1")] * 300)
    with Inbox(ours, group=group, topics=[topic], handler=gate.handle):
        try:
            eventually(lambda: metrics(ours, group).get(("outbox_inbox_paused_partitions",)) == 1, SOON)
        finally:
            gate.opened.set()
        eventually(lambda: len(effects(ours)) == 300, SOON)
        eventually(lambda: metrics(ours, group).get(("outbox_inbox_paused_partitions",)) == 0, SOON)


def test_each_inbox_shows_its_own_partitions_and_one_without_any_is_ready(
    ours: Settings, topic: str, group: str
) -> None:
    other, topics = listening(ours), [create_topic(ours, f"{topic}-one", 1)]
    with Inbox(ours, group=group, topics=topics, handler=handle):
        eventually(lambda: lag(ours, group) == 0, SOON)
        with Inbox(other, group=group, topics=topics, handler=handle):
            eventually(lambda: ready(ours) and ready(other), SOON)
            eventually(
                lambda: (
                    sorted([ready(ours), ready(other)])
                    == [f"inbox {group}: ready: has no partitions\n", f"inbox {group}: ready: idle\n"]
                ),
                SOON,
            )
            eventually(lambda: sorted([lag(ours, group) is None, lag(other, group) is None]) == [False, True], SOON)


@pytest.mark.parametrize("has_partitions", [True, False])
def test_an_inbox_without_postgres_is_not_ready_until_it_is_back(
    ours: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch, has_partitions: bool
) -> None:
    topics, doing = ([topic], "ready: idle") if has_partitions else ([f"{topic}-missing"], "ready: has no partitions")
    monkeypatch.setattr(inbox_readiness, "POSTGRES_SECONDS", 5.0)
    port = int(str(conninfo_to_dict(ours.dsn.get_secret_value())["port"]))
    with Proxy(port) as proxy:
        dsn = ours.dsn.get_secret_value().replace(f":{port}/", f":{proxy.port}/")
        through = ours.model_copy(update={"dsn": type(ours.dsn)(dsn)})
        with Inbox(through, group=group, topics=topics, handler=handle):
            eventually(lambda: doing in ready(ours), SOON)
            proxy.hold(*DIRECTIONS)
            eventually(lambda: "not ready: Postgres has not answered for" in not_ready(ours), 60)
            assert get(ours, "/livez")[0] == 200
            proxy.restore()
            eventually(lambda: doing in ready(ours), 60)


def test_an_inbox_without_kafka_is_not_ready_until_it_is_back(
    ours: Settings, topic: str, group: str, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_readiness, "KAFKA_SECONDS", 5.0)
    elsewhere = ours.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
    produce(elsewhere, topic, [("k", "1")])
    with Inbox(elsewhere, group=group, topics=[topic], handler=handle):
        eventually(lambda: ready(ours), 60)
        with paused(kafka.pid):
            eventually(lambda: "not ready: Kafka has not answered for" in not_ready(ours), 60)
            assert get(ours, "/livez")[0] == 200
        eventually(lambda: ready(ours), 60)


def test_a_taken_port_is_one_line_and_nothing_is_handled(ours: Settings, topic: str, group: str) -> None:
    produce(ours, topic, [("k", "1")])
    with socket.create_server((HOST, free_port())) as other:
        port = other.getsockname()[1]
        inbox = Inbox(ours.model_copy(update={"listen": str(port)}), group=group, topics=[topic], handler=handle)
        with pytest.raises(InvalidSetting) as refused:
            inbox.start()
    assert str(refused.value) == f"OUTBOX_LISTEN: cannot listen on {HOST}:{port}: another program listens there"
    assert not inbox.alive
    assert effects(ours) == []


def test_an_inbox_that_cannot_start_frees_the_port(ours: Settings, topic: str, group: str) -> None:
    query(ours, "DROP TABLE outbox_inbox_dead_letter")
    with pytest.raises(SchemaMissing):
        Inbox(ours, group=group, topics=[topic], handler=handle).start()
    socket.create_server((HOST, int(ours.listen or 0))).close()


def test_an_inbox_shares_the_port_with_a_harvester_of_its_process(ours: Settings, topic: str, group: str) -> None:
    with Harvester(ours):
        eventually(lambda: "leads" in ready(ours), 60)
        with Inbox(ours, group=group, topics=[topic], handler=handle):
            both = f"group {ours.group}, shard 0: ready: leads\ninbox {group}: ready: idle\n"
            eventually(lambda: get(ours, "/readyz") == (200, both), 60)
            assert metrics(ours)["outbox_is_leader", "0"] == 1
            assert metrics(ours, group)[("outbox_inbox_ready",)] == 1
            insert(ours, topic, [("key", "value")])
            eventually(lambda: metrics(ours, group).get(("outbox_inbox_handled_messages_total", topic)) == 1, 60)
            eventually(lambda: lag(ours, group) == 1, SOON)  # The marker of the harvester's transaction.
        assert get(ours, "/readyz") == (200, f"group {ours.group}, shard 0: ready: leads\n")
    assert get(ours, "/readyz") == (0, "")
