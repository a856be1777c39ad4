"""Opens connections to Postgres, and turns psycopg's errors into those of this package."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, timeout_from_conninfo

from outbox_plugin.errors import SchemaMissing, ServerRefused, StoreUnavailable
from outbox_plugin.printable import one_line
from outbox_plugin.schema.statements import statement
from outbox_plugin.schema.watched_connection import PROBE_NAME, WatchedAsyncConnection, WatchedConnection
from outbox_plugin.settings import Settings

C = TypeVar("C", bound=psycopg.Connection[Any])

CONNECT_TIMEOUT_SECONDS = 3
CANCEL_SECONDS = 1.0  # How long a request to cancel may take.
CANCEL_PAUSE_SECONDS = 0.1  # Between two requests to cancel.
OLDEST_POSTGRES = 15  # It needs UNIQUE NULLS NOT DISTINCT, which 15 brought, and multiranges, which 14 brought.
# When the kernel gives up a connection whose packets vanish. A probe notices sooner, but a pooler may answer a probe.
_KEEPALIVE = {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": 3, "tcp_user_timeout": 3_000}
_PATIENT = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}


def connect(
    settings: Settings, *, purpose: str = "outbox", own_name: bool = False
) -> WatchedConnection[tuple[Any, ...]]:
    """A connection in autocommit mode that works behind a transaction-mode pooler: no statement is prepared.

    Time-outs for idle sessions that a role or a database sets do not end it; those in the DSN do.

    A statement may take as long as the server works on it. But if the path to the server is dead, the statement fails
    within about 2 seconds; see `silent_server`.

    Args:
        settings: their DSN names the server. Its time-outs and keepalives take precedence over ours.
        purpose: the session's `application_name`.
        own_name: make that name unique, so that a probe finds the session even behind a pooler. Do not use it if the
            name is changed while statements run. The session's transactions have no time-out either.

    Raises:
        psycopg.Error: the connection failed; see `errors_as_unavailable` and `errors_as_refusals`.
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
    """Like `connect`, for a long transaction that is costly to repeat: only TCP gives up a silent server."""
    options = _options(settings, purpose, _PATIENT)
    return _kept(_connected(psycopg.Connection[tuple[Any, ...]], options), settings, options)


async def connect_async(settings: Settings, *, purpose: str = "outbox") -> WatchedAsyncConnection[tuple[Any, ...]]:
    """Like `connect`, for asyncio."""
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
        if time_outs := _time_outs_to_disable(connection, options):
            await connection.execute(
                statement("probe", "disable_time_outs", settings.table), _disabled(connection, time_outs)
            )
    except BaseException:
        await connection.close()
        raise
    return connection


def _kept(connection: C, settings: Settings, options: dict[str, Any], *, takes_long: bool = False) -> C:
    """Keep time-outs that a role or a database sets from ending `connection`, and return it."""
    try:
        if time_outs := _time_outs_to_disable(connection, options, takes_long=takes_long):
            connection.execute(
                statement("probe", "disable_time_outs", settings.table), _disabled(connection, time_outs)
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _time_outs_to_disable(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any],
    options: dict[str, Any],
    *,
    takes_long: bool = False,
) -> list[str]:
    """The time-outs of a session that the server knows, and the DSN does not set."""
    since = {"idle_session_timeout": 14}
    if takes_long:
        since["transaction_timeout"] = 17
    return [
        time_out
        for time_out, version in since.items()
        if connection.info.server_version >= version * 10_000 and time_out not in str(options.get("options", ""))
    ]


def _disabled(
    connection: psycopg.Connection[Any] | psycopg.AsyncConnection[Any], time_outs: list[str]
) -> dict[str, object]:
    return {"pid": connection.info.backend_pid, "time_outs": time_outs}


def _too_old(version: int) -> ServerRefused:
    given = f"{version // 10_000}.{version % 10_000}"
    return ServerRefused(
        f"Postgres {given}, as OUTBOX_DSN names it, is too old: version {OLDEST_POSTGRES} or newer is needed"
    )


def _options(settings: Settings, purpose: str, keepalive: dict[str, int]) -> dict[str, Any]:
    given = conninfo_to_dict(settings.dsn.get_secret_value())
    defaults = {"connect_timeout": CONNECT_TIMEOUT_SECONDS, "application_name": purpose, **keepalive}
    # The role or the environment may set an encoding that lacks characters of a row.
    return {**defaults, **given, "client_encoding": "utf8"}


def _prepare_to_probe(
    connection: WatchedConnection[Any] | WatchedAsyncConnection[Any], settings: Settings, options: dict[str, Any]
) -> None:
    connection.probe_options = {**options, "application_name": PROBE_NAME, "connect_timeout": 2}
    connection.probe_query = statement("probe", "state_of_session", settings.table)


def _connect_seconds(options: dict[str, Any]) -> float:
    """How long all attempts to connect may take together, with one second for the look-up of host names."""
    return timeout_from_conninfo(options) * len(str(options.get("host") or options.get("hostaddr")).split(",")) + 1.0


