"""What is closed is gone: no descriptor, no client, and nothing is written to what took its place."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import psutil
import psycopg
import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from outbox_plugin import Settings
from outbox_plugin.adapters import postgres_wake_up
from outbox_plugin.adapters.kafka_admin import KafkaAdmin
from outbox_plugin.adapters.kafka_clients import answer_of
from outbox_plugin.adapters.kafka_membership import KafkaMembership
from outbox_plugin.adapters.kafka_names import KafkaNames
from outbox_plugin.adapters.postgres_wake_up import PostgresWakeUp
from outbox_plugin.coordination import consumer, log
from outbox_plugin.coordination.consumer_telemetry import ConsumerTelemetry
from outbox_plugin.core.leader_heartbeat import LeaderHeartbeat
from outbox_plugin.core.signing import Signer
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox import consumer as inbox_consumer
from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry
from outbox_plugin.kafka_settings import kafka_settings
from outbox_plugin.observe import telemetry_server
from outbox_plugin.observe.harvester_telemetry import HarvesterTelemetry
from outbox_plugin.tenants import TenantHarvesters
from tests.support import eventually

SETTINGS = Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1")


class Gone:
    """A connection whose server has gone. psycopg calls it closed once that was noticed."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed

    def execute(self, *_: Any) -> None: ...

    def close(self) -> None:
        raise psycopg.OperationalError("the server has gone")


