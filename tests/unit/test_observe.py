"""The port for operators: pages, clients that are slow, silent or wrong, and what happens becomes metrics."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outbox_plugin.core.readiness import NotReady, Readiness, Ready
from outbox_plugin.core.row import Rows, WholeRecord
from outbox_plugin.core.topic_partition import TopicPartition
from outbox_plugin.embedded.free_ports import free_port
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox.inbox_readiness import InboxFacts
from outbox_plugin.inbox.inbox_telemetry import InboxTelemetry
from outbox_plugin.observe import http_server as http
from outbox_plugin.observe.harvester_metrics import GroupMetrics, HarvesterMetrics
from outbox_plugin.observe.http_server import HttpServer, Response
from outbox_plugin.observe.table_poller import TableSize, TableState, Waiting
from outbox_plugin.observe.telemetry_server import TelemetryServer, join, leave
from outbox_plugin.observe.topic_counter import MAX_TOPICS
from outbox_plugin.relay.events import (
    HarvestEvent,
    RowsRead,
    TakeoverBegan,
    TermBegan,
    TermFinished,
    TransactionEnded,
    WindowPublished,
    WindowPurged,
)
from outbox_plugin.settings import Settings, host_and_port
from tests.support import PATIENCE, eventually

HOST = "127.0.0.1"


def get(port: int, path: str, method: str = "GET", host: str = HOST) -> tuple[int, str]:
    with closing(HTTPConnection(host, port, timeout=30 * PATIENCE)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def raw(port: int, request: bytes) -> bytes:
    """All that the server says until it closes the connection."""
    with socket.create_connection((HOST, port), timeout=30 * PATIENCE) as client:
        client.sendall(request)
        answer = b""
        while more := client.recv(65_536):
            answer += more
        return answer


def answered(port: int) -> bool:
    """Whether a request was quick enough not to be cut off itself."""
    with suppress(OSError, HTTPException):
        return get(port, "/hello") == (200, "hello\n")
    return False


def of_ours() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("outbox-http")]


@contextmanager
def serving(**pages: Callable[[], Response]) -> Iterator[int]:
    port = free_port()
    server = HttpServer(HOST, port, {f"/{name}": page for name, page in pages.items()})
    try:
        yield port
    finally:
        server.close()
        eventually(lambda: not of_ours(), 10)


def hello() -> Response:
    return Response("hello\n")


def test_a_page_is_served_and_nothing_else() -> None:
    with serving(hello=hello) as port:
        assert get(port, "/hello") == (200, "hello\n")
        assert get(port, "/hello?name=x") == (200, "hello\n")
        assert get(port, "/other") == (404, "404 there are only /hello\n")
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH", "GARBAGE"):
            assert get(port, "/hello", method) == (405, "405 only GET is served\n")
        assert get(port, "/hello", "HEAD") == (405, "")
    with pytest.raises(ConnectionRefusedError):
        get(port, "/hello")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x00\xff\xfe garbage\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /hello HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET /hello HTTP/1.1\r\na: " + b"x" * 100_000 + b"\r\n\r\n", b"431"),
        (b"GET /hello HTTP/9.9\r\n\r\n", b"505"),
        (b"GET http://elsewhere/hello HTTP/1.1\r\n\r\n", b"404"),
    ],
)
def test_a_wrong_request_is_refused(request_: bytes, status: bytes) -> None:
    with serving(hello=hello) as port:
        try:
            assert status in raw(port, request_).splitlines()[0]
        except ConnectionResetError:  # As the kernel does where the server closes before all has been read.
            assert len(request_) > 65_536
        assert get(port, "/hello") == (200, "hello\n")


def test_a_page_that_fails_harms_nobody() -> None:
    def fails() -> Response:
        raise ValueError("no")

    with serving(hello=hello, fails=fails) as port:
        assert raw(port, b"GET /fails HTTP/1.1\r\n\r\n") == b""
        assert get(port, "/hello") == (200, "hello\n")


def is_cut_off(client: socket.socket) -> bool:
    """Whether the server ends the connection of a client that goes on sending, a byte at a time."""
    client.settimeout(0.1)
    deadline = time.monotonic() + 30 * PATIENCE
    while time.monotonic() < deadline:
        try:
            client.sendall(b"T")
            if not client.recv(100):
                return True
        except TimeoutError:
            pass
        except OSError:
            return True
    return False


def test_silent_clients_are_cut_off_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 1.0)
    with serving(hello=hello) as port:
        slow = [socket.create_connection((HOST, port)) for _ in range(3 * http.THREADS)]
        for number, each in enumerate(slow):
            each.sendall(b"GET /hello HT" if number % 2 else b"\r\n")
        eventually(lambda: answered(port), 10)
        eventually(lambda: len(of_ours()) <= http.THREADS + 1, 10)
        for each in slow:
            each.close()


def test_a_client_that_drips_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "CONNECTION_SECONDS", 1.0)
    with serving(hello=hello) as port, socket.create_connection((HOST, port)) as dripping:
        dripping.sendall(b"GET /hello HT")
        assert is_cut_off(dripping)


def test_many_scrapes_at_once_are_all_answered() -> None:
    with serving(hello=hello) as port, ThreadPoolExecutor(100) as clients:
        assert set(clients.map(lambda _: get(port, "/hello"), range(300))) == {(200, "hello\n")}


def test_it_closes_while_clients_hang() -> None:
    answering, go_on = threading.Event(), threading.Event()

    def hangs() -> Response:
        answering.set()
        go_on.wait(30 * PATIENCE)
        return hello()

    port = free_port()
    server = HttpServer(HOST, port, {"/hangs": hangs})
    silent = [socket.create_connection((HOST, port)) for _ in range(2 * http.THREADS)]
    eventually(lambda: len(of_ours()) > http.THREADS, 10)
    for each in silent:
        each.close()
    with ThreadPoolExecutor(1) as client:
        scrape = client.submit(raw, port, b"GET /hangs HTTP/1.1\r\n\r\n")
        assert answering.wait(30 * PATIENCE)
        closing_ = threading.Thread(target=server.close)
        closing_.start()
        eventually(lambda: not taken(port), 10)
        go_on.set()
        closing_.join(30 * PATIENCE)
        assert scrape.result() == b""
    eventually(lambda: not of_ours(), 10)


def taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
        return False


def test_ipv6() -> None:
    port = free_port()
    try:
        server = HttpServer(*host_and_port(f"[::1]:{port}"), {"/hello": hello})
    except InvalidSetting as error:
        pytest.skip(str(error))
    with closing(server):
        assert get(port, "/hello", host="::1") == (200, "hello\n")


def test_an_address_that_cannot_be_had_is_one_line() -> None:
    with (
        serving(hello=hello) as port,
        pytest.raises(InvalidSetting, match=rf"^OUTBOX_LISTEN: .*{HOST}:{port}: another"),
    ):
        HttpServer(HOST, port, {})
    with pytest.raises(InvalidSetting, match=r"cannot listen on 203.0.113.1:9"):
        HttpServer("203.0.113.1", 9, {})
    with pytest.raises(InvalidSetting, match=r"cannot listen on no-such-host.invalid:9"):
        HttpServer("no-such-host.invalid", 9, {})
    with pytest.raises(InvalidSetting, match=r"cannot listen on a\.\.b:9"):
        HttpServer("a..b", 9, {})
    eventually(lambda: not of_ours(), 10)


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("9464", ("127.0.0.1", 9464)),
        (9464, ("127.0.0.1", 9464)),
        ("0.0.0.0:9464", ("0.0.0.0", 9464)),
        ("[::]:9464", ("::", 9464)),
        ("outbox.local:1", ("outbox.local", 1)),
    ],
)
def test_addresses(listen: str, address: tuple[str, int]) -> None:
    settings = Settings(dsn="postgresql://db/x", bootstrap_servers="kafka:9092", listen=listen)
    assert host_and_port(settings.listen or "") == address
    assert Settings(**settings.model_dump()).listen == settings.listen
    assert settings.environment()["OUTBOX_LISTEN"] == str(listen)


@pytest.mark.parametrize(
    "listen", ["", "0", "70000", "-1", "x", ":9464", "::1:9464", "[::1]", "host:", "a b:1", "1:2:3"]
)
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^OUTBOX_LISTEN: expected a port from 1 to 65535") as refused:
        Settings(dsn="postgresql://db/x", bootstrap_servers="kafka:9092", listen=listen)
    assert "\n" not in str(refused.value)


HARVESTS = """
from outbox_plugin.cli import main
sys.argv = ["outbox", "harvest", "--listen", "9464"]
main()
"""
HANDLES = """
from outbox_plugin import Settings
from outbox_plugin.errors import InvalidSetting
from outbox_plugin.inbox import Inbox
try:
    Inbox(Settings(listen="9464"), group="g", topics=["t"], handler=print).start()
