"""What the pages of the checkout show, runs."""

from __future__ import annotations

import ast
import re
from typing import Any

import psycopg
import pytest
from _pytest.mark.structures import ParameterSet
from confluent_kafka import Producer

from outbox_plugin import Settings
from outbox_plugin.inbox import Inbox, Received
from tests.consuming import query
from tests.documents import DOCS, PAGES, blocks_of, name_of
from tests.support import eventually

INBOX = DOCS / "how-to" / "handle-each-event-once.md"


def blocks(language: str) -> list[ParameterSet]:
    found = []
    for page in PAGES:
        texts = [block.text for block in blocks_of(page, language)]
        found += [pytest.param(text, id=f"{name_of(page)}-{number}") for number, text in enumerate(texts)]
    return found


@pytest.mark.parametrize("block", blocks("python"))
def test_python_compiles_and_imports_what_is_there(block: str) -> None:
    for each in ast.walk(ast.parse(block)):
        if isinstance(each, ast.ImportFrom) and (each.module or "").startswith("outbox_plugin"):
            exec(compile(ast.Module([each], []), "docs", "exec"), {})


@pytest.mark.integration
@pytest.mark.parametrize("block", blocks("sql"))
def test_sql_runs(settings: Settings, block: str) -> None:
    with psycopg.connect(settings.dsn.get_secret_value()) as connection:
        connection.execute(block.encode())


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
