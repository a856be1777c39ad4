"""What the pages under docs/ and the README show, runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import psycopg
import pytest
from _pytest.mark.structures import ParameterSet

from outbox_plugin import Settings
from tests.consuming import query

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
def test_the_two_statements_for_other_languages_make_a_consumer_idempotent(settings: Settings) -> None:
    inbox = (CHECKOUT / "docs" / "inbox.md").read_text(encoding="utf-8")
    [claim] = re.findall(r"(INSERT INTO outbox_inbox .*?);", inbox, re.DOTALL)
    assert [len(query(settings, claim)) for _ in range(2)] == [1, 0]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(CHECKOUT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
