"""Reads the documentation: its pages, their blocks and their links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = CHECKOUT / "docs"
PAGES = [*sorted(CHECKOUT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)]+)\)")
_FILE = re.compile(r"# (\S+\.(?:py|yaml))\n")


class Block(NamedTuple):
    """A block of a page: its language, its text, and the file that its first line names."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        named = _FILE.match(self.text)
        return named[1] if named else None


def blocks(page: str, language: str | None = None) -> list[Block]:
    """The blocks of a page under `docs/`, in their order."""
    return blocks_of(DOCS / page, language)


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of any page, in their order."""
    found = [Block(*parts) for parts in _BLOCK.findall(page.read_text(encoding="utf-8"))]
    return [block for block in found if language in (None, block.language)]


def name_of(page: Path) -> str:
    """A page's path from the checkout, for the ids of tests."""
    return page.relative_to(CHECKOUT).as_posix()


def dead_links(page: Path) -> list[str]:
    """The links of a page that lead to no file of the checkout, or to no heading of a page."""
    return [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if not _leads_somewhere(page, link)]


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not (target.exists() and target.is_relative_to(CHECKOUT)):
        return False
    return not anchor or anchor in anchors(target)


def linked_pages(page: Path) -> list[Path]:
    """The pages that a page links to."""
    links = [link.partition("#")[0] for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    return [(page.parent / link).resolve() for link in links if link.endswith(".md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, which GitHub makes of the headings' texts."""
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
