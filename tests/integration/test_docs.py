"""What the pages of the checkout show, runs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psycopg
import pytest
from _pytest.mark.structures import ParameterSet
from confluent_kafka import Producer

from outbox_plugin import Event, Settings
from outbox_plugin.adapters.kafka_tokens import TokenCallback, TokenProvider
from outbox_plugin.inbox import Inbox, Received
from outbox_plugin.schema.migrate import migrate
from tests.documents import CHECKOUT, DOCS, PAGES, blocks, blocks_of, name_of
from tests.emit_connections import django_alias
from tests.harvesting import drained, environment, harvesters, run_outbox
from tests.inbox_support import produce, query
from tests.support import eventually

pytestmark = [  # Dagster's own calls.
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:.* is currently in beta"),
]

INBOX = DOCS / "how-to" / "handle-each-event-once.md"
RUN_BY_THEMSELVES = [
    DOCS / "how-to" / "declare-in-dagster.md",
    DOCS / "reference" / "coordination-protocol.md",
    DOCS / "reference" / "event.md",
]
TABLES = """
CREATE TABLE account (id INT PRIMARY KEY, customer TEXT NOT NULL, balance INT NOT NULL, orders INT NOT NULL);
CREATE TABLE orders_by_customer (customer TEXT PRIMARY KEY, orders BIGINT NOT NULL);
CREATE TABLE shipment (customer TEXT NOT NULL);
"""


def each_block(language: str) -> list[ParameterSet]:
    found = []
    for page in PAGES:
        texts = [block.text for block in blocks_of(page, language)]
        found += [pytest.param(text, id=f"{name_of(page)}-{number}") for number, text in enumerate(texts)]
    return found


@pytest.fixture
def reader(settings: Settings, topic: str, group: str, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Somebody who has named the servers, made the tables, and pastes block after block."""
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    query(settings, TABLES)
    query(settings, "INSERT INTO account VALUES (17, 'ann', 10, 0)")
    return Reader(settings, topic, group)


class Reader:
    """Runs blocks of a page one after the other in one namespace, with the names that a page calls the reader's own."""

    def __init__(self, settings: Settings, topic: str, group: str) -> None:
        self.settings, self.topic, self.group = settings, topic, group
        self.names: dict[str, Any] = {}

    def own(self, text: str) -> str:
        """A block, with a topic and a group that are this test's alone."""
        names = (("billing", self.group), ("shipping", self.group))
        for lists in ('topics=["orders"]', 'Consumer(["orders"]'):
            text = text.replace(lists, lists.replace("orders", self.topic))
        for given, ours in names:
            text = re.sub(rf'(group|group_id)="{given}"', rf'\1="{ours}"', text)
        return text

    def paste(self, text: str) -> None:
        """Run a block, with a connection that is open."""
        with psycopg.connect(self.settings.dsn.get_secret_value()) as self.names["connection"]:
            exec(compile(self.own(text), "docs", "exec", dont_inherit=True), self.names)


@pytest.mark.integration
@pytest.mark.parametrize("page", RUN_BY_THEMSELVES, ids=name_of)
def test_python_runs(reader: Reader, page: Path) -> None:
    """Blocks that need nothing but what the page says."""
    for block in blocks_of(page, "python"):
        reader.paste(block.text)


@pytest.mark.integration
def test_python_of_the_readme_emits(reader: Reader) -> None:
    [block] = blocks_of(CHECKOUT / "README.md", "python")
    reader.paste(block.text)
    assert query(reader.settings, "SELECT kafka_topic, kafka_key FROM outbox") == [("accounts", "17")]
    assert query(reader.settings, "SELECT balance FROM account") == [(5,)]


@pytest.mark.integration
def test_python_of_emit_emits(reader: Reader) -> None:
    class OutOfStock(Exception):
        """What the reader's own code raises."""

    def add_gift(_: object, listener: Any) -> None:
        listener.occurred(Event(topic="gifts", key="17", value=None))
        raise OutOfStock

    placed = Event(topic="orders", key="17", type="OrderPlaced", value={})
    order = SimpleNamespace(place=lambda listener: listener.occurred(placed))
    reader.names.update(OutOfStock=OutOfStock, add_gift=add_gift, placed=placed, order=order)
    for block in blocks_of(DOCS / "how-to" / "emit-events.md", "python"):
        reader.paste(block.text)
    assert query(reader.settings, "SELECT kafka_topic FROM outbox ORDER BY id") == [
        ("accounts",),
        ("orders",),
        ("orders",),
    ]


