"""Lets writers tell when a row is inserted into the outbox of a tenant at rest: LISTEN, on a connection of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from typing import Any

import psycopg

from outbox_plugin.core.backoff import Backoff
from outbox_plugin.errors import ServerRefused
from outbox_plugin.printable import logger_of, one_line
from outbox_plugin.schema.connection import connect
from outbox_plugin.schema.statements import statement
from outbox_plugin.settings import Settings

logger = logger_of("outbox_plugin.harvester")

ARM_AGAIN_SECONDS = 5.0  # A lock may be free by now, and a trigger may have been created.
_WAIT_SECONDS = 0.25  # After so long at the latest, it is seen which tenants rest now.
_CLOSE_SECONDS = 1.0  # A thread whose server hangs is not waited for.
_RETRY_FIRST, _RETRY_LAST = 1.0, 60.0


class TenantWakeUp:
    """Holds the wake-up locks of tenants at rest, as sleeping leaders do, so that their writers notify.

    It takes the lock of the first shard alone: a writer notifies if the leader of any shard sleeps. Only outboxes with
    the trigger of `outbox migrate --wake-up` have such writers. Tenants are polled all the same: no writer notifies us
    while Postgres is away, or has little room for locks, or another process holds the tenant's lock.
    """

    def __init__(self, pattern: Settings, notified: Callable[[set[str]], None]) -> None:
        """Nothing is done yet.

        Args:
            pattern: their `table` matches the tenants' outboxes.
            notified: is called with the schemas of tenants at rest for which rows were inserted, on a thread of ours.
        """
        self._pattern = pattern
        self._notified = notified
        self._resting: frozenset[str] = frozenset()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, resting: Collection[str]) -> None:
        """Listen for the writers of these tenants, and of no others.

        Raises:
            RuntimeError: no thread can be started.
        """
        self._resting = frozenset(resting)
        if self._thread is None and self._resting:
            thread = threading.Thread(target=self._run, name="outbox-tenant-wake-up", daemon=True)
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Release all locks. Safe to call twice."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        backoff, told = Backoff(_RETRY_FIRST, _RETRY_LAST), ""
        while not self._closed.is_set():
            try:
                with closing(connect(self._pattern, purpose="outbox tenants (wake-up)")) as connection:
                    self._listen(_Locks(self._pattern, connection), backoff)
            except (psycopg.Error, ServerRefused) as error:  # Whoever reads the tenants' activity says so.
                logger.debug("writers do not wake tenants at rest: %s", one_line(error))
            except Exception as error:  # Whatever it is, the tenants are polled, and it may pass.
                if (reason := one_line(error)) != told:
                    logger.warning("writers do not wake tenants at rest: %s", reason)
                told = reason
            self._closed.wait(backoff.wait())

    def _listen(self, locks: _Locks, backoff: Backoff) -> None:
        arm_at, armed_for = time.monotonic(), frozenset[str]()
        while not self._closed.is_set():
            resting, now = self._resting, time.monotonic()
            if now >= arm_at or resting - armed_for:
                locks.arm(resting)
                backoff.succeeded()
                arm_at, armed_for = now + ARM_AGAIN_SECONDS, resting
            else:
                locks.disarm_all_but(resting)
            if schemas := locks.notifications(_WAIT_SECONDS):
                self._notified(schemas)


class _Locks:
    """The wake-up locks that one connection holds."""

    def __init__(self, pattern: Settings, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Hold none, and do not listen yet."""
        self._pattern = pattern
        self._connection = connection
        self._held: dict[str, int] = {}  # By schema.
        self._listens = False

    def arm(self, resting: Collection[str]) -> None:
        """Hold the locks of these tenants, as far as they have one, it is free, and Postgres has room for it."""
        keys: Mapping[str, int] = dict(self._query("wake_up_locks", name=self._name, schemas=list(resting)))
        self._release([schema for schema, key in self._held.items() if keys.get(schema) != key])
        missing = {key: schema for schema, key in keys.items() if schema not in self._held}
        for (key,) in self._query("arm", locks=list(missing)) if missing else ():
            self._held[missing[key]] = key
        if self._held and not self._listens:
            self._connection.execute(statement("wake_up", "listen", self._pattern.table))
            self._listens = True

    def disarm_all_but(self, resting: Collection[str]) -> None:
        """Release the locks of all other tenants."""
        self._release([schema for schema in self._held if schema not in resting])

    def notifications(self, wait_seconds: float) -> set[str]:
        """The schemas of ours that writers have named since the last call; waits for the first writer, whoever it is.

        Anybody may notify, and name any table.
        """
        named = {each.payload for each in self._connection.notifies(timeout=wait_seconds, stop_after=1)}
        return {schema for schema in self._held if self._pattern.table_of_schema(schema) in named}

    def _release(self, schemas: Collection[str]) -> None:
        if schemas:
            self._query("disarm", locks=[self._held.pop(schema) for schema in schemas])

    @property
    def _name(self) -> str:
        return self._pattern.table.partition(".")[2]

    def _query(self, statement_name: str, **values: object) -> list[tuple[Any, ...]]:
        found = self._connection.execute(statement("tenants", statement_name, self._pattern.table), values)
        return found.fetchall()
