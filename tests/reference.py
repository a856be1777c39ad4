"""The pages of public names, made from signatures and docstrings: `python -m tests.reference` writes them."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

import outbox_plugin.errors
from tests.documents import DOCS

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
_MADE = "Made from docstrings, by `python -m tests.reference`."
_PYTHON = (
    "outbox_plugin",
    "outbox_plugin.encoding",
    "outbox_plugin.claim_check",
    "outbox_plugin.operate",
    "outbox_plugin.spark",
    "outbox_plugin.testing",
)
_CONSUMING = (
    "outbox_plugin.inbox",
    "outbox_plugin.inbox.django",
    "outbox_plugin.inbox.sqlalchemy",
    "outbox_plugin.consuming",
    "outbox_plugin.consuming.spark",
)
_COORDINATION = ("outbox_plugin.coordination",)
_DAGSTER = ("outbox_plugin.dagster", "outbox_plugin.dagster.spark")
_WITHOUT_ALL = {  # Modules that import what an extra brings, and name no `__all__`.
    "outbox_plugin.consuming.spark": ["consume_range_with_spark", "foreach_batch"],
    "outbox_plugin.inbox.django": ["database_of"],
    "outbox_plugin.inbox.sqlalchemy": ["async_session_of", "session_of"],
    "outbox_plugin.dagster.spark": ["OutboxIOManager", "SparkResource"],
}
_DESCRIBED_ELSEWHERE = {("outbox_plugin.consuming", "Received")}  # It is the inbox's.


def public_names(module: str) -> list[str]:
    """The public names of a module, in the order of its `__all__`."""
    return list(_WITHOUT_ALL.get(module) or importlib.import_module(module).__all__)


def pages() -> dict[Path, str]:
    """Each page that is made, and its text."""
    texts = {
        "dagster.md": _page("Dagster: every public name", _DAGSTER),
        "python.md": _page("Python: emit, relay, operate, Spark, test", _PYTHON) + "\n".join(_errors()) + "\n",
        "python-consuming.md": _page("Python: inbox and ranges", _CONSUMING),
        "python-coordination.md": _page("Python: coordination", _COORDINATION),
    }
    return {DOCS / "reference" / name: text for name, text in texts.items()}


def _page(title: str, modules: tuple[str, ...]) -> str:
    lines = [f"# {title}", "", _MADE]
    for module in modules:
        lines += ["", f"## `{module}`"]
        names = [name for name in public_names(module) if (module, name) not in _DESCRIBED_ELSEWHERE]
        for name in names:
            lines += ["", f"### {name}", "", *_described(name, getattr(importlib.import_module(module), name))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _described(name: str, thing: Any) -> Iterator[str]:
    fields = getattr(thing, "model_fields", None)
    if fields is None:
        yield from ("```text", f"{name}{_signature(thing)}", "```", "")
    yield from _sections(inspect.getdoc(thing) or "")
    if fields is not None:
        yield from _fields(fields)
    elif inspect.isclass(thing):
        yield from _sections(_own_doc(thing.__dict__.get("__init__")))
        for method, each in _methods(thing):
            yield from ("", f"**`{method}`**", "", *_sections(_own_doc(each)))


def _fields(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    """A table of fields, and one for each field that is a list of objects."""
    yield from ("", "| field | default | |", "|---|---|---|")
    for name, field in fields.items():
        default = "" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        if field.default_factory is not None:
            default = "a new one each time"
        yield f"| `{name}` | {default} | {field.description or ''} |"
    for name, field in fields.items():
        for listed in get_args(field.annotation):
            if inspect.isclass(listed) and issubclass(listed, BaseModel):
                yield from ("", f"Each of `{name}`:", *_fields(listed.model_fields))


def _methods(thing: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that are ours and say what they do, in the order of the source."""
    seen = set()
    for owner in thing.__mro__:
        if owner.__module__.startswith("outbox_plugin"):
            for name, each in vars(owner).items():
                if not name.startswith("_") and name not in seen and _own_doc(each):
                    seen.add(name)
                    call = "" if isinstance(each, property) else _signature(getattr(thing, name))
                    yield f"{name}{call}", each


def _own_doc(thing: Any) -> str:
    function = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
    is_ours = inspect.isfunction(function) or isinstance(function, property)
    return inspect.cleandoc(function.__doc__ or "") if is_ours else ""


def _signature(thing: Any) -> str:
    """Without modules and the quotes of annotations, which are texts; so are some defaults, whose quotes stay."""
    if inspect.isclass(thing) and issubclass(thing, BaseException) and thing.__init__ is Exception.__init__:
        return ""  # A built-in constructor has no signature.
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(inspect.signature(thing)))
    text = re.sub(r"\b(?:[a-z_]\w*\.)+([A-Za-z_]\w*)", r"\1", text)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)
    return re.sub(r"^\(self(?:, )?", "(", text)


def _sections(text: str) -> Iterator[str]:
    """A docstring as Markdown: what it lists is a list, and an example of several lines is a block."""
    lines = text.splitlines()
    while lines:
        line = lines.pop(0)
        headed = _SECTION.match(line)
        if headed is None:
            yield line
            continue
        body = []
        while lines and (not lines[0] or lines[0].startswith("    ")):
            body.append(lines.pop(0)[4:])
        yield from ("", f"{headed[1]}:", "")
        if headed[1].startswith("Example") and not body[0].startswith("`"):
            yield from ("```text", *"\n".join(body).rstrip().splitlines(), "```", "")
        else:
            listed = "\n".join(f"- {each}" if each[:1].strip() else each for each in body)
            yield from (*re.sub(r"\n +", " ", listed).splitlines(), "")


def _errors() -> Iterator[str]:
    yield from ("", "## `outbox_plugin.errors`", "", "| error | is a | |", "|---|---|---|")
    for name, each in vars(outbox_plugin.errors).items():
        if inspect.isclass(each) and issubclass(each, outbox_plugin.errors.OutboxError):
            base = each.__base__.__name__ if each.__base__ else ""
            yield f"| `{name}` | `{base}` | {(inspect.getdoc(each) or '').splitlines()[0]} |"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
