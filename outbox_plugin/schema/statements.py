"""Loads the named statements of `queries/*.sql` and composes table names into them.

A statement starts at a line `-- name: …`, followed by comment lines that say what it does. Table names stand as
`{outbox}`, `{outbox_identity}` and so on; they are composed as identifiers, never pasted as text. `{quoted_outbox}` is
the same as a text for Postgres to look the table up by, which finds one with capitals too. Functions, operators and
types are named in full when a file is loaded: see `qualify`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from psycopg import sql

from outbox_plugin.errors import InvalidSetting
from outbox_plugin.schema.qualify import qualified

_NAME_LINE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def compose(text: str, table: str, **parts: sql.Composable) -> sql.Composed:
    """`text` with the outbox `table`, its functions and our other tables, all of one schema, put in as identifiers.

    `parts` are put in where `text` names them.
    """
    *schema, name = table.rsplit(".", 1)
    named_after_it = {"outbox": name, "outbox_emit": f"{name}_emit", "outbox_wake_up": f"{name}_wake_up"}
    names = set(re.findall(r"(?<!\{)\{(?:quoted_)?(outbox\w*)\}", text))
    tables = {each: sql.Identifier(*schema, named_after_it.get(each, each)) for each in names}
    quoted = {f"quoted_{each}": sql.Literal(name.as_string()) for each, name in tables.items()}
    return sql.SQL(text).format(**tables, **quoted, **parts)


@cache
def _statements(noun: str) -> dict[str, str]:
    text = files("outbox_plugin.schema").joinpath("queries", f"{noun}.sql").read_text(encoding="utf-8")
    _, *parts = _NAME_LINE.split(text)
    return dict(zip(parts[::2], (qualified(part.strip()) for part in parts[1::2]), strict=True))


def statement(noun: str, name: str, table: str, **parts: sql.Composable) -> sql.Composed:
    """The statement `name` of `queries/<noun>.sql` for the outbox `table`; `parts` are put in where it names them.

    Raises:
        KeyError: there is no statement of that name.
    """
    text = _statements(noun)[name]
    if "{id_sequence}" in text:
        parts = {**parts, "id_sequence": compose(_statements("identity")["id_sequence"], table)}
    return compose(text, table, **parts)


def check_name(table: str, known_as: Sequence[tuple[Any, ...]]) -> None:
    """See that the outbox `table` is called by the name that it is known by: another name would make it two outboxes.

    Raises:
        InvalidSetting: it is known by another one. `known_as` is what the statement of that name has found.
    """
    for (name,) in known_as:
        if name != table:
            raise InvalidSetting(
                f"OUTBOX_TABLE: the table {table!r} is known as {name!r} here; set OUTBOX_TABLE to that"
            )
