"""Connections that do not wait for ever: a statement that a dead path has swallowed ends in an error."""

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

from outbox_plugin.schema.silent_server import PROBE_SECONDS, Finding, ProbeAction, Silence

Row = TypeVar("Row", covariant=True)
T = TypeVar("T")

PROBE_NAME = "outbox probe"
_NOT_AT_WORK = {None, "idle", "idle in transaction", "idle in transaction (aborted)"}


class NoAnswer(psycopg.OperationalError):
    """The server, or the way to it, does not answer; the connection has been closed."""


class WatchedConnection(psycopg.Connection[Row]):
    """A connection that gives up a silent server, as `silence` decides. `options` are what a probe connects with."""

    probe_options: dict[str, Any]
    probe_query: sql.Composed
    probe_name: str | None = None  # Of no other session; None where ours may be another's too.

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's own; all that psycopg waits for goes through here.

        Raises:
            NoAnswer: the path to the server is dead; the connection is closed.
        """
        return super().wait(_watched(gen, self.pgconn, lambda: _probe(self)), *args, **kwargs)


class WatchedAsyncConnection(psycopg.AsyncConnection[Row]):
    """As `WatchedConnection`, for asyncio."""

    probe_options: dict[str, Any]
    probe_query: sql.Composed
    probe_name: str | None = None

    async def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's own, but raises NoAnswer and closes the connection where the path to the server is dead."""
        return await super().wait(_watched(gen, self.pgconn, lambda: _probe(self)), *args, **kwargs)


class _ProbeConnection(psycopg.Connection[Row]):
    """The probe's own connection. None of its waits is longer than anybody waits for a probe, so its thread ends."""

    def wait(self, gen: PQGen[T], *args: Any, **kwargs: Any) -> T:
        return super().wait(_until(gen, time.monotonic() + PROBE_SECONDS), *args, **kwargs)


class _Probe:
    """A question to the server on a thread of its own; `finding` is None until it is answered."""

    def __init__(self, ask: Callable[[], Finding]) -> None:
        self.finding: Finding | None = None
        self._ask = ask
        threading.Thread(target=self._run, name="outbox-probe", daemon=True).start()

    def _run(self) -> None:
        self.finding = self._ask()


def _probe(suspect: WatchedConnection[Any] | WatchedAsyncConnection[Any]) -> _Probe:
    """Ask the server whether it works on what `suspect` has sent, on a new connection to the same address."""
    pgconn = suspect.pgconn
    address = {"host": pgconn.host, "hostaddr": pgconn.hostaddr, "port": pgconn.port}
    options = suspect.probe_options | {name: value.decode() for name, value in address.items() if value}
    pid, query, name = pgconn.backend_pid, suspect.probe_query, suspect.probe_name
    return _Probe(lambda: _finding(options, query, pid, name))


def _finding(options: dict[str, Any], query: sql.Composed, pid: int, name: str | None) -> Finding:
    """What a probe finds.

    A pooler makes up process ids. Where it passes names on, as the probe sees by its own, the session is found by its
    name. A statement that the pooler keeps waiting for a session has had one by the time that the probe has.
    """
    try:
        with closing(_ProbeConnection.connect(**options, autocommit=True, prepare_threshold=None)) as connection:
            found = connection.execute(query, {"pid": pid, "name": name or PROBE_NAME}).fetchall()
            [(own_pid, state, own_name, works_for_name)] = found
            if own_pid != connection.pgconn.backend_pid:
                known = name is not None and own_name.startswith(PROBE_NAME)
                return Finding.WORKING if works_for_name or not known else Finding.LOST
            return Finding.LOST if state in _NOT_AT_WORK else Finding.WORKING
    except psycopg.Error as error:
        return Finding.WORKING if _said_by_the_server(error) else Finding.LOST


def _said_by_the_server(error: psycopg.Error) -> bool:
    """Whether a server that answers refused the probe, as one does that has no connection to spare.

    psycopg gives no SQLSTATE for it. libpq writes two spaces after the severity, in every language, and nowhere else.
    """
    return ":  " in str(error)


def _watched(gen: PQGen[T], connection: PGconn, probe_now: Callable[[], _Probe]) -> PQGen[T]:
    """Wait as `gen` asks, and look after the silence meanwhile.

    psycopg calls a waiting generator ten times a second while nothing arrives, so an answer that comes sooner costs
    next to nothing here.
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
                    silence.found(probe.finding, now)
                    probe = None
                action = silence.tick(now)
                if action is ProbeAction.PROBE:
                    probe = probe_now()
                elif action is ProbeAction.GIVE_UP:
                    connection.finish()
                    raise NoAnswer("the server does not answer: it is stuck, or the way to it is")
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