except InvalidSetting as error:
    sys.exit(print(f"outbox: {error}", file=sys.stderr) or 2)
"""


@pytest.mark.parametrize("program", [HARVESTS, HANDLES])
def test_without_the_library_the_extra_is_named(program: str) -> None:
    script = f'import sys\nsys.modules["prometheus_client"] = None\n{program}'
    env = {**os.environ, "OUTBOX_DSN": "postgresql://127.0.0.1:1/x", "OUTBOX_BOOTSTRAP_SERVERS": "127.0.0.1:1"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "outbox: OUTBOX_LISTEN needs the module prometheus_client: install outbox-plugin[metrics]\n",
    )


class Fake:
    """A member whose state a test sets."""

    def __init__(self, port: TelemetryServer, group: str = "sales") -> None:
        self.port = port
        self.metrics = GroupMetrics(port.metrics_of(HarvesterMetrics), group)
        self.name = f"group {group}"
        self.alive = True
        self.shards: dict[int, Readiness] = {0: Ready("leads")}
        self.table: TableState | None = None
        port.add(self)

    def is_alive(self) -> bool:
        return self.alive

    def verdicts(self) -> Mapping[str, Readiness]:
        return {f"{self.name}, shard {shard}": verdict for shard, verdict in self.shards.items()}

    def show_gauges(self) -> None:
        for shard, verdict in self.shards.items():
            self.metrics.show_shard(shard, leads=shard == 0, readiness=verdict)
        if self.table is not None:
            self.metrics.show_table(self.table, 7.0)


def test_all_that_run_in_a_process_share_the_port() -> None:
    number = free_port()
    first, second = Fake(join(HOST, number)), Fake(join(HOST, number), "stock")
    assert first.port is second.port
    second.shards = {0: Ready("stands by"), 1: NotReady("no\nleader")}
    assert get(number, "/readyz") == (
        503,
        "group sales, shard 0: ready: leads\ngroup stock, shard 0: ready: stands by\n"
        "group stock, shard 1: not ready: no leader\n",
    )
    assert get(number, "/livez") == (200, "group sales: alive\ngroup stock: alive\n")
    second.alive = False
    assert get(number, "/livez")[0] == 503
    leave(second.port, second)
    assert get(number, "/readyz") == (200, "group sales, shard 0: ready: leads\n")
    leave(first.port, first)
    assert not taken(number)
    again = Fake(join(HOST, number))
    assert get(number, "/readyz")[0] == 200
    leave(again.port, again)
    eventually(lambda: not of_ours(), 10)


def test_a_fork_neither_keeps_the_port_nor_hangs() -> None:
    number = free_port()
    member = Fake(join(HOST, number))
    ended, tells = os.pipe()
    child = os.fork()
    if not child:
        try:
            leave(member.port, member)  # As whoever stops what it has inherited.
            os.close(ended)
            os.read(0, 0)
            os.write(tells, b"!")
            threading.Event().wait(2.0)
        finally:
            os._exit(0)
    os.close(tells)  # Else the end of a child that fails would not be seen.
    assert os.read(ended, 1) == b"!"
    assert get(number, "/readyz")[0] == 200
    leave(member.port, member)
    again = Fake(join(HOST, number))
    assert get(number, "/readyz")[0] == 200
    leave(again.port, again)
    os.waitpid(child, 0)
    os.close(ended)


@contextmanager
def member() -> Iterator[tuple[Fake, Callable[[], dict[tuple[str, ...], float]]]]:
    """A member, and what a scrape shows: values by the sample's name and its labels' values but for the group."""
    number = free_port()
    fake = Fake(join(HOST, number))

    def scrape() -> dict[tuple[str, ...], float]:
        status, text = get(number, "/metrics")
        assert status == 200
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = [value for name, value in sample.labels.items() if name != "group"]
                found[(sample.name, *labels)] = sample.value
        return found

    try:
        yield fake, scrape
    finally:
        leave(fake.port, fake)


def test_the_lag_of_a_partition_that_an_inbox_gave_up_is_not_shown() -> None:
    """Its next owner shows it, and a sum must not count it twice until Kafka is asked again."""
    kept, given_up = TopicPartition("orders", 0), TopicPartition("orders", 1)
    settings = Settings(dsn="postgresql://db/x", bootstrap_servers="kafka:9092")
    listen = str(free_port())
    with closing(
        InboxTelemetry(
            settings,
            listen,
            "billing",
            ["orders"],
            error=lambda: None,
            stopping=lambda: False,
            facts=InboxFacts,
            next_offsets=lambda: {kept: 3},
            paused=lambda: 0,
        )
    ) as inbox:
        inbox.kafka_answered({kept: 5, given_up: 7})
        _, text = get(int(listen), "/metrics")
    lags = [line for line in text.splitlines() if line.startswith("outbox_inbox_lag_messages{")]
    assert [('partition_id="0"' in line, line.endswith(" 5.0")) for line in lags] == [(True, True)]


def rows(*topics: str) -> Rows:
    return Rows([(id_, 0, topic, "k", "v", [], [], 1) for id_, topic in enumerate(topics)])


def test_what_happens_is_counted() -> None:
    with member() as (fake, scrape):
        events: list[HarvestEvent] = [
            TakeoverBegan(0, "a"),
            TermBegan(0, "a", 3),
            RowsRead(0, 3, 0.01),
            TransactionEnded(0, 0.02, None),
            TransactionEnded(0, 0.02, "TopicsAway"),
            WindowPublished(0, 3, 0.03, 0.0, rows("t", "t", "u")),
            WindowPublished(0, 2, 0.03, 0.0, rows("t", "t")),
            WindowPublished(0, 0, 0.03, 0.0, ()),
            WindowPurged(0, 5, 0.01),
            TermFinished(0, "a", None, None),
            TermFinished(0, "b", "Kafka: away", "LogUnavailable"),
        ]
        for event in events:
            fake.metrics.observe(event)
        found = scrape()
    assert found["outbox_sent_messages_total", "t"] == 4
    assert found["outbox_sent_messages_total", "u"] == 1
    assert found[("outbox_recovered_rows_total",)] == 3
    assert found[("outbox_takeover_duration_seconds_count",)] == 1
    assert found[("outbox_read_duration_seconds_sum",)] == 0.01
    assert found[("outbox_transaction_duration_seconds_count",)] == 1
    assert found["outbox_failed_transactions_total", "TopicsAway"] == 1
    assert found[("outbox_delivery_delay_seconds_count",)] == 2
    assert found[("outbox_purged_rows_total",)] == 5
    assert found["outbox_ended_terms_total", "none"] == 1
    assert found["outbox_ended_terms_total", "LogUnavailable"] == 1


@pytest.mark.parametrize("others", [(), ("u", "k", "of another topic")])
def test_the_bytes_of_values_are_counted_by_topic(others: tuple[str, ...]) -> None:
    contents: list[tuple[str, object]] = [
        ("k", "value"),
        ("key", None),
        ("k", ""),
        ("käse", "größer €"),
        ("k", b"\x00\xff\xfe"),
    ]
    contents += [("k", WholeRecord(b"\xff", "größer", 0, None)), ("k", WholeRecord(b"\xff", None, 0, None))]
    records: list[tuple[Any, ...]] = [(0, 0, "t", key, value, ["name"], ["header"], 1) for key, value in contents]
    records += [(0, 0, *others, [], [], 1)] if others else []
    with member() as (fake, scrape):
        fake.metrics.observe(WindowPublished(0, len(records), 0.03, 0.0, Rows(records)))
        fake.metrics.observe(WindowPublished(0, 1, 0.03, 0.0, Rows(records[:1])))
        found = scrape()
    assert found["outbox_sent_bytes_total", "t"] == 5 + 0 + 0 + 12 + 3 + 8 + 0 + 5
    assert found.get(("outbox_sent_bytes_total", "u")) == (16 if others else None)
    assert found["outbox_sent_messages_total", "t"] == 8


@pytest.mark.parametrize("value", ["größer", "larger", b"\xff\x00"])
def test_the_bytes_of_many_values_of_one_kind_are_counted(value: str | bytes) -> None:
    size = len(value.encode() if isinstance(value, str) else value)
    with member() as (fake, scrape):
        fake.metrics.observe(WindowPublished(0, 2_500, 0.03, 0.0, Rows([(0, 0, "t", "k", value, [], [], 1)] * 2_500)))
        found = scrape()
    assert found["outbox_sent_bytes_total", "t"] == 2_500 * size


def test_the_bytes_of_large_windows_are_estimated_and_right_in_the_long_run() -> None:
    """Also where every tenth record is large, or a window's first ones are."""
    sizes = [100 if row % 10 == 0 or row < 500 else 1 for row in range(10_000)]
    window = Rows([(0, 0, "tu"[row % 3 == 0], "k", "x" * size, [], [], 1) for row, size in enumerate(sizes)])
    true = {topic: sum(len(str(row.value)) for row in window if row.topic == topic) for topic in "tu"}
    with member() as (fake, scrape):
        for _ in range(200):
            fake.metrics.observe(WindowPublished(0, 10_000, 0.03, 0.0, window))
        found = scrape()
    assert found["outbox_sent_messages_total", "u"] == 200 * 3_334
    assert {topic: found["outbox_sent_bytes_total", topic] / 200 for topic in "tu"} == pytest.approx(true, rel=0.05)


