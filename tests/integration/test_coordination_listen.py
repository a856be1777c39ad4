"""The port for operators, of real consumers that share topics: metrics, and whether they are ready."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outbox_plugin import Settings
from outbox_plugin.coordination import Admin, Consumer, consumer_readiness
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.embedded.kafka import EmbeddedKafka
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.observe import lag_poller
from tests.harvesting import create_topic
from tests.inbox_support import produce
from tests.processes import paused
from tests.scraping import HOST, get, listening, metrics, not_ready, ready
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.integration

SOON = 30.0
INTERVAL = 4.0


@pytest.fixture
def ours(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings with a port. Kafka is asked often."""
    monkeypatch.setattr(lag_poller, "POLL_SECONDS", 0.1)
    return listening(settings)


@pytest.fixture
def orders(ours: Settings, group: str) -> str:
    """A topic with three partitions."""
    return create_topic(ours, f"{group}-orders", 3)


class Gate:
    """Where a consumer's thread waits while it is closed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.passed = 0  # Records that were committed.


@contextmanager
def consuming(
    settings: Settings, orders: str, group: str, client: str = "one", max_claims: int | None = None
) -> Iterator[Gate]:
    """A consumer that is iterated on a thread of its own, and commits what it gets while its gate is open."""
    gate = Gate()
    with Consumer(
        [orders],
        group,
        client,
        heartbeat_interval_seconds=INTERVAL,
        coordination_topic=f"{group}-claims",
        bootstrap_servers=settings.bootstrap_servers,
        listen=settings.listen,
        max_claims=max_claims,
    ) as consumer:

        def consume() -> None:
            for message in consumer:
                assert gate.open.wait(60 * PATIENCE)
                consumer.commit(message)
                gate.passed += 1

        thread = threading.Thread(target=consume, name="outbox-test-consumer")
        thread.start()
        try:
            yield gate
        finally:
            gate.open.set()
            consumer.stop()
            thread.join()


def shown(settings: Settings, group: str, name: str, *labels: str) -> float | None:
    return metrics(settings, group).get((f"outbox_coordination_{name}", *labels))


def test_what_is_held_and_how_far_it_is_behind_is_shown(ours: Settings, orders: str, group: str) -> None:
    threads_before = set(threading.enumerate())
    began = time.time()
    with consuming(ours, orders, group) as gate:
        eventually(lambda: shown(ours, group, "claimed_partitions", "one", orders) == 3, SOON)
        eventually(lambda: shown(ours, group, "lag_messages", "one", orders) == 0, SOON)
        eventually(lambda: get(ours, "/readyz") == (200, f"consumer one of {group}: ready: holds 3 partitions\n"), SOON)
        assert shown(ours, group, "ready", "one") == 1
        assert shown(ours, group, "commit_timestamp_seconds", "one") is None
        assert get(ours, "/livez") == (200, f"consumer one of {group}: alive\n")
        produce(ours, orders, [(f"k{number}", "1") for number in range(20)])
        eventually(lambda: gate.passed == 20, SOON)
        assert (shown(ours, group, "commit_timestamp_seconds", "one") or 0) >= began
        gate.open.clear()
        produce(ours, orders, [(f"k{number}", "1") for number in range(10)])
        eventually(lambda: shown(ours, group, "lag_messages", "one", orders) == 10, SOON)
        heartbeat = shown(ours, group, "heartbeat_timestamp_seconds", "one") or 0
        assert heartbeat >= began - 1
        eventually(lambda: (shown(ours, group, "heartbeat_timestamp_seconds", "one") or 0) > heartbeat, SOON)
    socket.create_server((HOST, int(ours.listen or 0))).close()
    eventually(
        lambda: not [each for each in set(threading.enumerate()) - threads_before if each.name.startswith("outbox-")],
        10,
    )


def test_a_consumer_whose_handler_hangs_is_not_ready_until_it_goes_on(
    ours: Settings, orders: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer_readiness, "POLLED_SECONDS", 2.0)
    with consuming(ours, orders, group) as gate:
        eventually(lambda: "holds 3 partitions" in ready(ours), SOON)
        gate.open.clear()
        produce(ours, orders, [("k", "1")])
        eventually(lambda: "nobody has polled for" in not_ready(ours), SOON)
        assert shown(ours, group, "ready", "one") == 0
        assert get(ours, "/livez")[0] == 200
        gate.open.set()
        eventually(lambda: "holds 3 partitions" in ready(ours), SOON)


def test_consumers_of_a_process_share_the_port_and_each_shows_its_own(ours: Settings, orders: str, group: str) -> None:
    with consuming(ours, orders, group, "one"), consuming(ours, orders, group, "two"):

        def claimed() -> list[float]:
            return sorted(shown(ours, group, "claimed_partitions", each, orders) or 0 for each in ("one", "two"))

        eventually(lambda: claimed() == [1, 2], SOON)
        eventually(lambda: ready(ours).count("ready: holds") == 2, SOON)


def test_partitions_that_nobody_holds_are_shown_unless_the_group_is_paused(
    ours: Settings, orders: str, group: str
) -> None:
    def unclaimed(client: str) -> float | None:
        return shown(ours, group, "unclaimed_partitions", client, orders)

    operator = Admin(
        coordination_topic=f"{group}-claims",
        heartbeat_interval_seconds=INTERVAL,
        bootstrap_servers=ours.bootstrap_servers,
    )
    with consuming(ours, orders, group, "one", max_claims=1):
        eventually(lambda: unclaimed("one") == 2, SOON)
        operator.pause(group)
        eventually(lambda: unclaimed("one") == 0, SOON)
        operator.resume(group)
        eventually(lambda: unclaimed("one") == 2, SOON)
        with consuming(ours, orders, group, "two", max_claims=2):
            eventually(lambda: (unclaimed("one"), unclaimed("two")) == (0, 0), SOON)


@pytest.mark.parametrize(
    ("silence", "reason"),
    [(5.0, "Kafka has not answered for"), (1_000.0, "the coordination topic does not confirm what it holds")],
)
def test_a_consumer_without_kafka_is_not_ready_until_it_is_back(
    ours: Settings, group: str, kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch, silence: float, reason: str
) -> None:
    monkeypatch.setattr(consumer_readiness, "KAFKA_SECONDS", silence)
    elsewhere = ours.model_copy(update={"bootstrap_servers": kafka.bootstrap_servers})
    with consuming(elsewhere, create_topic(elsewhere, f"{group}-elsewhere", 3), group):
        eventually(lambda: "holds 3 partitions" in ready(ours), 60)
        with paused(kafka.pid):
            eventually(lambda: f"not ready: {reason}" in not_ready(ours), 60)
            assert get(ours, "/livez")[0] == 200
        eventually(lambda: "holds 3 partitions" in ready(ours), 60)


def test_a_consumer_does_not_take_the_port_of_its_environment(
    ours: Settings, orders: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server((HOST, free_port())) as other:
        monkeypatch.setenv("OUTBOX_LISTEN", str(other.getsockname()[1]))
        with consuming(ours.model_copy(update={"listen": None}), orders, group):
            pass


def test_a_taken_port_is_one_line_and_nothing_is_claimed(ours: Settings, orders: str, group: str) -> None:
    claimed: list[object] = []
    with socket.create_server((HOST, free_port())) as other:
        port = other.getsockname()[1]
        with pytest.raises(InvalidSetting) as refused:
            Consumer(
                [orders],
                group,
                "one",
                coordination_topic=f"{group}-claims",
                bootstrap_servers=ours.bootstrap_servers,
                observe=claimed.append,
                listen=str(port),
            )
    assert str(refused.value) == f"OUTBOX_LISTEN: cannot listen on {HOST}:{port}: another program listens there"
    assert claimed == []