@pytest.mark.integration
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_python_of_the_inbox_handles(
    reader: Reader, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first block is a program: it runs until a signal, and ends cleanly."""
    produce(reader.settings, reader.topic, [("ann", "{}")])
    single, batch, in_session, in_django = blocks_of(INBOX, "python")
    assert single.file
    (tmp_path / single.file).write_text(reader.own(single.text))
    with subprocess.Popen([sys.executable, single.file], cwd=tmp_path) as program:
        try:
            eventually(lambda: query(reader.settings, "SELECT kafka_topic FROM outbox") == [("invoices",)], 60)
        finally:
            program.send_signal(number)
        assert program.wait(60) == 0
    assert query(reader.settings, "SELECT orders FROM account") == [(1,)]
    reader.paste(batch.text)
    received = SimpleNamespace(key_text="ann")
    with psycopg.connect(reader.settings.dsn.get_secret_value()) as connection:
        reader.names["handle"](connection, [received, received])
    assert query(reader.settings, "SELECT * FROM orders_by_customer") == [("ann", 2)]
    reader.paste(in_session.text)
    with psycopg.connect(reader.settings.dsn.get_secret_value()) as connection:
        reader.names["handle"](connection, SimpleNamespace(key_text="ann", json=dict))
    assert query(reader.settings, "SELECT orders FROM account") == [(2,)]
    assert query(reader.settings, "SELECT kafka_topic FROM outbox") == [("invoices",), ("invoices",)]
    django_alias(reader.settings.dsn.get_secret_value())  # Sets Django up.
    monkeypatch.setitem(sys.modules, "shop", ModuleType("shop"))
    monkeypatch.setitem(sys.modules, "shop.models", shop_models())
    reader.paste(in_django.text)
    with psycopg.connect(reader.settings.dsn.get_secret_value()) as connection:
        reader.names["handle"](connection, SimpleNamespace(key_text="ann", json=dict))
    assert query(reader.settings, "SELECT orders FROM account") == [(3,)]
    assert query(reader.settings, "SELECT count(*) FROM outbox") == [(3,)]


def shop_models() -> ModuleType:
    """What a reader with a Django project has."""
    from django.db import models

    class Account(models.Model):  # type: ignore[misc]
        customer = models.TextField(primary_key=True)
        orders = models.IntegerField()

        class Meta:
            app_label = f"shop_{uuid.uuid4().hex}"
            db_table = "account"

    module = ModuleType("shop.models")
    module.Account = Account  # type: ignore[attr-defined]
    return module


@pytest.mark.integration
def test_python_of_the_web_server_relays_and_handles(reader: Reader) -> None:
    [block] = blocks_of(DOCS / "how-to" / "embed-in-a-web-server.md", "python")
    reader.paste(block.text)

    async def live() -> None:
        async with reader.names["lifespan"](reader.names["app"]):
            produce(reader.settings, reader.topic, [("ann", "{}")])
            shipped = partial(query, reader.settings, "SELECT customer FROM shipment")
            await asyncio.to_thread(eventually, lambda: shipped() == [("ann",)], 60)

    asyncio.run(live())


@pytest.mark.integration
def test_python_of_coordination_consumes(reader: Reader) -> None:
    handled: list[Any] = []

    def handle(record: Any) -> None:
        handled.append(record)
        reader.names["orders"].stop()

    produce(reader.settings, reader.topic, [("ann", "{}")])
    reader.names["handle"] = handle
    [block] = blocks_of(DOCS / "how-to" / "consume-without-rebalances.md", "python")
    reader.paste(block.text)
    assert len(handled) == 1


@pytest.mark.integration
def test_the_first_event_is_read(settings: Settings, topic: str, group: str, tmp_path: Path) -> None:
    """The page from beginning to end, with the test's servers and a topic of the test's own."""
    env = {**environment(settings), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = ""
    with ExitStack() as running:
        for block in blocks("tutorials/first-event.md"):
            text = block.text.replace('"purchases"', f'"{topic}"').replace("first-reader", group)
            if block.file:
                (tmp_path / block.file).write_text(text)
            elif "outbox harvest" in text:
                assert text == "outbox migrate\noutbox harvest\n"
                assert run_outbox("migrate", env=env).returncode == 0
                running.enter_context(harvesters(settings, tmp_path / "logs"))
            elif text.startswith("python "):
                command = [sys.executable, *text.split()[1:]]
                said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
        drained(settings)
        assert "backlog" in run_outbox("status", env=env).stdout
    [printed] = [block.text for block in blocks("tutorials/first-event.md") if block.language == "text"]
    assert shown(said) == shown(printed)


def shown(text: str) -> list[str]:
    """What a page prints: the first line as it is, then the headers' names."""
    first, *headers = text.splitlines()
    return [first, *(line.split(" ")[0] for line in headers)]


def test_the_token_provider_of_the_page_returns_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = blocks("how-to/secure.md", "python")
    names: dict[str, Any] = {}
    exec(block.text, names)
    monkeypatch.setattr(Path, "read_text", lambda _: '{"access_token": "header.claims.", "expires_in": 300}')
    token, expires_at = TokenCallback(TokenProvider("shop.tokens:kafka_token", names["kafka_token"]))("")
    assert token == "header.claims."
    assert 290 < expires_at - time.time() <= 300


def test_every_page_with_python_is_run_somewhere() -> None:
    """By the tests above, by those of Spark's sink and streams, or, as a whole, by `test_fresh_project.py`."""
    run = {CHECKOUT / "README.md", INBOX, *RUN_BY_THEMSELVES}
    run |= {DOCS / "tutorials" / name for name in ("dagster-project.md", "first-event.md")}
    run |= {DOCS / "how-to" / name for name in ("emit-events.md", "embed-in-a-web-server.md", "emit-from-spark.md")}
    run |= {DOCS / "how-to" / name for name in ("consume-without-rebalances.md", "consume-in-dagster-and-spark.md")}
    run.add(DOCS / "how-to" / "test-your-code.md")  # By test_testing.py.
    run.add(DOCS / "how-to" / "secure.md")
    assert {page for page in PAGES if blocks_of(page, "python")} == run


@pytest.mark.integration
@pytest.mark.parametrize("block", each_block("sql"))
def test_sql_runs(settings: Settings, block: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(block.encode())


@pytest.mark.integration
def test_nothing_is_left_of_an_outbox_that_was_removed_as_the_page_says(settings: Settings) -> None:
    migrate(settings, wake_up=True)
    [block] = blocks_of(DOCS / "reference" / "what-is-deleted-when.md", "sql")
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(f"{block.text}; DROP SCHEMA outbox_staging".encode())
    assert query(settings, "SELECT relname FROM pg_class WHERE relname LIKE 'outbox%%'") == []
    assert query(settings, "SELECT proname FROM pg_proc WHERE proname LIKE 'outbox%%'") == []


@pytest.mark.integration
def test_every_table_and_column_is_listed(settings: Settings) -> None:
    page = (DOCS / "reference" / "tables-and-topics.md").read_text(encoding="utf-8")
    tables, columns = re.split("^### The outbox table$", page.split("## In Kafka")[0], flags=re.MULTILINE)
    there = query(settings, "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND relname LIKE 'outbox%%'")
    assert {name for (name,) in there} == first_cells(tables) - {"OUTBOX_TABLE"}
    there = query(settings, "SELECT attname FROM pg_attribute WHERE attrelid = 'outbox'::regclass AND attnum > 0")
    assert {name for (name,) in there} == first_cells(columns)


def first_cells(table: str) -> set[str]:
    """What the first cells of a page's table name."""
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.integration
def test_a_consumer_in_another_language_shares_its_group_with_inboxes(
    settings: Settings, topic: str, group: str
) -> None:
    """By the very statement that the page prints: it hides no event, and repeats none."""
    text = INBOX.read_text(encoding="utf-8")
    [printed] = re.findall(r"(INSERT INTO outbox_inbox .*?);", text, re.DOTALL)
    claim = printed.replace("billing", group).replace("the header idempotency-key", "known")
    claim = claim.replace("orders OrderPlaced", f"{topic} OrderPlaced")
    assert [len(query(settings, claim)) for _ in range(2)] == [1, 0]

    seen: list[tuple[str, str]] = []
    producer = Producer({"bootstrap.servers": settings.bootstrap_servers})
    for key, kind in (("known", "OrderPlaced"), ("known", "OrderPaid"), ("new", "OrderPlaced")):
        headers: list[tuple[str, str | bytes | None]] = [("idempotency-key", key), ("event-type", kind)]
        producer.produce(topic, "", "k", headers=headers)
    producer.flush(30)
    producer.close()

    def handle(connection: psycopg.Connection[Any], event: Received) -> None:
        seen.append((event.idempotency_key, event.type))

    with Inbox(settings, group=group, topics=[topic], handler=handle):
        eventually(lambda: ("new", "OrderPlaced") in seen, 30)
    assert seen == [("known", "OrderPaid"), ("new", "OrderPlaced")]
    assert query(settings, claim.replace("'known'", "'new'")) == []
