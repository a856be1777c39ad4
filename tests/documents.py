"""The documentation as tests read it: its blocks, and the reference that is made from docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import outbox_plugin.dagster

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = CHECKOUT / "docs"
REFERENCE = DOCS / "reference" / "dagster.md"
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
    """What a link to a heading of a page is called, as GitHub makes it of the heading's text."""
    prose = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def reference() -> str:
    """The page of every public name, from its signature and docstring."""
    parts = [
        "# Dagster: every public name",
        "",
        "Made from the docstrings of `outbox_plugin.dagster`: `python -m tests.documents`.",
    ]
    for name in outbox_plugin.dagster.__all__:
        parts += ["", *_described(name, getattr(outbox_plugin.dagster, name))]
    return "\n".join(parts) + "\n"


def _described(name: str, thing: Any) -> list[str]:
    said = [f"## {name}", ""]
    fields = getattr(thing, "model_fields", None)
    if fields is None:
        signature = re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", str(inspect.signature(thing)))
        signature = re.sub(r"(: |-> )'([^']*)'", r"\1\2", signature)  # Annotations are texts; so are some defaults.
        said += ["```text", f"{name}{signature}", "```", ""]
    headed = re.sub(r"^(Raises:|Example:)$", r"\1\n", inspect.getdoc(thing) or "", flags=re.MULTILINE)
    said += [re.sub(r"^    ", "- ", headed, flags=re.MULTILINE)]
    if fields is not None:
        said += ["", "| field | default | |", "|---|---|---|"]
        for field, each in fields.items():
            default = "" if each.is_required() else f"`{each.default!r}`"
            said.append(f"| `{field}` | {default} | {each.description or ''} |")
    return said


if __name__ == "__main__":
    REFERENCE.write_text(reference(), encoding="utf-8")