def test_topics_do_not_grow_the_metrics_without_bound() -> None:
    with member() as (fake, scrape):
        for number in range(MAX_TOPICS + 50):
            fake.metrics.observe(WindowPublished(0, 2, 0.0, 0.0, rows(f"t{number}", "t0")))
        found = scrape()
    topics = {labels[0]: value for (name, *labels), value in found.items() if name == "outbox_sent_messages_total"}
    assert len(topics) == MAX_TOPICS + 1
    assert topics["other"] == 50
    assert sum(topics.values()) == 2 * (MAX_TOPICS + 50)


def test_gauges_show_what_is_so_now() -> None:
    with member() as (fake, scrape):
        fake.shards = {0: Ready("leads"), 1: NotReady("no")}
        fake.table = TableState(2, frozenset(), 4, 5, {1: Waiting(6, 7.5)}, TableSize(8, 9))
        found = scrape()
        assert (found["outbox_is_leader", "0"], found["outbox_is_leader", "1"]) == (1, 0)
        assert (found["outbox_ready", "0"], found["outbox_ready", "1"]) == (1, 0)
        assert (found["outbox_waiting_rows", "0"], found["outbox_waiting_rows", "1"]) == (0, 6)
        assert found["outbox_oldest_row_age_seconds", "1"] == 7.5
        assert (found[("outbox_parked_keys",)], found[("outbox_dead_letters",)]) == (4, 5)
        assert (found[("outbox_table_dead_rows",)], found[("outbox_table_bytes",)]) == (8, 9)
        fake.shards, fake.table = {0: Ready("leads")}, TableState(1, frozenset(), 0, None, None, None)
        found = scrape()
        assert not [labels for (name, *labels) in found if name == "outbox_waiting_rows" or labels == ["1"]]
        assert ("outbox_table_bytes",) not in found


def test_the_series_of_a_group_that_is_gone_are_removed_once_no_harvester_counts_for_it() -> None:
    registry = CollectorRegistry()
    metrics = HarvesterMetrics(registry)

    def scraped() -> str:
        metrics.clear_gauges()
        return generate_latest(registry).decode()

    def counted(group: str) -> GroupMetrics:
        made = GroupMetrics(metrics, group)
        made.observe(WindowPurged(0, 3, 0.1))
        made.observe(TransactionEnded(0, 0.1, "Fenced"))
        return made

    stays, goes = counted("stays"), counted("goes")
    metrics.forget("goes")
    assert 'group="goes"' in scraped()  # Its harvester is ending.
    goes.close()
    assert 'group="goes"' not in scraped()
    assert 'outbox_purged_rows_total{group="stays"} 3.0' in scraped()
    ending = counted("goes")
    metrics.forget("goes")
    again = counted("goes")  # The tenant came back while its last harvester was ending.
    ending.close()
    assert 'outbox_purged_rows_total{group="goes"} 6.0' in scraped()
    again.close()
    stays.close()
    assert 'outbox_purged_rows_total{group="goes"} 6.0' in scraped()  # They may be started again.
