"""Connections to Postgres, and its errors in our words."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo

from outbox_plugin.errors import SchemaMissing, ServerRefused, StoreUnavailable
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.watched_connection import PROBE_NAME, WatchedAsyncConnection, WatchedConnection
from outbox_plugin.settings import Settings

C = TypeVar("C", bound=psycopg.Connection[Any])

CONNECT_TIMEOUT_SECONDS = 3
CANCEL_SECONDS = 1.0  # How long a request to cancel may take.
CANCEL_PAUSE_SECONDS = 0.1  # Between two of them.
OLDEST_POSTGRES = 15  # Its UNIQUE NULLS NOT DISTINCT, and multiranges of 14.
# What the kernel does about packets that vanish. A probe is sooner, but a pooler may answer it.
_KEEPALIVE = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 3_000}
_PATIENT = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


def connect(
    settings: Settings, *, purpose: str = "outbox", own_name: bool = False
) -> psycopg.Connection[tuple[Any, ...]]:
    """A connection in autocommit mode that works behind a transaction-mode pooler: nothing is prepared.

    No time-out of a role's or a database's ends its session for being idle; but for what the DSN itself asks.

    A statement on it waits for as long as the server works on it, but ends within about 2 seconds where the way to the
    server is dead; see `silence`.

    Args:
        settings: their DSN names the server; what it says of time-outs and keepalives goes before ours.
        purpose: the session's `application_name`.
        own_name: make that a name of its own, by which a probe finds the session behind a pooler. Not where the name is
            changed while statements run. Such a session's transactions may also take as long as they need.

    Raises:
        psycopg.Error: as psycopg says it; see `reported` and `reported_as_refusal`.
        ServerRefused: the server is older than `OLDEST_POSTGRES`.
    """
    options = _options(settings, purpose, _KEEPALIVE)
    if own_name:  # Of at most 63 bytes.
        name = str(options["application_name"]).encode()[:48].decode(errors="ignore")
        options["application_name"] = f"{name} {secrets.token_hex(4)}"
    connection = _connected(WatchedConnection[tuple[Any, ...]], options)
    _prepare_to_probe(connection, settings, options)
    connection.probe_name = options["application_name"] if own_name else None
    return _kept(connection, settings, options, takes_long=own_name)


def connect_patiently(settings: Settings, *, purpose: str = "outbox") -> psycopg.Connection[tuple[Any, ...]]:
    """As `connect`, for a long transaction that would have to be done again as a whole: TCP alone ends its waits."""
    options = _options(settings, purpose, _PATIENT)
    return _kept(_connected(psycopg.Connection[tuple[Any, ...]], options), settings, options)


async def connect_async(settings: Settings, *, purpose: str = "outbox") -> psycopg.AsyncConnection[tuple[Any, ...]]:
    """As `connect`, for asyncio."""
    options = _options(settings, purpose, _KEEPALIVE)
    attempt = WatchedAsyncConnection[tuple[Any, ...]].connect(**options, autocommit=True, prepare_threshold=None)
    try:
        connection = await asyncio.wait_for(attempt, _connect_seconds(options))
    except TimeoutError:
        raise _no_connection(_connect_seconds(options)) from None
    if (version := connection.info.server_version) < OLDEST_POSTGRES * 10_000:
        await connection.close()
        raise _too_old(version)
    _prepare_to_probe(connection, settings, options)
    try:
        for query in _keeping(connection, settings, options):
            await connection.execute(query, {"pid": connection.info.backend_pid})
    except BaseException:
        await connection.close()
        raise
    return connection


def _kept(connection: C, settings: Settings, options: dict[str, Any], *, takes_long: bool = False) -> C:
    """`connection`, which no time-out of a role's or a database's ends any more; see `_keeping`."""
    try:
        for query in _keeping(connection, settings, options, takes_long=takes_long):
            connection.execute(query, {"pid": connection.info.backend_pid})
    except BaseException:
        connection.close()
        raise
    return connection


def _keeping(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    settings: Settings,
    options: dict[str, Any],
    *,
    takes_long: bool = False,
) -> list[sql.Composed]:
    """The statements that keep a session, but for what the DSN says of time-outs itself."""
    since = {"stay_idle": ("idle_session_timeout", 14)}
    if takes_long:
        since["take_long"] = ("transaction_timeout", 17)
    return [
        statement("probe", name, settings.table)
        for name, (time_out, version) in since.items()
        if connection.info.server_version >= version * 10_000 and time_out not in str(options.get("options", ""))
    ]


def _too_old(version: int) -> ServerRefused:
    given = f"{version // 10_000}.{version % 10_000}"
    return ServerRefused(
        f"Postgres {given}, as OUTBOX_DSN names it, is too old: version {OLDEST_POSTGRES} or newer is needed"
    )


def _options(settings: Settings, purpose: str, keepalive: dict[str, int]) -> dict[str, Any]:
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    defaults = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "application_name": purpose, **keepalive}
    # A role's or an environment's own encoding need not have every character of a row.
    return {**defaults, **given, "client_encoding": "utf8"}


def _prepare_to_probe(
    connection: WatchedConnection[Any] | WatchedAsyncConnection[Any], settings: Settings, options: dict[str, Any]
) -> None:
    connection.probe_options = {**options, "application_name": PROBE_NAME, "connect_timeout": 2}
    connection.probe_query = statement("probe", "state_of_session", settings.table)


def _connect_seconds(options: dict[str, Any]) -> float:
    """How long all attempts to connect may take together, one second for the look-up of names included."""
    return timeout_from_conninfo(options) * len(str(options.get("host") or options.get("hostaddr")).split(",")) + 1.0


def _connected(kind: type[C], options: dict[str, Any]) -> C:
    """Connect on a thread of its own: no time-out of psycopg's or libpq's bounds the look-up of a name."""
    connecting: Future[C] = Future()
    nobody_waits = threading.Event()

    def attempt() -> None:
        try:
            connection = kind.connect(**options, autocommit=True, prepare_threshold=None)
        except BaseException as error:
            connecting.set_exception(error)
        else:
            connecting.set_result(connection)
            if nobody_waits.is_set():
                connection.close()

    seconds = _connect_seconds(options)
    threading.Thread(target=attempt, name="outbox-connect", daemon=True).start()
    try:
        connection = connecting.result(seconds)
    except FutureTimeout:
        nobody_waits.set()
        if connecting.done() and connecting.exception() is None:
            connecting.result().close()
        raise _no_connection(seconds) from None
    if (version := connection.info.server_version) < OLDEST_POSTGRES * 10_000:
        connection.close()
        raise _too_old(version)
    return connection


def _no_connection(seconds: float) -> psycopg.OperationalError:
    return psycopg.errors.ConnectionTimeout(f"no connection within {seconds:.0f} s")


IS_STANDBY = (
    "Postgres: the server is a standby, or the role's transactions are read-only: rows and locks there are not those "
    "of the primary"
)


@contextmanager
def reported() -> Iterator[None]:
    """Turn psycopg's errors into ours, for a harvester that lives on.

    Raises:
        StoreUnavailable: whatever Postgres said; the cure is to wait and try again.
    """
    try:
        yield
    except psycopg.errors.ActiveSqlTransaction as error:  # What a standby says when a read asks for the right to write.
        raise StoreUnavailable(IS_STANDBY) from error
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


@contextmanager
def pipeline(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A pipeline of psycopg's that raises what a statement in it raised, and logs nothing of its own.

    Where the connection is lost in it, psycopg fails once more as it leaves the pipeline, and logs that as a warning.
    """
    lost: psycopg.Error | None = None
    try:
        with connection.pipeline():
            try:
                yield
            except psycopg.Error as error:
                if not connection.closed:
                    raise
                lost = error
    except psycopg.Error:
        if lost is None:
            raise
    if lost is not None:
        raise lost


def cancel_until_ended(
    connection: Callable[[], psycopg.Connection[Any] | None], ended: Callable[[float], bool], seconds: float
) -> None:
    """Cancel what another thread runs, repeatedly: a request that comes between two statements cancels none.

    Args:
        connection: returns the connection that the thread uses now; None while it has none.
        ended: waits for so many seconds, and returns whether the thread needs the connection no more.
        seconds: after that time it is left to end by itself.
    """
    deadline = time.monotonic() + seconds
    while not ended(0.0) and time.monotonic() < deadline:
        if (used := connection()) is not None and not used.closed:
            with suppress(psycopg.Error):
                used.cancel_safe(timeout=CANCEL_SECONDS)
        ended(CANCEL_PAUSE_SECONDS)


def one_line(error: BaseException) -> str:
    """The first line of what `error` says; its class where it says nothing, or fails to."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # Of a user's own class.
        lines = []
    return lines[0] if lines else type(error).__name__
