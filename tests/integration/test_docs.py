"""What the pages under docs/ and the README show, runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import psycopg
import pytest
from _pytest.mark.structures import ParameterSet
from confluent_kafka import Producer

from outbox_plugin import Settings
from outbox_plugin.inbox import Inbox, Received
from tests.consuming import query
from tests.support import eventually

CHECKOUT = Path(__file__).resolve().parents[2]
PAGES = [CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md"))]


def blocks(language: str) -> list[ParameterSet]:
    found = []
    for page in PAGES:
        texts = re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [pytest.param(text, id=f"{page.relative_to(CHECKOUT)}-{number}") for number, text in enumerate(texts)]
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
@pytest.mark.parametrize("page", ["docs/inbox.md", "README.md"])
def test_a_consumer_in_another_language_shares_its_group_with_inboxes(
    settings: Settings, topic: str, group: str, page: str
) -> None:
    """By the very statement that the page prints: it hides no event, and repeats none."""
    text = (CHECKOUT / page).read_text(encoding="utf-8")
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


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(CHECKOUT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