@pytest.fixture(params=[False, True])
def alone(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> PostgresWakeUp:
    """A wake-up whose server has gone."""
    monkeypatch.setattr(postgres_wake_up, "connect", lambda *_, **__: Gone(closed=request.param))
    monkeypatch.setattr(postgres_wake_up, "with_schema", lambda *_: "outbox")
    monkeypatch.setattr(postgres_wake_up, "statement", lambda *_: b"")
    wake_up = PostgresWakeUp(SETTINGS, 0)
    wake_up._listening_connection()
    return wake_up


def test_a_wake_up_whose_server_has_gone_keeps_no_descriptor(alone: PostgresWakeUp) -> None:
    before = psutil.Process().num_fds()
    alone.close()
    assert psutil.Process().num_fds() == before - 2


def test_a_wake_up_that_is_closed_writes_to_nobody(alone: PostgresWakeUp) -> None:
    """The numbers of its descriptors are given to whoever opens something next."""
    alone.close()
    pipes = [os.pipe() for _ in range(4)]
    try:
        alone.interrupt()
        alone.close()
        for read, _ in pipes:
            os.set_blocking(read, False)
            with pytest.raises(BlockingIOError):
                os.read(read, 1)
    finally:
        for descriptor in (each for pipe in pipes for each in pipe):
            os.close(descriptor)


def test_a_client_of_the_cluster_is_disconnected_once_it_is_closed() -> None:
    with closing(KafkaAdmin(SETTINGS)) as admin:
        request = admin.client.describe_cluster()
    admin.close()
    assert answered_with(request) == KafkaError._DESTROY


def answered_with(request: Future[Any]) -> int:
    with pytest.raises(KafkaException) as refused:
        answer_of(request, 10)
    return int(refused.value.args[0].code())


DROP = """
import gc, threading
from outbox_plugin import Settings
from outbox_plugin.adapters.kafka_admin import KafkaAdmin

def ask():
    admin = KafkaAdmin(Settings(dsn="postgresql://nowhere/db", bootstrap_servers="127.0.0.1:1"))
    cycle = [admin]
    cycle.append(cycle)
    admin.client.describe_cluster(request_timeout=1).add_done_callback(lambda _: answered.release())

answered = threading.Lock()
answered.acquire()
gc.disable()
ask()
gc.set_threshold(1, 1, 1)
gc.enable()
answered.acquire()  # This thread makes nothing, so the garbage collector runs on the thread of the client.
"""


def test_a_client_that_is_only_dropped_does_not_end_the_process() -> None:
    """The garbage collector may run on the client's own thread. There, librdkafka lets nobody destroy it."""
    ended = subprocess.run([sys.executable, "-W", "default", "-c", DROP], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "ResourceWarning: unclosed" in ended.stderr


def test_a_request_that_kafka_refuses_keeps_nothing_of_its_caller() -> None:
    """Else the caller's objects wait for the next collection of cycles, which a harvester hardly ever makes."""

    class Client: ...

    def ask(client: Client) -> None:
        refused: Future[None] = Future()
        refused.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        with suppress(KafkaException):
            answer_of(refused, 0)

    gc.disable()
    try:
        client = Client()
        gone = weakref.ref(client)
        ask(client)
        del client
        assert gone() is None
    finally:
        gc.enable()


class Counting:
    """A producer that counts what it takes."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self.taken = 0

    def produce(self, *args: Any, **options: Any) -> None:
        self._producer.produce(*args, **options)
        self.taken += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


class Failed:
    """A producer that has met a fatal error."""

    def __init__(self) -> None:
        self.purged = False

    def produce(self, *_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._FATAL))

    def purge(self) -> None:
        self.purged = True


def test_a_producer_of_heartbeats_that_has_failed_for_good_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = KafkaMembership(SETTINGS, KafkaNames.of(SETTINGS), 1, Signer(b"s" * 32), "us")
    another = Counting(membership._sender)
    monkeypatch.setattr(membership, "_new_sender", lambda: another)
    try:
        membership._sender = failed = Failed()  # type: ignore[assignment]
        membership.send(LeaderHeartbeat(0, "leader", "", "us", "host", 1, "2026-01-01T00:00:00+00:00", "i", "p", 1))
        assert failed.purged
        assert another.taken == 1
    finally:
        membership.leave(0.0)


def test_heartbeats_go_on_once_those_of_a_full_queue_have_expired() -> None:
    settings = SETTINGS.model_copy(update={"kafka": {"queue.buffering.max.messages": 1}})
    membership = KafkaMembership(settings, KafkaNames.of(settings), 1, Signer(b"s" * 32), "us")
    membership._sender = counting = Counting(membership._sender)  # type: ignore[assignment]
    heartbeat = LeaderHeartbeat(0, "leader", "", "us", "host", 1, "2026-01-01T00:00:00+00:00", "i", "p", 1)

    def taken() -> int:
        membership.send(heartbeat)
        return counting.taken

    try:
        assert (taken(), taken()) == (1, 1)  # The first one waits for a broker.
        eventually(lambda: taken() > 1, 15)
    finally:
        membership.leave(0.0)


class Noted:
    """A client that notes that it was closed."""

    def __init__(self, closed: list[str], name: str, problem: Exception | None = None) -> None:
        self._closed, self._name, self._problem = closed, name, problem

    def close(self, timeout: float = 0.0) -> None:
        self._closed.append(self._name)
        if self._problem is not None:
            raise self._problem

    def flush(self, timeout: float) -> None: ...

    def subscribe(self, *_: object, **__: object) -> None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))


def test_a_consumer_whose_instance_cannot_be_made_closes_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(consumer, "CoordinationLog", lambda *_: Noted(closed, "log"))
    monkeypatch.setattr(confluent_kafka, "Consumer", lambda _: Noted(closed, "reader"))
    with pytest.raises(AttributeError):  # This log cannot say since when it is read.
        consumer.Consumer(["orders"], "billing", "one", bootstrap_servers="127.0.0.1:1")
    assert closed == ["reader", "log"]


def test_a_consumer_closes_all_its_clients_though_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    consuming: Any = object.__new__(consumer.Consumer)
    consuming._telemetry = Noted(closed, "port")
    consuming._reader = Noted(closed, "reader", KafkaException(KafkaError(KafkaError._FATAL)))
    consuming._log = Noted(closed, "log", KafkaException(KafkaError(KafkaError._FATAL)))
    monkeypatch.setattr(Noted, "stop", lambda *_, **__: None, raising=False)
    consuming._instance = Noted(closed, "instance")
    with pytest.raises(KafkaException):
        consuming.close()
    assert closed == ["log", "reader", "port"]


def test_a_coordination_log_that_cannot_connect_closes_what_it_has_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def refuse(_: object) -> None:
        raise KafkaException(KafkaError(KafkaError._INVALID_ARG))

    monkeypatch.setattr(log, "Producer", lambda _: Noted(closed, "writer"))
    monkeypatch.setattr(log, "Consumer", refuse)
    with pytest.raises(InvalidSetting):
        log.CoordinationLog(kafka_settings("127.0.0.1:1", None), log.TOPIC, "billing")
    assert closed == ["writer"]


def test_a_coordination_log_is_closed_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread then, as in a function of `atexit`."""

    def refuse(_: Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    closed: list[str] = []
    followed: Any = object.__new__(log.CoordinationLog)
    followed._closed, followed._guard, followed._to_commit, followed._group_id = False, Lock(), {}, "billing"
    followed._reader, followed._writer, followed._admin = (
        Noted(closed, each) for each in ("reader", "writer", "admin")
    )
    monkeypatch.setattr(Thread, "start", refuse)
    followed.close()
    assert closed == ["writer", "reader", "admin"]


def test_a_tenant_that_fails_is_stopped_though_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tenants' harvesters go on."""

    def refuse(_: Thread) -> None:
        raise RuntimeError("can't start new thread")

    stopped: list[str] = []
    service: Any = TenantHarvesters(SETTINGS.model_copy(update={"table": "tenant_*.outbox"}))
    service._schedule.changes({"tenant_a": None}, 0.0, 1)
    service._harvesters["tenant_a"] = SimpleNamespace(stop=lambda: stopped.append("tenant_a"))
    monkeypatch.setattr(Thread, "start", refuse)
    service._failed("tenant_a", RuntimeError("it ended"))
    service._found = {"tenant_a": None, "tenant_b": None}
    service._follow(0.0)
    assert stopped == ["tenant_a"]
    assert service._schedule.failed == ("tenant_a", "tenant_b")


def test_a_member_may_leave_twice() -> None:
    membership = KafkaMembership(SETTINGS, KafkaNames.of(SETTINGS), 1, Signer(b"s" * 32), "instance")
    membership.leave(0.1)
    membership.leave(0.1)


def test_an_inbox_that_cannot_subscribe_closes_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    monkeypatch.setattr(inbox_consumer, "Consumer", lambda _: Noted(closed, "consumer"))
    nothing: Any = None
    inbox = inbox_consumer.Inbox(SETTINGS, group="g", topics=["t"], handler=lambda connection, event: None)
    with pytest.raises(KafkaException):
        inbox._poll_loop(nothing)
    assert closed == ["consumer"]


def test_a_port_whose_metrics_cannot_be_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(telemetry_server.TelemetryServer, "metrics_of", full)
    nothing: Any = None
    listen = f"127.0.0.1:{free_port()}"
    made: list[Callable[[], object]] = [
        lambda: HarvesterTelemetry(SETTINGS, listen, error=nothing, stopping=nothing, now=nothing),
        lambda: InboxTelemetry(
            SETTINGS,
            listen,
            "g",
            [],
            error=nothing,
            stopping=nothing,
            facts=nothing,
            next_offsets=nothing,
            paused=nothing,
        ),
        lambda: ConsumerTelemetry(
            SETTINGS, listen, "g", "c", [], error=nothing, facts=nothing, unclaimed=nothing, committed_at=nothing
        ),
    ]
    for make in made:
        with pytest.raises(OSError, match="No space"):
            make()
        assert not telemetry_server._servers
