"""Connections that do not wait for ever: if the path to the server is dead, a statement ends with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.pq.abc import PGconn

from outbox_plugin.schema.silent_server import PROBE_SECONDS, ProbeAction, ProbeResult, Silence

Row = TypeVar("Row", covariant=True)
T = TypeVar("T")

PROBE_NAME = "outbox probe"
_NOT_AT_WORK = {None, "idle", "idle in transaction", "idle in transaction (aborted)"}


class NoAnswer(psycopg.OperationalError):
    """The server does not answer, or cannot be reached; the connection has been closed."""


class WatchedConnection(psycopg.Connection[Row]):
    """A connection that gives up a silent server, as `silent_server` decides."""

    probe_options: dict[str, Any]
    probe_query: sql.Composed
    probe_name: str | None = None  # The session's application_name if it is unique, else None.
    requests = 0  # How often psycopg has asked the server for anything.
    noted_requests = 0  # How many of these a session knows to have made no savepoint.
    emit_cursor: type[psycopg.Cursor[Any]] = psycopg.Cursor  # What `emit` writes with, whatever the cursor_factory.

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server, as psycopg's own method does. Every wait of psycopg calls it.

        Args:
            gen: psycopg's protocol of one request, which waits for the socket.
            args: are passed on to psycopg.
            kwargs: are passed on to psycopg.

        Raises:
            NoAnswer: the path to the server is dead; the connection is closed.
        """
        self.requests += 1
        return super().wait(_watched(gen, self.pgconn, lambda: _probe(self)), *args, **kwargs)


class WatchedAsyncConnection(psycopg.AsyncConnection[Row]):
    """Like `WatchedConnection`, for asyncio."""

    probe_options: dict[str, Any]
    probe_query: sql.Composed
    probe_name: str | None = None
    requests = 0
    noted_requests = 0
    emit_cursor: type[psycopg.AsyncCursor[Any]] = psycopg.AsyncCursor

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """Wait for the server. If the path to it is dead, close the connection and raise NoAnswer.

        Args:
            gen: psycopg's protocol of one request, which waits for the socket.
            args: are passed on to psycopg.
            kwargs: are passed on to psycopg.
        """
        self.requests += 1
        return await super().wait(_watched(gen, self.pgconn, lambda: _probe(self)), *args, **kwargs)


class _ProbeConnection(psycopg.Connection[Row]):
    """The connection of a probe. It waits no longer than a probe may take, so that the probe's thread ends."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return super().wait(_until(gen, time.monotonic() + PROBE_SECONDS), *args, **kwargs)


class _Probe:
    """A probe, on its own thread. `finding` is None until it has a result."""

    def __init__(self, ask: Callable[[], ProbeResult]) -> None:
        self.finding: ProbeResult | None = None
        self._ask = ask
        threading.Thread(target=self._run, name="outbox-probe", daemon=True).start()

    def _run(self) -> None:
        self.finding = self._ask()


def _probe(suspect: WatchedConnection[Any] | WatchedAsyncConnection[Any]) -> _Probe:
    """Ask the server, on a new connection to the same address, whether it is working on what `suspect` has sent."""
    pgconn = suspect.pgconn
    address = {"host": pgconn.host, "hostaddr": pgconn.hostaddr, "port": pgconn.port}
    options = suspect.probe_options | {name: value.decode() for name, value in address.items() if value}
    pid, query, name = pgconn.backend_pid, suspect.probe_query, suspect.probe_name
    return _Probe(lambda: _finding(options, query, pid, name))


def _finding(options: dict[str, Any], query: sql.Composed, pid: int, name: str | None) -> ProbeResult:
    """The result of a probe.

    A pooler invents process ids, so behind one the session is looked up by its name, if the pooler passes names on: the
    probe checks that with its own name. If a pooler had to queue the suspect's statement, it queues the probe behind
    it: once the probe has a session, the statement has had one.
    """
    try:
        with closing(_ProbeConnection.connect(**options, autocommit=True, prepare_threshold=None)) as connection:
            found = connection.execute(query, {"pid": pid, "name": name or PROBE_NAME}).fetchall()
            [(own_pid, state, own_name, works_for_name)] = found
            if own_pid != connection.pgconn.backend_pid:
                known = name is not None and own_name.startswith(PROBE_NAME)
                return ProbeResult.WORKING if works_for_name or not known else ProbeResult.LOST
            return ProbeResult.LOST if state in _NOT_AT_WORK else ProbeResult.WORKING
    except psycopg.Error as error:
        return ProbeResult.WORKING if _answered_by_the_server(error) else ProbeResult.LOST


def _answered_by_the_server(error: psycopg.Error) -> bool:
    """Whether the error is an answer of the server: it is alive, but has no connection to spare, for example.

    psycopg has no SQLSTATE for errors at connecting. libpq writes two spaces after the severity of a server's error, in
    every language, and nowhere else.
    """
    return ":  " in str(error)


def _watched(gen: PQGen[T], connection: PGconn, probe_now: Callable[[], _Probe]) -> PQGen[T]:
    """Wait as `gen` asks, and watch the silence meanwhile.

    psycopg calls a waiting generator ten times a second while nothing arrives, so a fast answer costs next to nothing.
    """
    silence: Silence | None = None
    probe: _Probe | None = None
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if ready or connection.transaction_status != TransactionStatus.ACTIVE:
                silence = probe = None
            else:
                now = time.monotonic()
                silence = silence or Silence(now)
                if probe is not None and probe.finding is not None:
                    silence.report(probe.finding, now)
                    probe = None
                action = silence.tick(now)
                if action is ProbeAction.PROBE:
                    probe = probe_now()
                elif action is ProbeAction.GIVE_UP:
                    connection.finish()
                    raise NoAnswer("the server does not answer: it hangs, or the network path to it is broken")
            wanted = gen.send(ready)
    except StopIteration as done:
        result: T = done.value
        return result


def _until(gen: PQGen[T], deadline: float) -> PQGen[T]:
    """Wait as `gen` asks, up to the deadline."""
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise psycopg.OperationalError("the server does not answer the probe")
            wanted = gen.send(ready)
    except StopIteration as done:
        result: T = done.value
        return result
