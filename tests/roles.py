"""Lets roles log in that a test has made, on a server that asks for passwords."""

from __future__ import annotations

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo


def let_in(dsn: str, role: str) -> None:
    """Let `role` connect with the password that `dsn` has."""
    password = sql.Literal(conninfo_to_dict(dsn)["password"])
    with psycopg.connect(dsn) as connection:
        connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), password))


def as_role(dsn: str, role: str) -> str:
    """`dsn` for `role`, after `let_in`."""
    return make_conninfo(dsn, user=role)
