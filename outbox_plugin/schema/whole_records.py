"""The parts of statements that name the columns of whole records, or stand for them where a table lacks them.

`outbox migrate` adds the columns to a table. A view has only those that it is made with.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import sql

from outbox_plugin.schema.statements import statement

COLUMNS = ("kafka_key_bytes", "kafka_value_bytes", "kafka_header_bytes", "kafka_partition", "kafka_timestamp")
_NOTHING = sql.SQL("")
_LACKING: dict[str, sql.Composable] = {
    "is_whole": sql.SQL("false"),
    "whole_value_bytes": sql.SQL("0"),
    "whole_header_bytes": sql.SQL("0"),
    "whole_columns": sql.SQL(
        "NULL::pg_catalog.bytea, NULL::pg_catalog.bytea, NULL::pg_catalog.bytea[], NULL::pg_catalog.int4, "
        "NULL::pg_catalog.timestamptz"
    ),
    "more_columns": _NOTHING,
    # As JSON, because the table of dead letters may lack the column as well.
    "does_not_fit": sql.SQL("(pg_catalog.to_jsonb(letter) OPERATOR(pg_catalog.->>) 'kafka_header_bytes') IS NOT NULL"),
    "replayed_header_values": sql.SQL("kafka_header_values OPERATOR(pg_catalog.||) id::pg_catalog.text"),
    "replayed_columns": _NOTHING,
}


def takes_whole_records(connection: psycopg.Connection[tuple[Any, ...]], table: str) -> bool:
    """Whether the outbox `table` has the columns."""
    [(takes,)] = connection.execute(statement("identity", "takes_whole_records", table)).fetchall()
    return bool(takes)


def whole_record_parts(table: str, *, has_columns: bool) -> dict[str, sql.Composable]:
    """What `statement` puts in where a statement names one of these parts."""
    if not has_columns:
        return _LACKING
    names = sql.SQL(", ").join(map(sql.Identifier, COLUMNS))
    expressions = {
        name: sql.SQL("({})").format(statement(noun, name, table))
        for noun, name in (
            ("window", "is_whole"),
            ("window", "whole_value_bytes"),
            ("window", "whole_header_bytes"),
            ("history", "replayed_header_values"),
        )
    }
    return {
        **expressions,
        "does_not_fit": sql.SQL("false"),
        "whole_columns": names,
        "more_columns": sql.SQL(", {}").format(names),
        "replayed_columns": sql.SQL(", {}").format(statement("history", "replayed_columns", table)),
    }
