"""Connections to Postgres, and its errors in our words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from outbox_plugin.errors import SchemaMissing, ServerRefused, StoreUnavailable
from outbox_plugin.settings import Settings

CONNECT_TIMEOUT_SECONDS = 5
OLDEST_POSTGRES = 15  # Its UNIQUE NULLS NOT DISTINCT, and multiranges of 14.
# A server that vanished without a word is noticed after about 10 s, not after the kernel's two hours.
_KEEPALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


def connect(settings: Settings, *, purpose: str = "outbox") -> psycopg.Connection[tuple[Any, ...]]:
    """A connection in autocommit mode that works behind a transaction-mode pooler: nothing is prepared.

    Raises:
        psycopg.Error: as psycopg says it; see `reported` and `reported_as_refusal`.
        ServerRefused: the server is older than `OLDEST_POSTGRES`.
    """
    connection = psycopg.connect(**_options(settings, purpose), autocommit=True, prepare_threshold=None)
    if (version := connection.info.server_version) < OLDEST_POSTGRES * 10_000:
        connection.close()
        raise _too_old(version)
    return connection


async def connect_async(settings: Settings, *, purpose: str = "outbox") -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """As `connect`, for asyncio."""
    options = _options(settings, purpose)
    connection = await psycopg.AsyncConnection.connect(**options, autocommit=True, prepare_threshold=None)
    if (version := connection.info.server_version) < OLDEST_POSTGRES * 10_000:
        await connection.close()
        raise _too_old(version)
    return connection


def _too_old(version: int) -> ServerRefused:
    given = f"{version // 10_000}.{version % 10_000}"
    return ServerRefused(
        f"Postgres {given}, as OUTBOX_DSN names it, is too old: version {OLDEST_POSTGRES} or newer is needed"
    )


def _options(settings: Settings, purpose: str) -> dict[str, Any]:
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    return {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "application_name": purpose, **_KEEPALIVE, **given}


@contextmanager
def reported() -> Iterator[None]:
    """Turn psycopg's errors into ours, for a harvester that lives on.

    Raises:
        StoreUnavailable: whatever Postgres said; the cure is to wait and try again.
    """
    try:
        yield
    except psycopg.Error as error:
        raise StoreUnavailable(f"Postgres: {one_line(error)}") from error


@contextmanager
def reported_as_refusal(settings: Settings) -> Iterator[None]:
    """Turn psycopg's errors into ours, at start: a user is there to mend what is wrong.

    Raises:
        SchemaMissing: a table, a column or the schema of the staging tables is not there.
        ServerRefused: the database cannot be reached, or says no.
    """
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise SchemaMissing(f"{one_line(error)}; run `outbox migrate` first (OUTBOX_TABLE={settings.table})") from None
    except psycopg.errors.InvalidSchemaName as error:
        raise SchemaMissing(f"{one_line(error)}; run `outbox migrate` as a role that may create schemas") from None
    except psycopg.Error as error:
        raise ServerRefused(f"Postgres, as OUTBOX_DSN names it: {one_line(error)}") from None


def one_line(error: BaseException) -> str:
    """The first line of what `error` says; its class where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