def _connected(kind: type[C], options: dict[str, Any]) -> C:
    """Connect on a separate thread, because neither psycopg nor libpq limits the time of a host name's look-up."""
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


_SESSION_ENDED = "57P"  # How the SQLSTATEs begin by which a server says that it ends the session, or lets nobody in.
IS_STANDBY = (
    "Postgres: the server is a standby, or the role's transactions are read-only: rows and locks there are not those "
    "of the primary"
)


@contextmanager
def errors_as_unavailable() -> Iterator[None]:
    """Turn psycopg's errors into ours, for a running harvester.

    Raises:
        StoreUnavailable: for every error of Postgres: wait and try again.
    """
    try:
        yield
    except psycopg.errors.ActiveSqlTransaction as error:  # A standby raises it when a read asks for the right to write.
        raise StoreUnavailable(IS_STANDBY) from error
    except psycopg.Error as error:
        raise StoreUnavailable(f"Postgres: {one_line(error)}") from error


@contextmanager
def errors_as_refusals(settings: Settings) -> Iterator[None]:
    """Turn psycopg's errors into ours, at start, when the user can fix what is wrong.

    Raises:
        SchemaMissing: a table, a column, the outbox's schema or that of the staging tables is missing.
        ServerRefused: the database cannot be reached, or refuses.
    """
    try:
        yield
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise SchemaMissing(f"{one_line(error)}; run `outbox migrate` first (OUTBOX_TABLE={settings.table})") from None
    except psycopg.errors.InvalidSchemaName as error:
        raise SchemaMissing(f"{one_line(error)}; {_who_makes(error)}") from None
    except psycopg.errors.ReadOnlySqlTransaction as error:
        raise ServerRefused(
            f"Postgres, as OUTBOX_DSN names it: {one_line(error)}; name the primary, and a role whose transactions may "
            "write"
        ) from None
    except psycopg.Error as error:
        raise ServerRefused(f"Postgres, as OUTBOX_DSN names it: {one_line(error)}") from None


@contextmanager
def command_connection(
    settings: Settings, *, purpose: str = "outbox", is_patient: bool = False, role: str | None = None
) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A connection that a command works on. Errors of psycopg become ours, the loss of the connection another one.

    Args:
        settings: name the database.
        purpose: the session's name in `pg_stat_activity`.
        is_patient: connect as `connect_patiently` does.
        role: of `outbox grants`, which has the rights for the command. One who lacks them is told so.

    Raises:
        SchemaMissing, ServerRefused: as `errors_as_refusals`.
        StoreUnavailable: the connection was lost. If that was at the commit, nobody knows whether it was done.
    """
    open_connection = connect_patiently if is_patient else connect
    with errors_as_refusals(settings), closing(open_connection(settings, purpose=purpose)) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            if role is not None and isinstance(error, psycopg.errors.InsufficientPrivilege):
                raise ServerRefused(
                    f"Postgres, as OUTBOX_DSN names it: {one_line(error)}; grant what `outbox grants --role {role}` "
                    "prints"
                ) from None
            if not is_connection_lost(error):
                raise
            raise went_away(error) from None


def is_connection_lost(error: psycopg.Error) -> bool:
    """Whether it says that the session is over, and is not the answer to a statement, which has an SQLSTATE."""
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError)
    return error.sqlstate.startswith(_SESSION_ENDED) or error.diag.severity_nonlocalized in ("FATAL", "PANIC")


def went_away(error: psycopg.Error) -> StoreUnavailable:
    """What is raised for `error`, by which a command has lost its connection."""
    return StoreUnavailable(f"Postgres, as OUTBOX_DSN names it, went away: {one_line(error)}")


def _who_makes(missing: psycopg.errors.InvalidSchemaName) -> str:
    """How a schema comes to be. A migration makes that of Spark's staging tables alone."""
    if '"outbox_staging"' in str(missing):
        return "run `outbox migrate` as a role that may create schemas"
    return "create it, then run `outbox migrate`"


@contextmanager
def pipeline(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """A psycopg pipeline that raises the error of its first failed statement, and logs nothing.

    If the connection is lost, psycopg's own pipeline fails again at its end, and logs that as a warning.
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
    """Cancel the statements of another thread, repeatedly: a request that arrives between two statements has no effect.

    Args:
        connection: returns the connection that the thread uses now, or None.
        ended: waits for the given number of seconds, and returns whether the thread has finished with the connection.
        seconds: how long to go on. After that, the thread ends by itself.
    """
    deadline = time.monotonic() + seconds
    while not ended(0.0) and time.monotonic() < deadline:
        if (used := connection()) is not None and not used.closed:
            with suppress(psycopg.Error):
                used.cancel_safe(timeout=CANCEL_SECONDS)
        ended(CANCEL_PAUSE_SECONDS)
