"""Loads the named statements of `queries/*.sql` and composes table names into them.

A statement starts at a line `-- name: …`, followed by comment lines that say what it does. Table names are written as
`{outbox}`, `{outbox_identity}` and so on; they are composed as identifiers, never pasted as text. `{quoted_outbox}` is
the outbox's name as a quoted text, for `to_regclass`, so that names with capitals are found, too. Functions, operators
and types are qualified when a file is loaded: see `qualify`.
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
# Parts of other statements, from `identity.sql`.
_EXPRESSIONS = ("id_sequence", "id_column", "stored_in", "is_this_outbox", "reader", "is_row_secured", "lacks_policies")
_NAME_LINE = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def compose(text: str, table: str, **parts: sql.Composable) -> sql.Composed:
    """Insert the identifiers of an outbox into the text of a statement.

    Args:
        text: the statement, with the names in braces.
        table: the outbox. Its functions and other tables are of the same schema.
        parts: further parts, which are inserted where `text` names them.

    Raises:
        InvalidSetting: `text` names a table, and `table` stands for the outboxes of many schemas.
    """
    *schema, table_name = table.rsplit(".", 1)
    named_after_it = {
        "outbox": table_name,
        "outbox_emit": f"{table_name}_emit",
        "outbox_emit_record": f"{table_name}_emit_record",
        "outbox_summarise_keys": f"{table_name}_summarise_keys",
        "outbox_wake_up": f"{table_name}_wake_up",
    }
    names = set(re.findall(r"(?<!\{)\{(?:quoted_)?(outbox\w*)\}", text))
    if names and "*" in table:
        raise InvalidSetting(
            f"OUTBOX_TABLE: {table!r} names the outboxes of many schemas, and this needs one: set OUTBOX_TABLE to its "
            "table, and OUTBOX_GROUP to its group"
        )
    identifiers = {name: (*schema, named_after_it.get(name, name)) for name in names}
    tables = {name: identifier(each) for name, each in identifiers.items()}
    quoted = {f"quoted_{name}": _literal(sql.Identifier(*each).as_string()) for name, each in identifiers.items()}
    return sql.SQL(text).format(**tables, **quoted, **parts)


def identifier(names: Sequence[str]) -> sql.Composable:
    """A name with its schema, as an identifier without percent and dollar signs.

    psycopg would take a percent sign for a placeholder, and Postgres would take two dollar signs for the end of a
    function's body. So both are written as Unicode escapes of Postgres, which mean the same.
    """
    return sql.SQL(".").join(
        sql.SQL('U&"{}"'.format(_ESCAPED.sub(_unicode_escape, name.replace("\\", "\\\\").replace('"', '""'))))
        if _ESCAPED.search(name)
        else sql.Identifier(name)
        for name in names
    )


def _literal(text: str) -> sql.Composable:
    """A text literal without percent and dollar signs, as with `identifier`."""
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
    """A named statement.

    Args:
        noun: its file, `queries/<noun>.sql`.
        name: its name in the file.
        table: the outbox.
        **parts: inserted where the statement names them.

    Raises:
        KeyError: there is no statement of that name.
    """
    text = _statements(noun)[name]
    expressions = {name: statement("identity", name, table) for name in _EXPRESSIONS if f"{{{name}}}" in text}
    return compose(text, table, **expressions, **parts)


def check_name(table: str, known_as: Sequence[tuple[Any, ...]]) -> None:
    """Check that `table` is the name under which the outbox was migrated: another name would make it two outboxes.

    `known_as` is the result of the statement `known_as`.

    Raises:
        InvalidSetting: it was migrated under another name.
    """
    for (name,) in known_as:
        if name != table:
            raise InvalidSetting(
                f"OUTBOX_TABLE: the table {table!r} is known as {name!r} here; set OUTBOX_TABLE to that"
            )
