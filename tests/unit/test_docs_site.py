"""The site that `make docs` builds: its navigation, its links, and the public names on it."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from mkdocs_hooks import TOP_PAGES, with_docstrings, with_site_links
from tests import reference
from tests.documents import CHECKOUT, DOCS

PACKAGE = CHECKOUT / "outbox_plugin"
FAILURES = DOCS / "explanation" / "failures.md"
NAVIGATION = (CHECKOUT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
PUBLIC_MODULES = sorted(
    ".".join(path.relative_to(CHECKOUT).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if re.search(r"^__all__ =", path.read_text(encoding="utf-8"), re.MULTILINE)
)


def on_site() -> str:
    return "".join(with_docstrings(page.read_text(encoding="utf-8")) for page in reference.pages())


@pytest.mark.parametrize("module", [*PUBLIC_MODULES, "outbox_plugin.consuming.spark", "outbox_plugin.dagster.spark"])
def test_every_public_name_is_on_the_site(module: str) -> None:
    described = re.findall(rf"^## `{re.escape(module)}`$(.*?)(?=^## |\Z)", on_site(), re.MULTILINE | re.DOTALL)
    names = set(re.findall(r"^### (\w+)$", "".join(described), re.MULTILINE))
    missing = set(reference.public_names(module)) - names
    elsewhere = {
        name
        for name in missing
        for other in PUBLIC_MODULES
        if other != module and getattr(import_module(other), name, None) is getattr(import_module(module), name)
    }
    assert missing == elsewhere
    assert names


def test_docstrings_are_read_when_the_site_is_built() -> None:
    """Models keep their tables of fields, as their descriptions are no docstrings."""
    page = with_docstrings((DOCS / "reference" / "python.md").read_text(encoding="utf-8"))
    assert "### Outbox\n\n```text\nOutbox(table: " in page
    assert "\n::: outbox_plugin.Outbox\n" in page
    assert "Writes events to the outbox in the caller's transaction" not in page
    assert "\n| `bootstrap_servers` |" in page
    assert with_docstrings("### Outbox\n\nOf a person.\n") == "### Outbox\n\nOf a person.\n"


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r"^ +- (?:[^\n]*: )?(\S+\.md)$", NAVIGATION, re.MULTILINE)
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted([*pages, *TOP_PAGES.values()])


def test_the_navigation_is_by_what_a_reader_wants() -> None:
    """Diátaxis: each page serves learning, doing, looking up or understanding; its folder says which."""
    sections = re.findall(r"^  - ([\w-]+):\n((?:      .*\n)+)", NAVIGATION, re.MULTILINE)
    folders = {section: set(re.findall(r"(\S+)/\S+\.md$", pages, re.MULTILINE)) for section, pages in sections}
    assert folders == {
        "Home": set(),
        "Tutorials": {"tutorials"},
        "How-to": {"how-to"},
        "Reference": {"reference"},
        "Explanation": {"explanation"},
    }


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[a](how-it-works.md#fencing)", "[a](how-it-works.md#fencing)"),
        ("[a](../how-to/upgrade.md)", "[a](../how-to/upgrade.md)"),
        ("[a](../../CHANGELOG.md#unreleased)", "[a](../CHANGELOG.md#unreleased)"),
        ("[a](../../README.md)", "[a](../introduction.md)"),
        ("[a](../../tests/conftest.py)", "a"),
        ("[a](nowhere.md)", "[a](nowhere.md)"),
        ("[a](../../nowhere.md)", "[a](../../nowhere.md)"),
        ("[a](https://example.com/x.md)", "[a](https://example.com/x.md)"),
        ("[a](#here)", "[a](#here)"),
    ],
)
def test_links_of_a_page_work_on_the_site(link: str, expected: str) -> None:
    assert with_site_links(link, FAILURES, "explanation/failures.md", "") == expected


def test_links_of_pages_at_the_top_work_on_the_site() -> None:
    top = CHECKOUT / "README.md"
    text = "[a](docs/README.md) [b](docs/how-to/upgrade.md) ![c](docs/images/check.png) [d](CHANGELOG.md)"
    assert with_site_links(text, top, "introduction.md", "") == (
        "[a](README.md) [b](how-to/upgrade.md) ![c](images/check.png) [d](CHANGELOG.md)"
    )


def test_links_to_other_files_lead_into_a_repository_that_has_an_address() -> None:
    link = with_site_links("[a](../../tests/conftest.py#L3)", FAILURES, "explanation/failures.md", "https://host/us")
    assert link == "[a](https://host/us/blob/main/tests/conftest.py#L3)"
