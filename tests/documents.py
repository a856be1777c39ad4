"""The documentation as tests read it: its blocks, and the reference that is made from docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import outbox_plugin.dagster

DOCS = Path(__file__).resolve().parents[1] / "docs"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
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
    """The blocks of a page, in their order."""
    found = [Block(*parts) for parts in _BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))]
    return [block for block in found if language in (None, block.language)]


def reference() -> str:
    """The page of every public name, from its signature and docstring."""
    parts = ["# Reference", "", "Made from the docstrings of `outbox_plugin.dagster`: `python -m tests.documents`."]
    for name in outbox_plugin.dagster.__all__:
        parts += ["", *_described(name, getattr(outbox_plugin.dagster, name))]
    return "\n".join(parts) + "\n"


def _described(name: str, thing: Any) -> list[str]:
    said = [f"## {name}", ""]
    fields = getattr(thing, "model_fields", None)
    if fields is None:
        signature = re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", str(inspect.signature(thing))).replace("'", "")
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
    (DOCS / "reference.md").write_text(reference(), encoding="utf-8")
