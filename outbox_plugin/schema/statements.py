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

_ESCAPED = re.compile("[%$]")
# Parts of other statements; they stand in `identity.sql`.
_EXPRESSIONS = ("id_sequence", "id_column", "stored_in", "is_this_outbox", "reader", "is_row_secured")
_NAME_LINE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def compose(text: str, table: str, **parts: sql.Composable) -> sql.Composed:
    """`text` with the outbox `table`, its functions and our other tables, all of one schema, put in as identifiers.

    `parts` are put in where `text` names them.
    """
    *schema, table_name = table.rsplit(".", 1)
    named_after_it = {
        "outbox": table_name,
        "outbox_emit": f"{table_name}_emit",
        "outbox_summarise_keys": f"{table_name}_summarise_keys",
        "outbox_wake_up": f"{table_name}_wake_up",
    }
    names = set(re.findall(r"(?<!\{)\{(?:quoted_)?(outbox\w*)\}", text))
    identifiers = {name: (*schema, named_after_it.get(name, name)) for name in names}
    tables = {name: identifier(each) for name, each in identifiers.items()}
    quoted = {f"quoted_{name}": _literal(sql.Identifier(*each).as_string()) for name, each in identifiers.items()}
    return sql.SQL(text).format(**tables, **quoted, **parts)


def identifier(names: Sequence[str]) -> sql.Composable:
    """A name with its schema, which holds neither a percent sign nor a dollar sign.

    psycopg would take a percent sign for a placeholder, and Postgres two dollar signs for the end of a function's body.
    Both are written as Postgres's Unicode escapes, which mean the same.
    """
    return sql.SQL(".").join(
        sql.SQL('U&"{}"'.format(_ESCAPED.sub(_unicode_escape, name.replace("\\", "\\\\").replace('"', '""'))))
        if _ESCAPED.search(name)
        else sql.Identifier(name)
        for name in names
    )


def _literal(text: str) -> sql.Composable:
    """A text that, as `identifier`, holds neither a percent sign nor a dollar sign."""
    if not _ESCAPED.search(text):
        return sql.Literal(text)
    escaped = _ESCAPED.sub(_hexadecimal_escape, text.replace("\\", "\\\\").replace("'", "''"))
    return sql.SQL(f"E'{escaped}'")


def _unicode_escape(character: re.Match[str]) -> str:
    return f"\\{ord(character[0]):04x}"


def _hexadecimal_escape(character: re.Match[str]) -> str:
    return f"\\x{ord(character[0]):02x}"


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
    expressions = {name: statement("identity", name, table) for name in _EXPRESSIONS if f"{{{name}}}" in text}
    return compose(text, table, **expressions, **parts)


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
